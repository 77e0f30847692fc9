"""Training time of the same rows in fixed and in balanced batches, on 2 real ranks. benchmarks.balance runs it.

The model is an HSTU for retrieval. A rank trains 8 rows of the mean length per step: the case of long rows and small
batches. The kinds of batches take turns, step by step. A step takes as long as its slowest rank.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.balance.lengths import COST, ITEMS, LONGEST, MEAN, write
from benchmarks.harness import harness
from models.build import make_embedding, make_model
from models.experiment import from_dict
from tf_fusedrec import keras, tf
from tf_fusedrec.data import Column, ParquetFolder, TokenBatches
from tf_fusedrec.data.plan import Cost

RANKS, ROWS = 2, 8
COLUMNS = (Column("item_id", ragged=True), Column("timestamp", ragged=True, aligned_with="item_id"))
EXPERIMENT: dict[str, Any] = {
    "name": "balance", "task": "retrieval", "data": {"source": "synthetic-retrieval"},
    "model": {
        "max_history": LONGEST, "dim": 32, "num_blocks": 2, "num_heads": 1, "qk_dim": 32, "value_dim": 32,
        "dropout": 0.0, "num_negatives": 128, "share_negatives": True, "time_buckets": 0,
    },
}  # fmt: skip
VARIANTS = {"dynamic": ("rank", Cost()), "global": ("global", Cost()), "cost_model": ("global", COST)}


def epoch_s(
    steps: Mapping[str, Callable[[Any], Any]], batches: Mapping[str, Sequence[Any]], rounds: int
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Times epochs of variants with batches of their own, in turns step by step. Collective.

    Returns:
      The median seconds of an epoch by variant, of the slowest rank, and what its steps returned in an epoch before,
      which is not timed.
    """
    seconds = {name: np.zeros(rounds) for name in steps}
    results: dict[str, list[Any]] = {name: [] for name in steps}
    for turn in range(-1, rounds):
        for at in range(max(map(len, batches.values()))):
            for name in (name for name, of_variant in batches.items() if at < len(of_variant)):
                fr.collectives.barrier()
                begin = time.perf_counter()
                result = steps[name](batches[name][at])
                fr.collectives.barrier()
                if turn < 0:
                    results[name].append(result)
                else:
                    seconds[name][turn] += time.perf_counter() - begin
    slowest = {name: fr.collectives.all_gather(of_rank[np.newaxis]).max(axis=0) for name, of_rank in seconds.items()}
    return {name: float(np.median(of_rounds)) for name, of_rounds in slowest.items()}, results


def _batches(folder: ParquetFolder, name: str) -> list[dict[str, Any]]:
    if name == "fixed":
        begin, end = folder.own_part()
        starts = range(begin, end, ROWS)
        rows = folder.read_positions(0, [(begin, end)], (np.arange(s, min(s + ROWS, end)) for s in starts))
        columns = ({column.name: part.ragged(column.name) for column in COLUMNS} for part in rows)
        return [
            {name: tf.RaggedTensor.from_row_splits(column.values, column.row_splits) for name, column in batch.items()}
            for batch in columns
        ]
    scope, cost = VARIANTS[name]
    batches = TokenBatches(folder, length_columns=["item_id"], target_tokens=ROWS * MEAN, scope=scope, cost=cost)
    return list(batches.dataset())


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Returns the fields of the JSON file. Collective."""
    with tempfile.TemporaryDirectory() as temporary:
        tokens = write(pathlib.Path(temporary), rows, seed=2, row_group_size=64)  # each rank its own copy
        folder = ParquetFolder(temporary, COLUMNS, rank=fr.rank(), world_size=RANKS)
        batches = {name: _batches(folder, name) for name in ("fixed", *VARIANTS)}
    for name, of_variant in batches.items():
        local = np.concatenate([batch["timestamp"].values.numpy() for batch in of_variant])
        harness.check_equal(f"tokens of {name}", np.sort(fr.collectives.all_gather(local)), np.arange(tokens.sum()))
    experiment = from_dict(EXPERIMENT)
    model = make_model(experiment, make_embedding(experiment), np.arange(ITEMS), np.ones(ITEMS, np.int64))
    model.compile(optimizer=fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(1e-3)))
    step = tf.function(model.train_step, reduce_retracing=True)
    seconds, _ = epoch_s(dict.fromkeys(batches, step), batches, rounds)
    ratios = {name: seconds[name] / seconds["fixed"] for name in VARIANTS}
    return {("step_time_ratio" if name == "global" else f"step_time_ratio_{name}"): x for name, x in ratios.items()}


def on_rank(rows: int, rounds: int) -> dict[str, float]:
    fr.init()
    return measure(rows, rounds)
