"""Stock exports load with TensorFlow alone, by every loader of servers, and give the model's answers.

The models are a small functional model, which the server joins from a base and a delta, the GRM of `make train`, and
the retrieval model of MovieLens-1M. One process joins, another serves all.
"""

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

import tf_fusedrec as fr
from models.experiment import load
from models.export import export
from tests.models.batches import START, ragged, ranking_batch
from tests.models.test_export import ITEMS, trained
from tests.saved_model import click_model
from tests.support.only_tensorflow import make_environment
from tf_fusedrec import tf

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = pathlib.Path(__file__).parent / "server.py"
# The float32 weights are equal; sums of some hundred terms near 1 run in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def click(folder):
    """Exports a base and a delta. Returns inputs and outputs of their join, by signature."""
    model = click_model.make_model()
    click_model.train(model)
    fr.export(model, folder / "base")
    click_model.train(model, [4, 5])
    fr.export(model, folder / "delta", base=folder / "base")
    inputs = click_model.batch(2)
    return {"serving_default": (click_model.served(inputs), model(inputs, training=False))}


def ranking(folder):
    """Exports the GRM of `make train` after a step, with its scores of every candidate."""
    batch = ranking_batch(histories=[40, 0, 3], exposures=[2, 4, 1])
    batch["user_device"] = batch["user_budget"]
    _, model = trained(load(ROOT / "configs/grm_tiny.yaml").to_dict(), batch)
    export(model, folder / "ranking")
    inputs = {name: batch[name] for name in ("user_budget", "user_device")}
    for group, names in (("history", ("item", "action", "time")), ("exposed", ("item", "time"))):
        inputs[f"{group}_row_splits"] = batch[f"{group}_item"].row_splits
        inputs.update({f"{group}_{name}": batch[f"{group}_{name}"].values for name in names})
    scores = {task: tf.sigmoid(logit) for task, logit in model(batch, training=False).items()}
    assert all(score.shape == [7] for score in scores.values())
    return {"serving_default": (inputs, scores)}


def retrieval(folder):
    """Exports the model of MovieLens-1M after a step, with embeddings of users and their best unseen items."""
    items = ragged([20, 3], [*ITEMS, 4, 5, 6])
    times = ragged([20, 3], [*(START + 60 * ITEMS), START, START + 5, START + 9])
    _, model = trained(load(ROOT / "configs/hstu_ml1m_tiny.yaml").to_dict(), {"item_id": items, "timestamp": times})
    export(model, folder / "retrieval")
    query = tf.constant([START + 5000, START + 900], tf.int64)
    inputs = {"item_id": items.values, "timestamp": times.values, "row_splits": items.row_splits, "query_time": query}
    users = model.embed_users(items, times, query)
    scores = tf.matmul(users, model.embed_items(tf.constant(ITEMS)), transpose_b=True).numpy()
    lowest = np.finfo(np.float32).min
    scores[0], scores[1, [3, 4, 5]] = lowest, lowest  # seen
    best = -np.sort(-scores, axis=1)[:, :17]
    ids = np.stack([ITEMS[np.argsort(-row, kind="stable")][:17] for row in scores])
    return {
        "serving_default": (inputs, {"user_embedding": users}),
        "top_k": ({**inputs, "k": tf.constant(17)}, {"ids": ids, "scores": best}),
    }


def run(*command):
    """Runs a process without this project on its path."""
    inherited = ("TF_USE_LEGACY_KERAS", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Returns the folder of answers, and the expected answers by model and signature."""
    folder = tmp_path_factory.mktemp("served")
    cases = {case.__name__: case(folder) for case in (click, ranking, retrieval)}
    jobs = []
    for model, signatures in cases.items():
        for signature, (inputs, _) in signatures.items():
            given, answered = folder / f"{model}.{signature}.inputs.npz", folder / f"{model}.{signature}"
            np.savez(given, **inputs)
            jobs.append({"model": folder / model, "signature": signature, "inputs": given, "outputs": answered})
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str), encoding="utf-8")
    python = make_environment(folder / "venv")
    # The delta contains the program that joins it with its base.
    run(python, folder / "delta/apply_delta.py", folder / "base", folder / "delta", folder / "click")
    run(python, SERVER, folder / "jobs.json")
    return folder, cases


@pytest.mark.parametrize("loader", ["saved_model", "keras", "v1", "cli"])
def test_loader(loader, served):
    folder, cases = served
    for model, signatures in cases.items():
        for signature, (_, expected) in signatures.items():
            prefix = folder / f"{model}.{signature}"
            if loader == "cli":
                outputs = {path.stem: np.load(path) for path in pathlib.Path(f"{prefix}.cli").iterdir()}
            else:
                outputs = dict(np.load(f"{prefix}.{loader}.npz"))
            assert set(outputs) == set(expected)
            for name, value in expected.items():
                np.testing.assert_allclose(outputs[name], value, **CLOSE, err_msg=f"{model} {signature} {name}")
