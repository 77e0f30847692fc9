"""Training time of the same rows in fixed and in balanced batches, on 2 real ranks. benchmarks.balance runs it.

The model is an HSTU for retrieval. A rank trains 8 rows of the mean length per step: the case of long rows and small
batches. The kinds of batches take turns, step by step. A step takes as long as its slowest rank.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tf_fusedrec as fr
from benchmarks.balance import lengths
from benchmarks.harness import harness
from models.build import make_embedding, make_model
from models.experiment import from_dict
from tf_fusedrec import keras, tf
from tf_fusedrec.data import Column, Cost, ParquetFolder, TokenBatches

RANKS, ROWS, ITEMS = 2, 8, 1000
COLUMNS = (Column("item_id", ragged=True), Column("timestamp", ragged=True, aligned_with="item_id"))
EXPERIMENT: dict[str, Any] = {
    "name": "balance", "task": "retrieval", "data": {"source": "synthetic-retrieval"},
    "model": {
        "max_history": lengths.LONGEST, "dim": 32, "num_blocks": 2, "num_heads": 1, "qk_dim": 32, "value_dim": 32,
        "dropout": 0.0, "num_negatives": 128, "share_negatives": True, "time_buckets": 0,
    },
}  # fmt: skip
VARIANTS = {"dynamic": ("rank", Cost()), "global": ("global", Cost()), "cost_model": ("global", lengths.COST)}


def write(folder: pathlib.Path, rows: int) -> None:
    random, tokens = np.random.default_rng(2), lengths.lengths(rows, seed=2)
    splits = pa.array(np.concatenate([[0], np.cumsum(tokens)]), pa.int32())
    items = pa.ListArray.from_arrays(splits, pa.array(random.integers(0, ITEMS, tokens.sum())))
    times = pa.ListArray.from_arrays(splits, pa.array(np.arange(tokens.sum())))
    pq.write_table(pa.table({"item_id": items, "timestamp": times}), folder / "a.parquet", row_group_size=64)


def _batches(folder: ParquetFolder, name: str) -> list[dict]:
    if name == "fixed":
        begin, end = folder.own_part()
        starts = range(begin, end, ROWS)
        rows = folder.read_positions(0, [(begin, end)], (np.arange(s, min(s + ROWS, end)) for s in starts))
        return [
            {
                column.name: tf.RaggedTensor.from_row_splits(
                    part.ragged(column.name).values, part.ragged(column.name).row_splits
                )
                for column in COLUMNS
            }
            for part in rows
        ]
    scope, cost = VARIANTS[name]
    batches = TokenBatches(
        folder, length_columns=["item_id"], target_tokens=ROWS * lengths.MEAN, scope=scope, cost=cost
    )  # fmt: skip
    return list(batches.dataset())


def _check(batches: dict[str, list[dict]], rows: int) -> None:
    for name, own_batches in batches.items():
        own = np.concatenate([batch["timestamp"].values.numpy() for batch in own_batches])
        every = np.sort(fr.collectives.all_gather(own))
        harness.check_equal(f"tokens of {name}", every, np.arange(lengths.lengths(rows, seed=2).sum()))


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Fields of the JSON file. All ranks call it."""
    rank = fr.collectives.rank()
    with tempfile.TemporaryDirectory() as temporary:
        write(pathlib.Path(temporary), rows)  # each rank its own copy
        folder = ParquetFolder(temporary, COLUMNS, rank=rank, world_size=RANKS)
        batches = {name: _batches(folder, name) for name in ("fixed", *VARIANTS)}
    _check(batches, rows)
    experiment = from_dict(EXPERIMENT)
    model = make_model(experiment, make_embedding(experiment), np.arange(ITEMS), np.ones(ITEMS, np.int64))
    model.compile(optimizer=fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(1e-3)))
    step = tf.function(model.train_step, reduce_retracing=True)
    seconds = {name: np.zeros(rounds) for name in batches}
    for turn in range(-1, rounds):
        for at in range(max(map(len, batches.values()))):
            for name in (name for name, of in batches.items() if at < len(of)):
                fr.collectives.barrier()
                begin = time.perf_counter()
                step(batches[name][at])
                fr.collectives.barrier()
                seconds[name][turn] += (time.perf_counter() - begin) * (turn >= 0)
    slowest = {name: fr.collectives.all_gather(of[np.newaxis]).max(axis=0) for name, of in seconds.items()}
    median = {name: float(np.median(of)) for name, of in slowest.items()}
    fields = {f"ms_per_step_{name}": 1e3 * median[name] / len(batches[name]) for name in median}
    fields["step_time_ratio"] = median["global"] / median["fixed"]
    for name in ("dynamic", "cost_model"):
        fields[f"step_time_ratio_{name}"] = median[name] / median["fixed"]
    return fields


def on_rank(quick: bool) -> dict[str, float] | None:
    fr.init()
    fields = measure(*((64, 2) if quick else (160, 5)))
    return fields if fr.collectives.rank() == 0 else None
