"""Question: how even is the work of the ranks, and what does the input pipeline cost?

    python -m benchmarks.balance [--quick] [--json FILE]

The lengths are log-normal and long-tailed, with mean 600 and at most 3,000 tokens. The benchmark checks that no row is
in two batches. It then computes gaps over 200 steps of 8 simulated ranks: (max - min) / mean over ranks, of tokens or
of cost. The target is 76,800 tokens per rank (MTGRBoost, section 5.1: 128 rows of the mean length). The hard case has a
target of 4,800 tokens (8 rows).

Fields:
  max_token_gap_{fixed, dynamic, global}, max_cost_gap_{fixed, dynamic, global, cost_model}: mean over the steps.
    _8_rows belongs to the hard case. "dynamic" is scope "rank" of TokenBatches. "cost_model" is scope "global" with the
    cost L + L^2 / 600, whose parts are equal at the mean length.
  memory_use_{fixed, dynamic, global}: mean tokens of a batch over tokens of the largest one of all steps and ranks, so
    the share of the memory for activations that a mean batch uses where the largest just fits (MTGRBoost, table 2).
    Equal memory holds so many more rows. _8_rows as above.
  reader_ratio: tokens per second of the input pipeline, with plan and tf.data, over pyarrow's on the same row groups,
    each on one core. Both read two columns of lists and one of lengths; pyarrow drops the result.
"""

from __future__ import annotations

import os
import pathlib
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import harness, processes
from tf_fusedrec import tf
from tf_fusedrec.data import Column, ParquetFolder, TokenBatches
from tf_fusedrec.data.plan import Cost, EpochPlan, all_positions

MEAN, LONGEST, SIGMA = 600, 3000, 1.0
COST = Cost(1.0, 1.0 / MEAN)
ITEMS = 1000


def lengths(rows: int, seed: int = 0) -> np.ndarray:
    """Returns <int64>[rows] log-normal lengths with mean MEAN, cut at LONGEST."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, rows)
    scale = 1.0
    for _ in range(30):  # the cut lowers the mean, and the scale restores it
        scale *= MEAN / np.minimum(scale * drawn, LONGEST).mean()
    return np.maximum(np.rint(np.minimum(scale * drawn, LONGEST)), 1).astype(np.int64)


def write(folder: pathlib.Path, rows: int, *, seed: int, row_group_size: int) -> np.ndarray:
    """Writes histories with Zipf items and times 0, 1, 2 ... over all rows. Returns their lengths <int64>[rows]."""
    tokens = lengths(rows, seed)
    splits = pa.array(np.concatenate([[0], np.cumsum(tokens)]), pa.int32())
    items = np.random.default_rng(seed).zipf(1.2, tokens.sum()) % ITEMS
    lists = {"item_id": items, "timestamp": np.arange(tokens.sum())}
    columns = {name: pa.ListArray.from_arrays(splits, pa.array(values)) for name, values in lists.items()}
    pq.write_table(pa.table({**columns, "length": tokens}), folder / "a.parquet", row_group_size=row_group_size)
    return tokens


RANKS, STEPS = 8, 200
CASES = {"": 128, "_8_rows": 8}  # rows of the mean length in a rank's batch


def _fixed(tokens: np.ndarray, rows: int) -> list[list[np.ndarray]]:
    """Returns row numbers [step][rank], the same number of rows in every batch."""
    by_rank = np.arange(len(tokens)).reshape(RANKS, -1, rows)
    return [list(by_rank[:, step]) for step in range(STEPS)]


def _planned(tokens: np.ndarray, target_tokens_per_rank: int, scope: str, cost: Cost) -> list[list[np.ndarray]]:
    """Returns row numbers [step][rank] as the input pipeline plans them."""
    weights, target = cost.weights(tokens, target_tokens_per_rank)
    plan = EpochPlan(weights, target, all_positions(len(tokens)), RANKS, scope)
    if plan.steps <= STEPS:
        raise harness.CheckFailed(f"Scope {scope!r} planned {plan.steps} steps, but {STEPS} full ones are needed.")
    return [[plan.batch(rank, step) for rank in range(RANKS)] for step in range(STEPS)]


def mean_gap(batches: list[list[np.ndarray]], work: np.ndarray) -> float:
    """Returns the mean over steps of (max - min) / mean of the ranks' sums of `work` <float>[rows]."""
    sums = _sums(batches, work)
    return float(((sums.max(axis=1) - sums.min(axis=1)) / sums.mean(axis=1)).mean())


