"""Stock exports load with TensorFlow alone, by every loader of servers, and give the model's answers.

The server joins the model from a base and a delta. One process joins, another serves.
"""

import os
import pathlib
import subprocess

import numpy as np
import pytest

from tests.saved_model import click_model
from tests.support.only_tensorflow import make_environment

SERVER = pathlib.Path(__file__).parent / "server.py"
# The float32 weights are equal; sums of some hundred terms near 1 run in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LOADERS = ["saved_model", "keras", "v1", "cli"]


def run(*command):
    """Runs a process without this project on its path."""
    inherited = ("TF_USE_LEGACY_KERAS", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def served(click, tmp_path_factory):
    """Returns the folder of the loaders' answers."""
    folder = tmp_path_factory.mktemp("served")
    np.savez(folder / "inputs.npz", **click_model.served(click_model.batch(2)))
    python = make_environment(folder / "venv")
    # The delta contains the program that joins it with its base.
    base, delta = click.folder / "stock", click.folder / "stock-delta"
    run(python, delta / "apply_delta.py", base, delta, folder / "click")
    run(python, SERVER, folder / "click", folder / "inputs.npz", folder)
    return folder


@pytest.mark.parametrize("loader", LOADERS)
def test_loader(loader, click, served):
    if loader == "cli":
        outputs = {path.stem: np.load(path) for path in (served / "cli").iterdir()}
    else:
        outputs = dict(np.load(served / f"{loader}.npz"))
    expected = click.answers[2][2]
    assert set(outputs) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, **CLOSE, err_msg=name)
