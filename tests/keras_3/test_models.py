"""Each Keras reads what the other wrote of the reference models. programs.py compares their training."""

import json
import os
import subprocess
import sys

import pytest

from tests.keras_3.model_program import EXCHANGED

pytestmark = pytest.mark.slow
LEGACY, KERAS_3 = "1", "0"  # TF_USE_LEGACY_KERAS


def run(keras, *acts):
    program = [sys.executable, "-m", "tests.keras_3.model_program", *acts]
    done = subprocess.run(
        program, env={**os.environ, "TF_USE_LEGACY_KERAS": keras}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of tf_keras, then of Keras 3 and of tf_keras again. The last two read what the other Keras wrote."""
    of_legacy, of_keras_3 = (tmp_path_factory.mktemp(name) for name in ("legacy", "keras_3"))
    return (
        run(LEGACY, f"write:{of_legacy}"),
        run(KERAS_3, f"write:{of_keras_3}", f"read:{of_legacy}"),
        run(LEGACY, f"read:{of_keras_3}"),
    )


@pytest.mark.parametrize("model", EXCHANGED)
def test_checkpoints_exports_and_deltas_of_the_other_keras(results, model):
    for reads in (results[1], results[2]):
        differences = {name: reads[model][name] for name in ("checkpoint", "export", "slots", "delta")}
        assert differences["checkpoint"] == 0
        assert max(differences.values()) < 1e-6, differences


def test_files_and_lists_of_weights_have_the_rows(results):
    assert [result["keras_file"] for result in results[:2]] == [0, 0]