def _sums(batches: list[list[np.ndarray]], work: np.ndarray) -> np.ndarray:
    return np.array([[work[rows].sum() for rows in step] for step in batches])


def memory_use(batches: list[list[np.ndarray]], tokens: np.ndarray) -> float:
    """Returns the mean of the batches' tokens over the tokens of the largest batch."""
    sums = _sums(batches, tokens)
    return float(sums.mean() / sums.max())


def simulated() -> dict[str, float]:
    fields: dict[str, float] = {}
    for suffix, rows in CASES.items():
        tokens = lengths(RANKS * (STEPS + 20) * rows)
        target = rows * MEAN
        variants = {
            "fixed": _fixed(tokens, rows),
            "dynamic": _planned(tokens, target, "rank", Cost()),
            "global": _planned(tokens, target, "global", Cost()),
            "cost_model": _planned(tokens, target, "global", COST),
        }
        for name, batches in variants.items():
            rows_of = np.concatenate([row for step in batches for row in step])
            if len(np.unique(rows_of)) != len(rows_of):
                raise harness.CheckFailed(f"{name}{suffix}: a row is in two batches.")
            for what, work in (("token", tokens.astype(np.float64)), ("cost", COST.of(tokens))):
                fields[f"max_{what}_gap_{name}{suffix}"] = mean_gap(batches, work)
            if name != "cost_model":  # It fills by another cost than the tokens.
                fields[f"memory_use_{name}{suffix}"] = memory_use(batches, tokens)
    return fields


READ = (Column("item_id", ragged=True), Column("timestamp", ragged=True, aligned_with="item_id"), Column("length"))
EPOCHS = 8  # enough to make the 0.05 s that the construction of the dataset takes negligible


def pipeline(folder: pathlib.Path) -> list[tf.RaggedTensor]:
    """Reads EPOCHS epochs with their plans. Returns the times of all batches."""
    data = ParquetFolder(folder, READ, shuffle_seed=0, shuffle_rows=1024, threads=1)
    batches = TokenBatches(data, length_columns=["length"], target_tokens_per_rank=CASES[""] * MEAN, epochs=EPOCHS)
    return [batch["timestamp"] for batch in batches.dataset(epochs=EPOCHS)]


def plain_read(folder: pathlib.Path) -> None:
    for _ in range(EPOCHS):
        with pq.ParquetFile(folder / "a.parquet") as parquet:
            for group in range(parquet.num_row_groups):
                parquet.read_row_group(group, columns=[column.name for column in READ], use_threads=False)


def reader_ratio(rows: int, repeats: int) -> dict[str, float]:
    """Returns the pipeline's tokens per second over pyarrow's."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        tokens = write(folder, rows, seed=0, row_group_size=256)
        got = np.concatenate([times.row_lengths().numpy() for times in pipeline(folder)])
        harness.check_equal("lengths of the rows read", np.sort(got), np.sort(np.tile(tokens, EPOCHS)))
        calls = {"ours": lambda: pipeline(folder), "pyarrow": lambda: plain_read(folder)}
        times = harness.measure(calls, warmup=0, repeats=repeats)
    return {"reader_ratio": times["pyarrow"].median_s / times["ours"].median_s}


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    fields = simulated()
    fields |= processes.ask(reader_ratio, rows=16384, repeats=3 if arguments.quick else 9)
    harness.print_fields(f"(max - min) / mean over {RANKS} ranks, {STEPS} steps; the reader", fields)
    harness.write_json(arguments.json, {"benchmark": "balance", **fields})


if __name__ == "__main__":
    processes.program(main)
