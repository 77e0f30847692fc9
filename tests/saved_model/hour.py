"""A server follows an hour of training: one delta every ten seconds, here without the pauses.

    python -m tests.saved_model.hour --deltas 360

Writes a stock export and a chain of deltas, then starts follower.py where only TensorFlow is installed. All rows and
weights are small integers, so every sum is exact, and the answers of every version are known by formula.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np

import tf_fusedrec as fr
from tests.support.only_tensorflow import make_environment
from tf_fusedrec import keras, tf
from tf_fusedrec.saved_model import applying, delta
from tf_fusedrec.saved_model.versions import version_of

ROWS, CHANGED, DIM = 4000, 1000, 256
INITIAL = {"a": 3.0, "b": 0.0}  # rows of unknown ids
FOLLOWER = pathlib.Path(__file__).with_name("follower.py")
QUESTION = np.concatenate([np.arange(0, ROWS, 40), np.arange(ROWS, ROWS + 60), [-(2**63), 2**63 - 1]])


def make_model() -> keras.Model:
    """Returns a model of two tables in one group. Its answer is a weighted sum of both rows."""
    tables = [
        fr.TableConfig("a", DIM, fr.optimizers.SGD(1.0), fr.Constant(INITIAL["a"])),
        fr.TableConfig("b", DIM, fr.optimizers.SGD(1.0), unknown="zeros"),
    ]
    embedding = fr.FusedEmbedding([fr.FeatureConfig("x", "a"), fr.FeatureConfig("y", "b")], tables)
    inputs = {name: keras.Input([], dtype=tf.int64, name=name) for name in "xy"}
    rows = embedding(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="score")(keras.layers.Concatenate()([rows["x"], rows["y"]])))
    model.compile("sgd", "mse")
    return model


class Training:
    """Rows and weights that change at every step, as small integers."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.tables = {name: {i: self.row() for i in range(ROWS)} for name in INITIAL}
        self.weights = [np.ones([2 * DIM, 1], np.float32), np.zeros([1], np.float32)]

    def row(self) -> np.ndarray:
        return self.random.integers(-8, 8, DIM).astype(np.float32)

    def step(self) -> None:
        """Changes and adds rows, removes some, and changes the weights."""
        for rows in self.tables.values():
            for i in self.random.choice(ROWS + 60, CHANGED, replace=False).tolist():
                rows[i] = self.row()
            for i in self.random.choice(sorted(rows), 20, replace=False).tolist():
                del rows[i]
        self.weights = [self.random.integers(-8, 8, w.shape).astype(np.float32) for w in self.weights]

    def answer(self) -> np.ndarray:
        """The answer of the current version to QUESTION in both features."""
        rows = [
            np.stack([self.tables[name].get(i, np.full(DIM, unknown, np.float32)) for i in QUESTION.tolist()])
            for name, unknown in INITIAL.items()
        ]
        return np.concatenate(rows, 1) @ self.weights[0] + self.weights[1]

    def arrays(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Ids and rows by table, in the form of applying.read_tables."""
        ids = {name: np.array(sorted(rows)) for name, rows in self.tables.items()}
        return {name: (of, applying.bytes_of(np.stack([self.tables[name][i] for i in of]))) for name, of in ids.items()}


def write(folder: pathlib.Path, steps: int) -> np.ndarray:
    """Writes "export", "deltas/" and the full export "last". Returns the answers by version."""
    training = Training()
    model = _export(training, folder / "export")
    answers, before = [training.answer()], folder / "export"
    (folder / "deltas").mkdir()
    for step in range(1, steps + 1):
        training.step()
        model.layers[-1].set_weights(training.weights)
        after = folder / f"full-{step}"
        _write_full(folder / "export", after, training, model.variables)
        shutil.copytree(after, folder / "moved")  # A delta takes the files of its export.
        delta.write_delta(
            before, folder / "moved", folder / "deltas" / f"{step:04}", [w.numpy() for w in model.variables]
        )
        if before.name != "export":
            shutil.rmtree(before)
        before = after
        answers.append(training.answer())
    _export(training, folder / "last")
    return np.stack(answers)


def _export(training: Training, to: pathlib.Path) -> keras.Model:
    """Writes a full export of the current version by fr.export. Returns its model."""
    model = make_model()
    for name, (ids, rows) in training.arrays().items():
        fr.checkpoint.warm_start(model, name, ids, rows.view(np.float32))
    model.layers[-1].set_weights(training.weights)
    fr.export(model, to)
    return model


def _write_full(export: pathlib.Path, to: pathlib.Path, training: Training, weights: list[tf.Variable]) -> None:
    """Writes what a delta reads from the full export of a step: all but its graph, which is of the first one."""
    shutil.copytree(export, to)
    tensors = applying.read_bundle(to)
    for at, weight in enumerate(weights):
        tensors[f"dense_weights/{at}/.ATTRIBUTES/VARIABLE_VALUE"] = weight.numpy()
    applying.write_bundle(to, tensors)
    applying.put_tables(to, training.arrays())
    path = to / applying.DESCRIPTION
    described = json.loads(path.read_text(encoding="utf-8"))
    described["version"] = version_of(described["layout"], training.arrays(), weights)
    path.write_text(json.dumps(described), encoding="utf-8")


def follow(folder: pathlib.Path, answers: np.ndarray) -> dict[str, float]:
    """Runs follower.py where only TensorFlow is installed, and returns its figures."""
    np.savez(folder / "expected.npz", question=QUESTION, answers=answers)
    python = make_environment(folder / "venv")
    inherited = ("TF_USE_LEGACY_KERAS", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    texts = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    done = subprocess.run([python, FOLLOWER, folder], env=environment, timeout=1800, **texts)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--deltas", type=int, default=360)
    steps = parser.parse_args().deltas
    with tempfile.TemporaryDirectory() as temporary:
        print(follow(pathlib.Path(temporary), write(pathlib.Path(temporary), steps)))
