"""Stock exports load with TensorFlow alone, by every loader of servers, and give the model's answers.

The models are a small functional model, which the server joins from a base and a delta, a GRM and a retrieval model.
One process joins, another serves all.
"""

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

from tests.models.batches import START, ragged, ranking_batch
from tests.models.test_export import ITEMS, exported_once
from tests.saved_model import click_model
from tests.support.only_tensorflow import make_environment
from tf_fusedrec import tf

SERVER = pathlib.Path(__file__).parent / "server.py"
# The float32 weights are equal; sums of some hundred terms near 1 run in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LOADERS = ["saved_model", "keras", "v1", "cli"]


def click_signatures(click):
    """Returns inputs and outputs of version 2, by signature."""
    inputs = {name: value.numpy() for name, value in click_model.served(click_model.batch(2)).items()}
    return {"serving_default": (inputs, click.answers[2][2])}


def ranking_signatures(model):
    """Returns a batch and the model's scores of every candidate."""
    batch = ranking_batch(histories=[20, 0, 3], exposures=[2, 4, 1])
    inputs = {"user_budget": batch["user_budget"]}
    for group, names in (("history", ("item", "action", "time")), ("exposed", ("item", "time"))):
        inputs[f"{group}_row_splits"] = batch[f"{group}_item"].row_splits
        inputs.update({f"{group}_{name}": batch[f"{group}_{name}"].values for name in names})
    scores = {task: tf.sigmoid(logit) for task, logit in model(batch, training=False).items()}
    assert all(score.shape == [7] for score in scores.values())
    return {"serving_default": (inputs, scores)}


def retrieval_signatures(model):
    """Returns embeddings of users and their best unseen items."""
    items = ragged([19, 3], [*ITEMS[:19], 4, 5, 6])
    times = ragged([19, 3], [*(START + 60 * ITEMS[:19]), START, START + 5, START + 9])
    query = tf.constant([START + 5000, START + 900], tf.int64)
    inputs = {"item_id": items.values, "timestamp": times.values, "row_splits": items.row_splits, "query_time": query}
    users = model.embed_users(items, times, query)
    scores = tf.matmul(users, model.embed_items(tf.constant(ITEMS)), transpose_b=True).numpy()
    lowest = np.finfo(np.float32).min
    scores[0, :19], scores[1, [3, 4, 5]] = lowest, lowest  # seen
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
def served(click, tmp_path_factory):
    """Returns the folder of answers, and the expected answers by model, signature and loader."""
    folder = tmp_path_factory.mktemp("served")
    grm, of_grm = exported_once("grm")
    hstu, of_hstu = exported_once("hstu")
    # Every loader loads the click model. TensorFlow Serving loads as v1.
    cases = [
        ("click", folder / "click", click_signatures(click), LOADERS),
        ("ranking", of_grm, ranking_signatures(grm), ["v1"]),
        ("retrieval", of_hstu, retrieval_signatures(hstu), ["v1"]),
    ]
    jobs, wanted = [], []
    for name, model, signatures, loaders in cases:
        for signature, (inputs, outputs) in signatures.items():
            given, answered = folder / f"{name}.{signature}.inputs.npz", folder / f"{name}.{signature}"
            np.savez(given, **inputs)
            jobs.append(
                {"model": model, "signature": signature, "inputs": given, "outputs": answered, "loaders": loaders}
            )
            wanted.append((answered, outputs, loaders))
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str), encoding="utf-8")
    python = make_environment(folder / "venv")
    # The delta contains the program that joins it with its base.
    base, delta = click.folder / "stock", click.folder / "delta"
    run(python, delta / "apply_delta.py", base, delta, folder / "click")
    run(python, SERVER, folder / "jobs.json")
    return wanted


@pytest.mark.parametrize("loader", LOADERS)
def test_loader(loader, served):
    for prefix, expected, loaders in served:
        if loader in loaders:
            if loader == "cli":
                outputs = {path.stem: np.load(path) for path in pathlib.Path(f"{prefix}.cli").iterdir()}
            else:
                outputs = dict(np.load(f"{prefix}.{loader}.npz"))
            assert set(outputs) == set(expected)
            for name, value in expected.items():
                np.testing.assert_allclose(outputs[name], value, **CLOSE, err_msg=f"{prefix} {name}")
