"""Question: how much forward computation does one row per user save over one row per exposure (MTGRBoost, Fig. 4)?

    python -m benchmarks.sequence_batching --config configs/grm_tiny.yaml [--data DIR] [--json FILE] [--quick]

The benchmark counts the multiplications and additions of GRM's matrix products, from the lengths of a data set's
training rows. It times nothing. Attention counts the visible pairs, which a kernel without padding computes. The count
omits element-wise work and embedding lookups. Both layouts give the same exposures the same scores
(tests/models/ranking/test_grm.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile

import numpy as np

from benchmarks.harness import harness
from benchmarks.sequence_batching.flops import forward_flops
from models.build import columns
from models.experiment import Experiment, load
from models.experiment.model_config import GRMConfig
from models.prepare import prepare_data
from tf_fusedrec.data import ParquetFolder

QUICK_USERS = 200


def measure(experiment: Experiment, folder: pathlib.Path, max_users: int | None) -> dict:
    """Returns the FLOPs of both layouts over the first max_users training rows, and their ratio."""
    if not isinstance(experiment.model, GRMConfig):
        raise ValueError(f"--config is {experiment.name!r}, which has no GRM. Name one that has, such as grm_tiny.")
    history, exposed = [], []
    for rows in ParquetFolder(folder / "train", columns(experiment.model, "train")).read():
        history.append(rows.ragged("history_item").lengths())
        exposed.append(rows.ragged("exposed_item").lengths())
    history = np.concatenate([np.empty(0, np.int64), *history])[:max_users]
    exposed = np.concatenate([np.empty(0, np.int64), *exposed])[:max_users]
    by_user = forward_flops(experiment.model, history, exposed)
    repeated = np.repeat(history, exposed)
    by_exposure = forward_flops(experiment.model, repeated, np.ones_like(repeated))
    layouts = {"row_per_user": by_user, "row_per_exposure": by_exposure}
    return {
        "data": folder.name,
        "users": len(history),
        "exposures": int(exposed.sum()),
        "mean_history_tokens": float(history.mean()) if len(history) else 0.0,
        **{name: {**dataclasses.asdict(f), "total": f.total} for name, f in layouts.items()},
        "saving": by_exposure.total / by_user.total if by_user.total else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/grm_tiny.yaml", help="a ranking experiment")
    parser.add_argument("--data", default="", help="data set, which replaces data.input")
    parser.add_argument("--json", type=pathlib.Path, help="file for the result")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK_USERS} users only")
    arguments = parser.parse_args()
    overrides = [f"data.input={json.dumps(arguments.data)}"] if arguments.data else []
    try:
        with tempfile.TemporaryDirectory() as temporary:
            experiment = load(arguments.config, overrides)
            folder = prepare_data(experiment, temporary)
            result = measure(experiment, folder, QUICK_USERS if arguments.quick else None)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{'forward':<14}{'row per user':>16}{'row per exposure':>18}")
    for name in ("tokens", "projections", "attention", "heads", "total"):
        unit, scale = ("", 1) if name == "tokens" else (" GFLOP", 1e9)
        cells = [result[layout][name] / scale for layout in ("row_per_user", "row_per_exposure")]
        print(f"{name + unit:<20}{cells[0]:>10.4g}{cells[1]:>18.4g}")
    print(f"saving: {result['saving']:.2f} times fewer operations with one row per user")
    harness.write_json(arguments.json, result)


if __name__ == "__main__":
    main()
