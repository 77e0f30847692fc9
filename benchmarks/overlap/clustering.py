"""Counts the bytes that micro-batches save when samples that share ids are in the same micro-batch.

Token-balanced batches of Amazon's sports articles are cut into M = 8 micro-batches, as schedules cut them (NestPipe,
section V.C). A sample is a user's last 200 items, and users are drawn at random. For each id of a micro-batch a rank
sends 8 bytes, receives a row of DIM float32 and sends its gradient. The naive order is the samples' own. The bound is
M = 1, where no id travels twice. No order of samples reaches it. Schedules of micro-batches send the bound in any
order, since they send a row once (exchange/routing.py). The bytes of both orders assume micro-batches that share no
rows.
"""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import harness
from tf_fusedrec import ops, tf
from tf_fusedrec.data import cluster_samples
from tf_fusedrec.data.batches import cut, piece_bounds
from tf_fusedrec.data.plan import closest_cuts
from tf_fusedrec.data.rows import Ragged, splits_of
from tf_fusedrec.models.data_sets.interactions import by_user_and_time
from tf_fusedrec.models.data_sets.text_log import ID, INTEGER, read_log

DATA = harness.ROOT.parent / "shared/data/amazon_sports"
TOKENS = 32768  # of a batch of one rank
MICRO_BATCHES, DIM, LAST = 8, 64, 200
BYTES_OF_ID = 8 + 2 * 4 * DIM


def samples_of(data: pathlib.Path) -> Ragged:
    """Returns every user's last items, in order of time."""
    user, item, moment = "user_id", "item_id", "timestamp"
    columns = read_log(data / "interactions.csv.gz", {user: ID, item: ID, moment: INTEGER}).columns
    order = by_user_and_time(columns[user], columns[moment])
    users, row = np.unique(columns[user][order], return_inverse=True)
    return Ragged(columns[item][order], splits_of(np.bincount(row, minlength=len(users)))).keep_last(LAST)


def batches_of(samples: Ragged, tokens: int, count: int) -> Iterator[Ragged]:
    """Yields the first `count` batches of about `tokens` tokens, with samples at random. It yields at least one."""
    samples = samples.take(np.random.default_rng(0).permutation(len(samples.row_splits) - 1))
    begin = 0
    for number, end in enumerate(closest_cuts(samples.lengths(), tokens).tolist()):
        batch = samples.slice(begin, end)
        # The last batch of the data may be much smaller.
        if number == count or (number and len(batch.values) < tokens / 2):
            return
        yield batch
        begin = end


def _ragged(batch: Ragged) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(batch.values, batch.row_splits)


def ids_sent(batch: Ragged, micro_batches: int) -> int:
    """Returns the number of ids that travel: the distinct ids of every micro-batch."""
    return sum(len(np.unique(piece.values)) for piece in cut(_ragged(batch), micro_batches))


def clustered(batch: Ragged, micro_batches: int) -> Ragged:
    dataset = tf.data.Dataset.from_tensors({"item": _ragged(batch)})
    (out,) = cluster_samples(dataset, micro_batches, lambda features: features)
    return Ragged(out["item"].values.numpy(), out["item"].row_splits.numpy())


def _sorted(batch: Ragged) -> np.ndarray:
    """Returns the samples as one array that does not depend on their order: by length, then by ids."""
    rows = [batch.values[b:e].tolist() for b, e in zip(batch.row_splits[:-1], batch.row_splits[1:])]
    return np.array([number for row in sorted(rows) for number in (len(row), *row)])


def measure(count: int, data: pathlib.Path = DATA, tokens: int = TOKENS) -> dict[str, Any] | None:
    """Returns the mean bytes of a rank and step over `count` batches, and the median time of clustering.

    `ratio` is of clustered over naive bytes, `ratio_m1` of M = 1. None: the data are missing.
    """
    if not data.is_dir():
        return None
    naive, clustered_ids, once, seconds = [], [], [], []
    for batch in batches_of(samples_of(data), tokens, count):
        new = clustered(batch, MICRO_BATCHES)
        harness.check_equal("samples of a clustered batch", _sorted(new), _sorted(batch))
        naive.append(ids_sent(batch, MICRO_BATCHES))
        clustered_ids.append(ids_sent(new, MICRO_BATCHES))
        once.append(ids_sent(batch, 1))
        sizes = tf.constant(np.diff(piece_bounds(len(batch.row_splits) - 1, MICRO_BATCHES)))
        ids, row_splits = tf.constant(batch.values), tf.constant(batch.row_splits)
        begin = time.perf_counter()
        ops.cluster_samples([ids], [row_splits], sizes, tables=[0])
        seconds.append(time.perf_counter() - begin)
    return {
        "log": data.name, "tokens": tokens, "samples": len(batch.row_splits) - 1,
        "bytes_naive": BYTES_OF_ID * statistics.mean(naive),
        "bytes_clustered": BYTES_OF_ID * statistics.mean(clustered_ids),
        "bytes_m1": BYTES_OF_ID * statistics.mean(once), "ratio": sum(clustered_ids) / sum(naive),
        "ratio_m1": sum(once) / sum(naive), "clustering_ms": 1e3 * statistics.median(seconds),
    }  # fmt: skip
