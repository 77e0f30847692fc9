"""Question: what would the schedules and topologies gain on 128 to 4,096 workers, and how good is the cost model?

    python -m benchmarks.scale [--quick] [--json FILE]

A cost model (models.py) is fitted to a few of the cells that papers published and predicts the others. The
benchmark prints both beside the published figures, with the error of every cell and whether it was fitted. Then it
replays our own step (own.py, tf_fusedrec/schedules/planning) on the networks that two papers state. Nothing is
measured, so --quick changes nothing.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import harness, processes
from benchmarks.scale import models, own


def main() -> None:
    arguments = harness.parser(__doc__, "no effect").parse_args()
    cells = models.compared()
    for table in dict.fromkeys((cell["paper"], cell["table"]) for cell in cells):
        rows = [dict(list(cell.items())[2:]) for cell in cells if (cell["paper"], cell["table"]) == table]
        harness.print_table(" ".join(table), rows)
    errors = np.array([abs(cell["error %"]) for cell in cells if cell["kind"] == "predicted"])
    summary = {
        "cells_fitted": len(cells) - len(errors), "cells_predicted": len(errors),
        "median_error_predicted_percent": float(np.median(errors)),
        "p90_error_predicted_percent": float(np.percentile(errors, 90)),
    }  # fmt: skip
    harness.print_fields("errors of the predicted cells", summary)
    tables = {hardware.name: own.table(hardware) for hardware in (own.A100, own.H20)}
    for name, rows in tables.items():
        harness.print_table(f"our step on {name} (model)", rows)
    harness.write_json(arguments.json, {"cells": cells, **summary, "own": tables})


if __name__ == "__main__":
    processes.program(main)
