"""Question: how even is the work of the ranks, what does that buy, and what does the input pipeline cost?

    python -m benchmarks.balance [--quick] [--json FILE]

The lengths are log-normal and long-tailed, with mean 600 and at most 3,000 tokens. The benchmark checks that no row is
in two batches. It then computes gaps over 200 steps of 8 simulated ranks: (max - min) / mean over ranks, of tokens or
of cost. The target is 76,800 tokens per rank (MTGRBoost, section 5.1: 128 rows of the mean length). The hard case has a
target of 4,800 tokens (8 rows).

Fields:
  max_token_gap_{fixed, dynamic, global}, max_cost_gap_{fixed, dynamic, global, cost_model}: mean over the steps.
    _p99 is the 99th percentile; _8_rows and _8_rows_p99 belong to the hard case. "dynamic" is scope "rank" of
    TokenBatches. "cost_model" is scope "global" with the cost L + L^2 / 600, whose parts are equal at the mean length.
  memory_use_{fixed, dynamic, global}: mean tokens of a batch over tokens of the largest one of all steps and ranks, so
    the share of the memory for activations that a mean batch uses where the largest just fits (MTGRBoost, table 2).
    Equal memory holds so many more rows. _8_rows as above.
  step_time_ratio: time to train all rows in global batches over the time in batches with a fixed number of rows, on 2
    real ranks (steps.py).
  reader_ratio: tokens per second of the input pipeline, with plan and tf.data, over pyarrow's on the same columns, each
    on one core (reader.py).
"""

from __future__ import annotations

import numpy as np

from benchmarks.balance import reader, steps
from benchmarks.balance.lengths import COST, MEAN, lengths
from benchmarks.harness import harness, processes
from tf_fusedrec.data.plan import Cost, EpochPlan, all_positions

RANKS, STEPS = 8, 200
CASES = {"": 128, "_8_rows": 8}  # rows of the mean length in a rank's batch


def _fixed(tokens: np.ndarray, rows: int) -> list[list[np.ndarray]]:
    """Returns row numbers [step][rank], the same number of rows in every batch."""
    by_rank = np.arange(len(tokens)).reshape(RANKS, -1, rows)
    return [list(by_rank[:, step]) for step in range(STEPS)]


def _planned(tokens: np.ndarray, target_tokens: int, scope: str, cost: Cost) -> list[list[np.ndarray]]:
    """Returns row numbers [step][rank] as the input pipeline plans them."""
    weights, target = cost.weights(tokens, target_tokens)
    plan = EpochPlan(weights, target, all_positions(len(tokens)), RANKS, scope)
    if plan.steps <= STEPS:
        raise harness.CheckFailed(f"Scope {scope!r} planned {plan.steps} steps, but {STEPS} full ones are needed.")
    return [[plan.batch(rank, step) for rank in range(RANKS)] for step in range(STEPS)]


def gaps(batches: list[list[np.ndarray]], work: np.ndarray) -> tuple[float, float]:
    """Returns mean and 99th percentile over steps of (max - min) / mean of the ranks' sums of `work` <float>[rows]."""
    sums = _sums(batches, work)
    gap = (sums.max(axis=1) - sums.min(axis=1)) / sums.mean(axis=1)
    return float(gap.mean()), float(np.percentile(gap, 99))


def _sums(batches: list[list[np.ndarray]], work: np.ndarray) -> np.ndarray:
    return np.array([[work[rows].sum() for rows in step] for step in batches])


def memory_use(batches: list[list[np.ndarray]], tokens: np.ndarray) -> float:
    """Returns the mean of the batches' tokens over the tokens of the largest batch."""
    sums = _sums(batches, tokens)
    return float(sums.mean() / sums.max())


def simulated() -> dict[str, float]:
    """Returns the gap fields of the JSON file."""
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
                mean, p99 = gaps(batches, work)
                fields[f"max_{what}_gap_{name}{suffix}"], fields[f"max_{what}_gap_{name}{suffix}_p99"] = mean, p99
            if name != "cost_model":  # It fills by another cost than the tokens.
                fields[f"memory_use_{name}{suffix}"] = memory_use(batches, tokens)
    return fields


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    fields = simulated()
    fields |= processes.ask(reader.measure, rows=16384, repeats=3 if arguments.quick else 9)
    rows, rounds = (64, 2) if arguments.quick else (160, 5)
    fields |= processes.ask_ranks(steps.on_rank, steps.RANKS, rows=rows, rounds=rounds)
    harness.print_fields(f"(max - min) / mean over {RANKS} ranks, {STEPS} steps; steps; the reader", fields)
    harness.write_json(arguments.json, {"benchmark": "balance", **fields})


if __name__ == "__main__":
    processes.program(main)
