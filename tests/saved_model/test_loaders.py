"""A stock export loads where there is nothing but TensorFlow, by every loader that servers use."""

import os
import pathlib
import subprocess

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.saved_model import click_model
from tests.support.only_tensorflow import make_environment

SERVER = pathlib.Path(__file__).parent / "server.py"
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # as in test_export.py


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("tensorflow") / "venv")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The folder with a SavedModel and inputs.npz, and the outputs that the trained model gives."""
    folder = tmp_path_factory.mktemp("served")
    model = click_model.make_model()
    click_model.train(model)
    fr.export(model, folder / "model")
    inputs = click_model.batch(2)
    np.savez(folder / "inputs.npz", **click_model.served(inputs))
    return folder, {name: y.numpy() for name, y in model(inputs, training=False).items()}


def run(command):
    inherited = ("TF_USE_LEGACY_KERAS", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("loader", ["saved_model", "keras", "v1"])
def test_loader(loader, python, case):
    folder, expected = case
    answered = folder / f"{loader}.npz"
    run([python, SERVER, loader, folder / "model", folder / "inputs.npz", answered])
    with np.load(answered) as outputs:
        assert set(outputs) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name], value, **CLOSE)


def test_saved_model_cli(python, case):
    folder, expected = case
    main = "from tensorflow.python.tools.saved_model_cli import main; main()"
    with np.load(folder / "inputs.npz") as inputs:
        given = ";".join(f"{name}={folder}/inputs.npz[{name}]" for name in inputs)
    out = folder / "cli"
    run([python, "-c", main, "run", "--dir", folder / "model", "--tag_set", "serve", "--signature_def",
         "serving_default", "--inputs", given, "--outdir", out])  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(np.load(pathlib.Path(out) / f"{name}.npy"), value, **CLOSE)
