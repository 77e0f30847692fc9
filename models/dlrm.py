"""DLRM, a baseline for GRM: the same inputs without a sequence model.

    dense of exposure and history ─▶ bottom network ─┐
    context ids, item, its features ─ embeddings ────┼─▶ products of all pairs ─▶ top network ─▶ one logit for each task
    history items, actions ─ embeddings, their mean ─┘

Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems (2019).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_fusedrec import keras, tf
from tf_fusedrec.models.base import Batch
from tf_fusedrec.models.experiment.model_config import DLRMConfig
from tf_fusedrec.models.exposure_model import ExposureModel, network, products
from tf_fusedrec.models.parts.dense_inputs import DenseInputs


class DLRM(ExposureModel):
    """Scores every exposure of every user from its own features and the mean of the user's history.

    RankingModel documents the arguments and the call.
    """

    config: DLRMConfig

    def __init__(
        self,
        config: DLRMConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        popularity: np.ndarray,
        name: str = "dlrm",
    ):
        super().__init__(config, embedding, catalogue, popularity, name)
        self.bottom = network([*config.bottom_units, config.dim], config.dropout, "bottom")
        self.top = network(config.top_units, config.dropout, "top")
        self._vectors = 1 + self.num_vectors + len(self.event_columns)

    def hidden(self, inputs: Batch, rows: dict[str, Any], numbers: DenseInputs, training: bool | None) -> tf.Tensor:
        bottom = self.bottom(self.dense(inputs, numbers), training=training)
        vectors = [bottom, *self.vectors(inputs, rows), *self.mean_vectors(inputs, rows)]
        stacked = self.dropout(tf.stack(vectors, axis=1), training=training)
        inner = tf.matmul(stacked, stacked, transpose_b=True)
        # Each pair of different vectors counts once. The vectors stay inputs, because products lose their own values.
        pairs = tf.gather(tf.reshape(inner, [-1, self._vectors**2]), self._pairs(), axis=1)
        flat = tf.reshape(stacked, [-1, self._vectors * self.config.dim])
        return self.top(tf.concat([flat, pairs], axis=1), training=training)

    def hidden_flops(self, batch: Batch) -> tf.Tensor:
        config, vectors = self.config, self._vectors
        top = [vectors * config.dim + vectors * (vectors - 1) // 2, *config.top_units, len(config.tasks)]
        per_exposure = products([self.dense_columns, *config.bottom_units, config.dim]) + products(top)
        per_exposure += 2 * vectors**2 * config.dim
        return tf.cast(self.num_positions(batch) * per_exposure, tf.float64)

    def _pairs(self) -> np.ndarray:
        first, second = np.triu_indices(self._vectors, k=1)
        return first * self._vectors + second
