"""The base of the ranking models (grm.py, dlrm.py): inputs by role, labels of every task, the loss of an exposure.

One sample is one user: scalar columns, the user's history, and exposures, each a separate target.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import tf_fusedrec as fr
from models.base import Batch, SequenceModel
from models.model_config import RankingConfig
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks.progressive import ProgressiveMetrics

RARE = -1  # The id that replaces every item below config.min_item_count.
_NO_ITEM = np.iinfo(np.int64).max


class RankingModel(SequenceModel):
    """Scores every exposure of every user, once for each task.

    Args:
      config: Names of the feature and label columns, and sizes.
      embedding: Layer with the features of config.table_of_feature. Rows of a table with other than config.dim columns
        are projected to config.dim, by a matrix of the table.
      catalogue: <int64>[I], distinct ids.
      popularity: <int64>[I], training interactions of each item of the catalogue.

    Call:
      inputs: Dict with contextual columns <int64>[B]; RaggedTensors <int64>[B,(L)] history_item, history_action and
        history_time (seconds), and <int64>[B,(E)] exposed_item and exposed_time. Each name of config.item_features
        adds history_<name> and exposed_<name>. The call ignores labels in the dict.
      returns {task: logits}, <float32>[exposures of the batch, by row]. "ctr" predicts a click, "ctcvr" a click with
        a conversion, and any other task its label.
    """

    def __init__(
        self,
        config: RankingConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        popularity: np.ndarray,
        name: str,
    ):
        super().__init__(embedding, name)
        self.config = config
        self.progressive: ProgressiveMetrics | None = None  # Set it before fit, and pass it to fit as a callback.
        tables = embedding.tables if isinstance(embedding, fr.FusedEmbedding) else []
        self._dims = {table.name: table.dim for table in tables if table.dim != config.dim}
        self.projections = {
            name: keras.layers.Dense(config.dim, use_bias=False, name=f"project_{name}") for name in self._dims
        }
        self._frequent = None
        if config.min_item_count > 1:
            frequent = np.full(max(len(catalogue), 1), _NO_ITEM)
            kept = np.sort(catalogue[np.asarray(popularity) >= config.min_item_count])
            frequent[: len(kept)] = kept
            # The checkpoint holds the list, because the exported model must know the same items.
            self._frequent = tf.Variable(frequent, trainable=False, name="frequent_items")

    def labels(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Returns {"ctr": click, "ctcvr": click and conversion, other tasks}, <float>[exposures of the batch]."""
        click = batch[self.config.click_label].values
        others = {name: batch[f"exposed_{name}"].values for name in self.config.other_labels}
        return {"ctr": click, "ctcvr": click * batch[self.config.conversion_label].values, **others}

    def position_losses(self, batch: Batch, outputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the cross entropy of each exposure, summed over the tasks: <float>[exposures]."""
        labels = self.labels(batch)
        return tf.add_n(
            [tf.nn.sigmoid_cross_entropy_with_logits(labels=labels[task], logits=outputs[task]) for task in outputs]
        )

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> tf.Tensor:
        if self.progressive is not None:
            self.progressive.update(self.labels(x), y_pred)
        return super().compute_loss(x, y, y_pred, sample_weight)

    def num_positions(self, batch: Batch) -> tf.Tensor:
        return tf.size(batch["exposed_item"].values, tf.int64)

    def projection_flops(self, batch: Batch) -> tf.Tensor:
        """Returns the part of `forward_flops` that projects rows to config.dim, <float64>[]."""
        flops = tf.zeros([], tf.float64)
        for name, table in self.config.table_of_feature.items():
            if table in self._dims:
                ids = batch[name].values if isinstance(batch[name], tf.RaggedTensor) else batch[name]
                flops += 2.0 * self._dims[table] * self.config.dim * tf.cast(tf.size(ids), tf.float64)
        return flops

    def rows_of(self, inputs: Batch, training: bool | None) -> dict[str, Any]:
        """Looks up the embedding rows of all features in one call."""
        ids = {name: inputs[name] for name in self.config.table_of_feature}
        if self._frequent is not None:
            for name in ("history_item", "exposed_item"):
                ids[name] = ids[name].with_values(self._frequent_or_rare(ids[name].values))
        if self.config.item_dropout and training:
            # The row of unknown items is so trained on items of every kind, not on rare ones alone.
            items = ids["exposed_item"].values
            dropped = tf.random.uniform(tf.shape(items)) < self.config.item_dropout
            items = tf.where(dropped, tf.constant(RARE, tf.int64), items)
            ids["exposed_item"] = ids["exposed_item"].with_values(items)
        rows = self.embedding(ids)
        return {name: self._projected(name, of_feature) for name, of_feature in rows.items()}

    def _projected(self, feature: str, rows: Any) -> Any:
        """Returns rows of config.dim columns, in the compute dtype of Keras' policy."""
        values = rows.values if isinstance(rows, tf.RaggedTensor) else rows
        project = self.projections.get(self.config.table_of_feature[feature])
        values = tf.cast(values if project is None else project(values), self.compute_dtype)
        return rows.with_values(values) if isinstance(rows, tf.RaggedTensor) else values

    def _frequent_or_rare(self, items: tf.Tensor) -> tf.Tensor:
        index = tf.minimum(tf.searchsorted(self._frequent, items), tf.size(self._frequent) - 1)
        return tf.where(tf.gather(self._frequent, index) == items, items, tf.constant(RARE, tf.int64))
