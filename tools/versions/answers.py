"""Checks in this environment that grm_tiny of other environments gives the answers that it gave there.

    python -m tools.versions.answers RUN ...        # folders of models.train

The checkpoint must score the test split as the run did (samples.npz), and the SavedModel must answer as the model.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

import tf_fusedrec as fr
from models.check_export import TOLERANCE, check_export, expected_answer
from models.evaluate import evaluate
from models.export import saved_experiment, trained_model
from models.prepare import prepare_data


def check_run(run: pathlib.Path) -> None:
    """Raises an AssertionError or RuntimeError if the answers of a run differ here."""
    experiment, model = saved_experiment(run / "checkpoint"), trained_model(run / "checkpoint")
    folder = prepare_data(experiment, run / "data")
    found = evaluate(experiment, model, folder).samples
    with np.load(run / "samples.npz") as wanted:
        assert set(wanted) == set(found), f"{run}: samples are {sorted(found)}, want {sorted(wanted)}"
        for name, values in wanted.items():
            # As of check_export: float32 sums may run in another order.
            np.testing.assert_allclose(found[name], values, atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"{run}: {name}")
    inputs, expected = expected_answer(experiment, model, folder)
    difference = check_export(run / "saved_model", inputs, expected)
    print(f"{run}: {len(next(iter(found.values())))} samples, export within {difference:.1e}")


if __name__ == "__main__":
    fr.init()
    for name in sys.argv[1:]:
        check_run(pathlib.Path(name))
