"""Keras 3 and tf_keras train the same models to the same losses, weights and rows (programs.py)."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from tests.keras_3.programs import PROGRAMS

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Both Keras round the formulas of an optimizer differently. Weights are about 1, and 20 steps move them by 0.1.
TOLERANCE = 1e-6


@functools.cache
def answers(ranks: int) -> dict[str, list[dict]]:
    """By Keras, the answers of each rank. The processes of both run at once."""
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for name, switch in (("legacy", "1"), ("keras_3", "0")):
            env = {**os.environ, "TF_USE_LEGACY_KERAS": switch, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
            launcher = [str(pathlib.Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(ranks)]
            command = [sys.executable, "-m", "tests.keras_3.programs", str(pathlib.Path(folder, name))]
            running[name] = subprocess.Popen(
                [*(launcher if ranks > 1 else ()), *command], env={**env, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
            )  # fmt: skip
        for name, process in running.items():
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, f"{name}:\n{output}"
        files = {name: [pathlib.Path(folder, f"{name}.{rank}") for rank in range(ranks)] for name in running}
        return {name: [json.loads(path.read_text(encoding="utf-8")) for path in paths] for name, paths in files.items()}


def assert_same(path: str, legacy: object, keras_3: object) -> None:
    """Compares numbers in nested dicts and lists, which may differ in length."""
    if isinstance(legacy, dict):
        assert set(keras_3) == set(legacy), path
        for name, value in legacy.items():
            assert_same(f"{path}/{name}", value, keras_3[name])
    elif isinstance(legacy, list) and any(isinstance(item, list) for item in legacy):
        assert len(keras_3) == len(legacy), path
        for number, values in enumerate(zip(legacy, keras_3)):
            assert_same(f"{path}/{number}", *values)
    else:
        np.testing.assert_allclose(keras_3, legacy, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=False, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[pytest.mark.nightly] if ranks > 2 else [])
        for name, (most, _) in PROGRAMS.items()
        for ranks in range(1, most + 1)
    ],
)
def test_a_program_has_the_same_answers(name, ranks):
    both = answers(ranks)
    for rank, (legacy, keras_3) in enumerate(zip(both["legacy"], both["keras_3"])):
        assert_same(f"rank {rank}/{name}", legacy[name], keras_3[name])
