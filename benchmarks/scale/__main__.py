"""Question: what would the schedules and topologies gain on 128 to 4,096 workers, and how good is the cost model?

    python -m benchmarks.scale [--quick] [--json FILE]

A cost model (fit.py, replay.py) is fitted to a few of the cells that papers published and predicts the others. The
benchmark prints both beside the published figures, with the error of every cell and whether it was fitted. Then it
replays our own step, with the measured costs of our ops and the networks that two papers state.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.scale.clusters import AllToAll, compared, predictions
from benchmarks.scale.ops import OpCosts, measure
from benchmarks.scale.published import cells
from benchmarks.scale.replay import StepCosts, dual_buffer, frozen_window, nested, replay, semi_async, sync

WORKERS = (128, 256, 512, 1024, 2048, 4096)
SCHEDULES = {
    "sync": sync, "frozen_window(4)": frozen_window(4), "dual_buffer": dual_buffer, "nested(4)": nested(4),
    "semi_async": semi_async,
}  # fmt: skip
GROUP = 128  # workers per group in the rows with groups
# Our own step: 128 users of 512 tokens, 128 columns, and MTGRBoost's 4 GFLOP forward for a user.
IDS, DIM, FLOPS = 128 * 512, 128, 3 * 128 * 4e9
VOCABULARY, ZIPF_ALPHA = 10**6, 0.8
MESSAGE_S = 5e-6  # assumed, since no paper states the cost of one message of an all-to-all


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A worker as a paper states it. The rate of dense compute is assumed: 40 % of the data sheet's."""

    name: str
    bytes_per_s: float  # between nodes, per worker
    flops_per_s: float


HARDWARE = (
    Hardware("MTGRBoost: A100, 8 share 200 GB/s between nodes", 200e9 / 8, 0.4 * 156e12),
    Hardware("FusedRec: H20, 400 Gb/s each", 400e9 / 8, 0.4 * 74e12),
)


@functools.cache
def batch_chances() -> np.ndarray:
    """Returns <float64>[VOCABULARY], the chance that a worker's batch holds an id, in the order of frequency."""
    weights = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -ZIPF_ALPHA
    return -np.expm1(IDS * np.log1p(-weights / weights.sum()))


@functools.cache
def owner_imbalance(workers: int) -> float:
    """Returns the busiest owner's received rows over the mean. Ids follow a Zipf law and are hashed to owners."""
    owners = np.random.default_rng(0).integers(0, workers, VOCABULARY)
    rows = np.bincount(owners, batch_chances(), workers)
    return float(rows.max() / rows.mean())


def own_costs(costs: OpCosts, hardware: Hardware, workers: int, groups: int) -> StepCosts:
    """Returns the costs of one worker's step. Each owner receives the gradients of all other groups."""
    rows, size = float(batch_chances().sum()), workers // groups
    at_owner = rows * (costs.lookup + costs.update) * owner_imbalance(size)
    volume = rows * DIM * 4 / hardware.bytes_per_s
    exchange = AllToAll(MESSAGE_S, volume).at(size)
    return StepCosts(
        lookup=IDS * costs.unique + rows * costs.partition + at_owner,
        compute=FLOPS / hardware.flops_per_s + IDS * (costs.recover + costs.recover_grad),
        rows=exchange,
        gradients=exchange,
        synchronize=(groups - 1) * (MESSAGE_S + volume),
    )


def own_table(costs: OpCosts, hardware: Hardware) -> list[dict[str, Any]]:
    """Returns the step of every schedule in ms. The scaling is that of nested(4) from 128 workers on."""
    table: list[dict[str, Any]] = []
    for workers in WORKERS:
        for groups in sorted({1, workers // GROUP}):
            step = own_costs(costs, hardware, workers, groups)
            row: dict[str, Any] = {
                "workers": workers,
                "groups": groups,
                "imbalance": owner_imbalance(workers // groups),
            }
            row |= {f"{name} ms": 1e3 * replay(step, schedule).step for name, schedule in SCHEDULES.items()}
            first = table[0] if table else row
            row["nested scaling %"] = 100 * first["nested(4) ms"] / row["nested(4) ms"]
            table.append(row)
    return table


def published_tables() -> dict[str, Any]:
    """Returns every published cell beside the model's figure, and the errors of the predicted cells."""
    predicted = predictions()
    rows = [compared(cell, predicted[cell.key]) for cell in cells()]
    errors = np.array([abs(row["error %"]) for row in rows if row["kind"] == "predicted"])
    return {
        "cells": rows,
        "cells_fitted": len(rows) - len(errors),
        "cells_predicted": len(errors),
        "median_error_predicted_percent": float(np.median(errors)),
        "p90_error_predicted_percent": float(np.percentile(errors, 90)),
        "max_error_predicted_percent": float(errors.max()),
    }


def main() -> None:
    arguments = harness.parse_arguments(__doc__.splitlines()[0])
    published = published_tables()
    for table in dict.fromkeys((cell["paper"], cell["table"]) for cell in published["cells"]):
        rows = [cell for cell in published["cells"] if (cell["paper"], cell["table"]) == table]
        hidden = ("paper", "table")
        harness.print_table(" ".join(table), [{k: v for k, v in row.items() if k not in hidden} for row in rows])
    summary = {name: value for name, value in published.items() if name != "cells"}
    harness.print_table("errors of the predicted cells", [summary])
    costs = measure(DIM, IDS, arguments.quick)
    nanoseconds = {name: 1e9 * value for name, value in costs._asdict().items() if name != "flops_per_s"}
    harness.print_table("our ops on this machine, ns per id or row", [nanoseconds])
    own = {hardware.name: own_table(costs, hardware) for hardware in HARDWARE}
    for name, rows in own.items():
        harness.print_table(f"our step on {name} (model)", rows)
    harness.write_json(arguments.json, {**published, "op_ns": nanoseconds, "own": own})


if __name__ == "__main__":
    harness.run(main)
