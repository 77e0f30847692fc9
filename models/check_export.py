"""Checks that the SavedModel, loaded by another process, gives the trained model's outputs."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from tf_fusedrec import tf
from tf_fusedrec.data import ParquetFolder, TokenBatches
from tf_fusedrec.layers import jagged
from tf_fusedrec.models import run_signature
from tf_fusedrec.models.build import columns
from tf_fusedrec.models.experiment import Experiment
from tf_fusedrec.models.experiment.ranking_config import ROLES
from tf_fusedrec.models.export import event_columns
from tf_fusedrec.models.ranking import RankingModel, ids_of_lists
from tf_fusedrec.models.retrieval import HSTURetrieval

# The weights and ops are equal. float32 sums of at most a thousand terms near 1 may run in another order.
TOLERANCE = 1e-4
CHECK_TOKENS = 2048
SERVER_SECONDS = 300


def expected_answer(
    experiment: Experiment, model: RankingModel | HSTURetrieval, folder: pathlib.Path
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns inputs of the signature "serving_default" and the trained model's outputs for them. Collective.

    The samples come from the training split. An unknown id has the same row here as in the SavedModel.
    """
    data = ParquetFolder(
        folder / "train", columns(experiment.model, "train"), rank=0, ranks=1, bad_rows=experiment.data.bad_rows
    )
    lists = [column.name for column in data.columns if column.ragged][:1]
    tokens = max(CHECK_TOKENS, experiment.train.target_tokens_per_rank)  # no training row is longer
    batch = next(iter(TokenBatches(data, length_columns=lists, target_tokens_per_rank=tokens).dataset()))
    if isinstance(model, RankingModel):
        logits = model(batch, training=False)
        return _ranking_inputs(model, batch), {task: tf.sigmoid(x).numpy() for task, x in logits.items()}
    items = jagged.last(batch["item_id"], experiment.model.max_history)
    times = jagged.last(batch["timestamp"], experiment.model.max_history)
    query_time = tf.reduce_max(times, axis=1) + 60
    inputs = {
        "item_id": items.values.numpy(),
        "timestamp": times.values.numpy(),
        "row_splits": items.row_splits.numpy(),
        "query_time": query_time.numpy(),
    }
    return inputs, {"user_embedding": model.embed_users(items, times, query_time).numpy()}


def check_export(
    saved_model: str | os.PathLike, inputs: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> float:
    """Runs models/run_signature.py on the SavedModel in another process and returns the largest difference.

    Raises:
      RuntimeError: The process failed, or its outputs differ by more than TOLERANCE.
    """
    with tempfile.TemporaryDirectory() as temporary:
        given, answered = pathlib.Path(temporary) / "inputs.npz", pathlib.Path(temporary) / "outputs.npz"
        np.savez(given, **inputs)
        command = [sys.executable, run_signature.__file__, "--model", os.fspath(saved_model)]
        command += ["--inputs", str(given), "--outputs", str(answered)]
        # The server must not join this Horovod job.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        done = subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=SERVER_SECONDS
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr}")
        with np.load(answered) as outputs:
            difference = max(
                float(np.max(np.abs(outputs[name] - value), initial=0.0)) for name, value in expected.items()
            )
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"SavedModel {os.fspath(saved_model)} differs from the trained model by {difference:.3g}, more than "
            f"{TOLERANCE:g}. Do not serve it."
        )
    return difference


def _ranking_inputs(model: RankingModel, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    config = model.config
    inputs = {name: batch[name].numpy() for name in (*config.contextual, *config.contextual_dense)}
    for name in config.contextual_lists:
        inputs |= {name: batch[name].values.numpy(), f"{name}_row_splits": batch[name].row_splits.numpy()}
    for role in ROLES:
        inputs[f"{role}_row_splits"] = batch[f"{role}_item"].row_splits.numpy()
        for name in (*event_columns(config, role), *config.dense_columns(role)):
            inputs[name] = batch[name].values.numpy()
        inputs |= {name: ids_of_lists(batch, name).values.numpy() for name in config.list_columns(role)}
    return inputs
