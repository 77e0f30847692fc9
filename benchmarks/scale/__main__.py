"""Question: what would the schedules and topologies gain on 128 to 4,096 workers, and how good is the cost model?

    python -m benchmarks.scale [--quick] [--json FILE]

A cost model (models.py) is fitted to a few of the cells that papers published and predicts the others. The
benchmark prints both beside the published figures, with the error of every cell and whether it was fitted. Then it
replays our own step (own.py, tf_fusedrec/schedules/planning), with the measured costs of our ops and the networks that
two papers state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import harness, processes
from benchmarks.scale import models, own
from benchmarks.scale.published import cells


def published_tables() -> dict[str, Any]:
    """Returns every published cell beside the model's figure, and the errors of the predicted cells."""
    predicted = models.predictions()
    rows = [models.compared(cell, predicted[cell.key]) for cell in cells()]
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
    arguments = harness.parser(__doc__).parse_args()
    published = published_tables()
    for table in dict.fromkeys((cell["paper"], cell["table"]) for cell in published["cells"]):
        rows = [cell for cell in published["cells"] if (cell["paper"], cell["table"]) == table]
        hidden = ("paper", "table")
        harness.print_table(" ".join(table), [{k: v for k, v in row.items() if k not in hidden} for row in rows])
    summary = {name: value for name, value in published.items() if name != "cells"}
    harness.print_table("errors of the predicted cells", [summary])
    costs = own.measure_ops(own.DIM, own.USERS * own.TOKENS, arguments.quick)
    nanoseconds = {name: 1e9 * value for name, value in costs._asdict().items() if name != "flops_per_s"}
    harness.print_table("our ops on this machine, ns per id or row", [nanoseconds])
    tables = {hardware.name: own.table(costs, hardware) for hardware in own.HARDWARE}
    for name, rows in tables.items():
        harness.print_table(f"our step on {name} (model)", rows)
    harness.write_json(arguments.json, {**published, "op_ns": nanoseconds, "own": tables})


if __name__ == "__main__":
    processes.program(main)
