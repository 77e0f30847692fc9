"""Question: how much faster is one exchange per dimension of tables than one per table?

    python -m benchmarks.table.dimensions [--quick] [--json FILE]

Two ranks (FusedRec, figure 7) compare tables of a dimension that share an exchange with
tables that have an exchange each. For every dimension it reports the number of all-to-alls in a training step, and the
size and rate of the row exchanges. The sizes belong to real batches without duplicates. The all-to-alls of a dimension
run in one call, as inside a step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, ranks
from benchmarks.harness.synthetic import Batches
from tf_fusedrec import ops, tf
from tf_fusedrec.exchange import collectives

RANKS = 2
DIMS = (4, 16, 64, 256)
FEATURES = 8  # per dimension
BATCH_SIZE = 512
IDS_PER_FEATURE = 4
ZIPF_ALPHA = 1.05
_BATCHES = 8
_PER_EXCHANGE = 3  # all-to-alls of a training step: ids, rows, gradients


def sent_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts the distinct ids for each owner.

    Args:
      ids: <int64>[S, n], a segment per row.

    Returns:
      The counts <int32>[R] over all segments, and <int32>[S, R] by segment.
    """
    bounds = np.arange(len(ids) + 1) * ids.shape[1]
    unique = ops.segment_unique(tf.constant(ids.ravel()), tf.constant(bounds, tf.int64))
    splits = unique.splits.numpy()
    alone = []
    for begin, end in zip(splits[:-1], splits[1:]):
        ranked = ops.rank_partition(
            unique.ids[begin:end], tf.constant([0, end - begin], tf.int64), num_ranks=RANKS, owner="hash_range",
            id_bits=64, segment_names=["segment"],
        )  # fmt: skip
        alone.append(ranked.id_splits.numpy())
    return np.sum(alone, axis=0, dtype=np.int32), np.stack(alone)


def _exchange(name: str, dim: int, count: int) -> tf.types.experimental.PolymorphicFunction:
    """Returns a function with `count` all-to-alls of rows [P, dim] in one call."""
    signature = [[tf.TensorSpec([None, dim], tf.float32)] * count, tf.TensorSpec([count, RANKS], tf.int32)]

    @tf.function(input_signature=signature, autograph=False)
    def exchange(rows: Sequence[tf.Tensor], splits: tf.Tensor) -> list[tf.Tensor]:
        sent = [collectives.all_to_all(part, splits[n], name=f"{name}.{n}") for n, part in enumerate(rows)]
        return [received for received, _ in sent]

    return exchange


def _buffers(splits: np.ndarray, dim: int) -> list[tf.Tensor]:
    """Returns a padded buffer of rows for each line of splits [C, R]. Every row names its sender."""
    buffers = []
    for n in splits.sum(axis=1).tolist():
        rows = tf.fill([n, dim], float(collectives.rank() + 1))
        buffers.append(ops.recover(rows, tf.range(n), pad=True))
    return buffers


def _check(received: Sequence[tf.Tensor], splits: np.ndarray) -> None:
    """Checks that this rank received its rows from every rank."""
    by_rank = collectives.all_gather(splits[np.newaxis])  # [R, C, R]
    for n, rows in enumerate(received):
        senders = np.repeat(np.arange(RANKS) + 1.0, by_rank[:, n, collectives.rank()])
        harness.check_equal(f"senders of the rows of all-to-all {n}", rows[:, 0], senders)


def _measure(dim: int, batches: Batches, repeats: int) -> dict[str, Any]:
    exchanges = {"fused": _exchange(f"fused.{dim}", dim, 1), "apart": _exchange(f"apart.{dim}", dim, FEATURES)}
    work: dict[str, list[Any]] = {name: [] for name in exchanges}
    for number in range(_BATCHES):
        together, alone = sent_ids(batches.batch(number, collectives.rank()).ids.reshape(FEATURES, -1))
        for name, splits in (("fused", together[np.newaxis]), ("apart", alone)):
            buffers, counts = _buffers(splits, dim), tf.constant(splits)
            _check(exchanges[name](buffers, counts), splits)
            work[name].append((buffers, counts))

    def call(name: str, repeat: int) -> Any:
        return exchanges[name](*work[name][repeat % _BATCHES])

    calls = {name: functools.partial(call, name) for name in exchanges}
    ms = ranks.turns(calls, warmup=_BATCHES, repeats=repeats, inputs=lambda repeat: (repeat,)).ms
    rows = float(np.mean([tf.reduce_sum(counts) for _, counts in work["fused"]]))
    bytes_sent = 4 * dim * float(collectives.all_gather(np.array([rows])).mean())
    return {
        "dim": dim, "tables": FEATURES, "all-to-alls fused": _PER_EXCHANGE,
        "all-to-alls apart": _PER_EXCHANGE * FEATURES, "KB per all-to-all of rows, fused": bytes_sent / 1e3,
        "KB apart": bytes_sent / FEATURES / 1e3, "ms fused": ms["fused"], "ms apart": ms["apart"],
        "MB/s fused": bytes_sent / 1e3 / ms["fused"], "MB/s apart": bytes_sent / 1e3 / ms["apart"],
        "ratio": ms["apart"] / ms["fused"],
    }  # fmt: skip


def on_rank(quick: bool) -> list[dict[str, Any]]:
    fr.init()
    batches = Batches(features=FEATURES, batch_size=BATCH_SIZE, ids_per_feature=IDS_PER_FEATURE, alpha=ZIPF_ALPHA)
    records = [_measure(dim, batches, repeats=48 if quick else 192) for dim in DIMS]
    return records


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    records = processes.ask_ranks(on_rank, RANKS, quick=arguments.quick)
    title = (
        f"dimensions: {RANKS} ranks, {FEATURES} tables of each, batches of {BATCH_SIZE} with {IDS_PER_FEATURE} ids "
        f"per table, zipf({ZIPF_ALPHA}); bytes are those that a rank sends, its own share included"
    )
    harness.print_table(title, records)
    harness.write_json(arguments.json, {"benchmark": title, "cases": records})


if __name__ == "__main__":
    processes.program(main)
