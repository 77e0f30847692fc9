"""From a checkpoint to a SavedModel of stock TensorFlow ops, which a server loads with TensorFlow alone.

    python -m models.export --checkpoint runs/grm_tiny/checkpoint --output runs/grm_tiny/saved_model

The model is built again around a FrozenEmbedding of the checkpoint's rows. Unknown ids get a row of zeros.
Signatures take flat tensors; a ragged feature is its values and the row_splits <int64>[B+1] it shares with its group:

ranking, "serving_default"
  history_item, history_action, history_time <int64>[H], history_row_splits; exposed_item, exposed_time <int64>[E],
  exposed_row_splits; every contextual column <int64>[B].   ->   ctr, ctcvr <float>[E] probabilities.
retrieval, "serving_default"
  item_id, timestamp <int64>[T], row_splits, query_time <int64>[B] (seconds).  ->  user_embedding <float>[B, D].
retrieval, "top_k"
  the same and k <int32>[].  ->  ids <int64>[B, k], scores <float>[B, k]; items of the history left out.
Histories longer than the model's are cut to their newest events.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app, flags

import tf_fusedrec as fr
from models.build import make_model, table_of_feature
from models.experiment import RankingConfig, from_dict
from models.frozen import FrozenEmbedding
from models.grm import GRM, TASKS
from models.retrieval import HSTURetrieval
from tf_fusedrec import tf
from tf_fusedrec.layers import STOCK, jagged


def export(checkpoint: str | os.PathLike, output: str | os.PathLike) -> None:
    """Writes the SavedModel of a checkpoint that models.train made. Not collective: one process calls it.

    Args:
      checkpoint: its folder.
      output: folder of the SavedModel; what stood there is replaced at the end, at once.

    Raises:
      ValueError: no checkpoint of ours, or one that lacks weights of the model.
    """
    extra = fr.checkpoint.read_manifest(checkpoint)["extra"]
    if not extra or "experiment" not in extra:
        raise ValueError(
            f"--checkpoint {os.fspath(checkpoint)!r} was not written by models.train: it names no experiment."
        )
    experiment = from_dict(extra["experiment"])
    embedding = FrozenEmbedding(fr.checkpoint.read_tables(checkpoint), table_of_feature(experiment.model))
    # Any distinct ids of the right number; the checkpoint holds the true ones. Serving draws no negatives.
    items = max(extra["items"], 1)
    model = make_model(experiment, embedding, np.arange(items), np.ones(items, np.int64))
    for block in model.blocks:
        if hasattr(block, "kernels"):
            block.kernels = STOCK  # a server has no op of ours
    server = _RankingServer(model) if isinstance(model, GRM) else _RetrievalServer(model)
    signatures = server.signatures()  # tracing makes all weights
    _read_dense(model, checkpoint)
    # The module holds variables only: with the Keras model in it, every layer's training call would be saved too.
    module = tf.Module()
    module.variables_of_signatures = [*model.variables, *embedding.table_variables]
    final = pathlib.Path(output)
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tf.saved_model.save(
        module,
        str(partial),
        signatures=signatures,
        # Gradients of the training path mean nothing to a server.
        options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
    )
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _read_dense(model: GRM | HSTURetrieval, checkpoint: str | os.PathLike) -> None:
    path = fr.checkpoint.dense_prefix(checkpoint)
    status = tf.train.Checkpoint(model=model).read(path)
    try:
        status.assert_existing_objects_matched().expect_partial()
    except AssertionError as error:
        raise ValueError(f"{path} does not hold all weights of the model: {error}") from error


class _RankingServer:
    """What a server of a GRM loads."""

    def __init__(self, model: GRM):
        self._config: RankingConfig = model.config
        self._model = model

    def signatures(self) -> dict[str, Any]:
        names = ["history_item", "history_action", "history_time", "history_row_splits"]
        names += ["exposed_item", "exposed_time", "exposed_row_splits", *self._config.contextual]
        inputs = {name: tf.TensorSpec([None], tf.int64, name=name) for name in names}
        return {"serving_default": tf.function(self.scores).get_concrete_function(inputs)}

    def scores(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        batch = {name: inputs[name] for name in self._config.contextual}
        for name in ("history_item", "history_action", "history_time"):
            ragged = tf.RaggedTensor.from_row_splits(inputs[name], inputs["history_row_splits"])
            batch[name] = jagged.last(ragged, self._config.max_history)
        for name in ("exposed_item", "exposed_time"):
            batch[name] = tf.RaggedTensor.from_row_splits(inputs[name], inputs["exposed_row_splits"])
        logits = self._model(batch, training=False)
        return {task: tf.sigmoid(logits[task]) for task in TASKS}


class _RetrievalServer:
    """What a server of a retrieval model loads."""

    def __init__(self, model: HSTURetrieval):
        self._model = model

    def signatures(self) -> dict[str, Any]:
        names = ("item_id", "timestamp", "row_splits", "query_time")
        inputs = {name: tf.TensorSpec([None], tf.int64, name=name) for name in names}
        return {
            "serving_default": tf.function(self.user_embedding).get_concrete_function(inputs),
            "top_k": tf.function(self.top_k).get_concrete_function(
                {**inputs, "k": tf.TensorSpec([], tf.int32, name="k")}
            ),
        }

    def user_embedding(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        newest = self._model.config.max_history
        items, times = (
            jagged.last(tf.RaggedTensor.from_row_splits(inputs[name], inputs["row_splits"]), newest)
            for name in ("item_id", "timestamp")
        )
        return {"user_embedding": self._model.embed_users(items, times, inputs["query_time"])}

    def top_k(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        users = self.user_embedding(inputs)["user_embedding"]
        catalogue = self._model.catalogue
        scores = tf.matmul(users, self._model.embed_items(catalogue), transpose_b=True)
        # What the user has seen is no candidate: its score becomes the lowest.
        seen = tf.RaggedTensor.from_row_splits(inputs["item_id"], inputs["row_splits"])
        last = tf.size(catalogue) - 1
        place = tf.minimum(tf.searchsorted(catalogue, seen.values), last)
        known = tf.gather(catalogue, place) == seen.values
        pairs = tf.stack([tf.cast(seen.value_rowids(), tf.int32), place], axis=1)
        pairs = tf.boolean_mask(pairs, known)
        scores = tf.tensor_scatter_nd_update(scores, pairs, tf.fill([tf.shape(pairs)[0]], scores.dtype.min))
        best, index = tf.math.top_k(scores, inputs["k"])
        return {"ids": tf.gather(catalogue, index), "scores": best}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {list(argv[1:])}; see --help")
    try:
        export(flags.FLAGS.checkpoint, flags.FLAGS.output)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"saved model: {flags.FLAGS.output}")


if __name__ == "__main__":
    flags.DEFINE_string("checkpoint", None, "Folder of a checkpoint that models.train wrote.", required=True)
    flags.DEFINE_string("output", None, "Folder of the SavedModel to write.", required=True)
    app.run(main)
