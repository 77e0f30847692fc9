"""How even is the work of the ranks, what does that buy, and what does the input pipeline cost?

    python -m benchmarks.balance [--quick] [--json FILE]

Lengths are log-normal, long-tailed: mean 600, at most 3,000 tokens. First the assignment of every step is checked, row
by row; then gaps are computed for 8 simulated ranks over 200 steps: (max - min) / mean over ranks, of tokens or of
cost. The target is 76,800 tokens per rank (MTGRBoost, section 5.1: 128 rows of the mean length) and, as the hard case,
4,800 (8 rows). Fields: max_token_gap_{fixed, dynamic, global} and max_cost_gap_{fixed, dynamic, global, cost_model},
mean over the steps; the same with _p99 (99th percentile), _8_rows and _8_rows_p99. "dynamic" is scope "rank" of
TokenBatches, "cost_model" is scope "global" by L + L^2 / 600, so that a row of the mean length costs as much in the
square as in the linear part.

step_time_ratio: seconds of training all rows in global batches over those in batches of a fixed number of rows, on 2
real ranks (balance_steps.py). reader_ratio: reader_tokens_per_s of the whole input pipeline, plan and tf.data
included, on one core, over pyarrow alone reading the same columns (balance_reader.py).
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks import children, harness, processes
from tf_fusedrec.data import Cost
from tf_fusedrec.data.plan import EpochPlan, whole

MEAN, LONGEST, SIGMA = 600, 3000, 1.0
RANKS, STEPS = 8, 200
COST = Cost(1.0, 1.0 / MEAN)
CASES = {"": 128, "_8_rows": 8}  # rows of the mean length in a rank's batch


def lengths(rows: int, seed: int = 0) -> np.ndarray:
    """<int64>[rows] log-normal tokens of rows with mean MEAN, cut at LONGEST."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, rows)
    scale = 1.0
    for _ in range(30):  # cutting takes from the mean; the scale gives it back
        scale *= MEAN / np.minimum(scale * drawn, LONGEST).mean()
    return np.maximum(np.rint(np.minimum(scale * drawn, LONGEST)), 1).astype(np.int64)


def _fixed(tokens: np.ndarray, rows: int) -> list[list[np.ndarray]]:
    """[step][rank] row numbers, the same number of rows in every batch."""
    part = len(tokens) // RANKS
    return [[np.arange(rank * part + step * rows, rank * part + (step + 1) * rows) for rank in range(RANKS)]
            for step in range(STEPS)]  # fmt: skip


def _planned(tokens: np.ndarray, target_tokens: int, scope: str, cost: Cost) -> list[list[np.ndarray]]:
    """The same as the input pipeline plans it."""
    weights, target = cost.weights(tokens, target_tokens)
    plan = EpochPlan(weights, target, whole(len(tokens)), RANKS, scope)
    if plan.steps <= STEPS:
        raise harness.CheckFailed(f"{plan.steps} steps of scope {scope!r}; the {STEPS} to measure must be full.")
    return [[plan.batch(rank, step) for rank in range(RANKS)] for step in range(STEPS)]


def gaps(batches: list[list[np.ndarray]], work: np.ndarray) -> tuple[float, float]:
    """Mean and 99th percentile over steps of (max - min) / mean over ranks, of the sums of `work` <float>[rows]."""
    sums = np.array([[work[rows].sum() for rows in step] for step in batches])
    gap = (sums.max(axis=1) - sums.min(axis=1)) / sums.mean(axis=1)
    return float(gap.mean()), float(np.percentile(gap, 99))


def simulated() -> dict[str, float]:
    """The gap fields of the JSON file."""
    fields: dict[str, float] = {}
    for suffix, rows in CASES.items():
        tokens = lengths(RANKS * (STEPS + 20) * rows)
        target = rows * MEAN
        ways = {
            "fixed": _fixed(tokens, rows),
            "dynamic": _planned(tokens, target, "rank", Cost()),
            "global": _planned(tokens, target, "global", Cost()),
            "cost_model": _planned(tokens, target, "global", COST),
        }
        for name, batches in ways.items():
            rows_of = np.concatenate([row for step in batches for row in step])
            if len(np.unique(rows_of)) != len(rows_of):
                raise harness.CheckFailed(f"{name}{suffix}: a row is in two batches.")
            for what, work in (("token", tokens.astype(np.float64)), ("cost", COST.of(tokens))):
                mean, p99 = gaps(batches, work)
                fields[f"max_{what}_gap_{name}{suffix}"], fields[f"max_{what}_gap_{name}{suffix}_p99"] = mean, p99
    return fields


def _on_ranks(quick: bool) -> dict[str, Any]:
    """What benchmarks.balance_steps finds, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder) / "steps.json"
        command = [sys.executable, "-m", "benchmarks.balance_steps", "--json", str(found)] + ["--quick"] * quick
        done = processes.run(command, env=children.environment())
        if done.returncode != 0:
            raise harness.CheckFailed(f"benchmarks.balance_steps failed:\n{(done.stdout + done.stderr)[-3000:]}")
        fields = json.loads(found.read_text(encoding="utf-8"))
    return {name: value for name, value in fields.items() if name.startswith(("step_time", "ms_"))}


def main() -> None:
    arguments = harness.parse_arguments("Balance of ranks and the speed of the input pipeline.")
    fields: dict[str, Any] = simulated()
    rows = [
        {"way": name, "rows": rows, "what": what,
         "gap mean": fields[f"max_{what}_gap_{name}{suffix}"], "p99": fields[f"max_{what}_gap_{name}{suffix}_p99"]}
        for suffix, rows in CASES.items() for what in ("token", "cost")
        for name in ("fixed", "dynamic", "global", "cost_model")
    ]  # fmt: skip
    harness.print_table(f"(max - min) / mean over {RANKS} ranks, {STEPS} steps", rows)
    fields.update(children.ask("benchmarks.balance_reader", quick=arguments.quick))
    fields.update(_on_ranks(arguments.quick))
    harness.print_table("", [{name: fields[name] for name in (
        "step_time_ratio", "reader_ratio", "reader_tokens_per_s", "pyarrow_tokens_per_s")}])  # fmt: skip
    harness.write_json(arguments.json, {"benchmark": "balance", **fields})


if __name__ == "__main__":
    harness.run(main)
