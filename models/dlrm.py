"""DLRM, the baseline for GRM: the same inputs without a sequence model.

    dense of exposure and history ─▶ bottom network ─┐
    context ids, item, its features ─ embeddings ────┼─▶ products of all pairs ─▶ top network ─▶ one logit for each task
    history items, actions ─ embeddings, their mean ─┘

Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems (2019).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from models.base import Batch
from models.model_config import DLRMConfig
from models.ranking import RankingModel
from tf_fusedrec import keras, tf

_DAY = 86_400.0
_DENSE = 4  # Columns of _dense.


class DLRM(RankingModel):
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
        self.bottom = _network([*config.bottom_units, config.dim], config.dropout, "bottom")
        self.top = _network([*config.top_units], config.dropout, "top")
        self.head = keras.layers.Dense(len(config.tasks), name="head")
        self.dropout = keras.layers.Dropout(config.dropout)
        exposed, history = len(config.columns_of("exposed")), len(config.columns_of("history")) + 1
        self._vectors = 1 + len(config.contextual) + exposed + history

    def call(self, inputs: Batch, training: bool | None = None) -> dict[str, tf.Tensor]:
        config, rows = self.config, self.rows_of(inputs, training)
        user = inputs["exposed_item"].value_rowids()
        bottom = self.bottom(_dense(inputs), training=training)
        vectors = [bottom, *(tf.gather(rows[name], user) for name in config.contextual)]
        vectors += [rows[name].values for name in config.columns_of("exposed")]
        vectors += [tf.gather(_mean(rows[name]), user) for name in (*config.columns_of("history"), "history_action")]
        stacked = self.dropout(tf.stack(vectors, axis=1), training=training)
        products = tf.matmul(stacked, stacked, transpose_b=True)
        # Each pair of different vectors counts once. The vectors stay inputs, because products lose their own values.
        pairs = tf.gather(tf.reshape(products, [-1, self._vectors**2]), self._pairs(), axis=1)
        flat = tf.reshape(stacked, [-1, self._vectors * config.dim])
        logits = self.head(self.top(tf.concat([flat, pairs], axis=1), training=training))
        return dict(zip(config.tasks, tf.unstack(tf.cast(logits, tf.float32), axis=1)))

    def counts(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        history, exposed = batch["history_item"], batch["exposed_item"]
        return history.nrows(), tf.size(history.values, tf.int64) + tf.size(exposed.values, tf.int64)

    def forward_flops(self, batch: Batch) -> tf.Tensor:
        config, vectors = self.config, self._vectors
        bottom = [_DENSE, *config.bottom_units, config.dim]
        top = [vectors * config.dim + vectors * (vectors - 1) // 2, *config.top_units, len(config.tasks)]
        weights = sum(math.prod(pair) for sizes in (bottom, top) for pair in zip(sizes, sizes[1:]))
        per_exposure = 2 * (weights + vectors**2 * config.dim)
        return tf.cast(self.num_positions(batch) * per_exposure, tf.float64) + self.projection_flops(batch)

    def _pairs(self) -> np.ndarray:
        first, second = np.triu_indices(self._vectors, k=1)
        return first * self._vectors + second


def _network(units: list[int], dropout: float, name: str) -> keras.Sequential:
    layers: list[Any] = []
    for width in units:
        layers += [keras.layers.Dense(width, activation="relu"), keras.layers.Dropout(dropout)]
    return keras.Sequential(layers, name=name)


def _dense(inputs: Batch) -> tf.Tensor:
    """Returns <float>[E, 4]: the history's length, the time since its newest event, and the hour's sine and cosine."""
    history, exposed = inputs["history_time"], inputs["exposed_time"]
    user = exposed.value_rowids()
    lengths = history.row_lengths()
    last = tf.gather(tf.concat([history.values, [0]], axis=0), tf.maximum(history.row_splits[1:] - 1, 0))
    gap = tf.cast(exposed.values - tf.gather(tf.where(lengths > 0, last, 0), user), tf.float32)
    gap = tf.where(tf.gather(lengths, user) > 0, tf.math.log1p(tf.maximum(gap, 0.0)), 0.0)
    angle = tf.cast(tf.math.floormod(exposed.values, int(_DAY)), tf.float32) * (2 * math.pi / _DAY)
    long = tf.math.log1p(tf.cast(tf.gather(lengths, user), tf.float32))
    return tf.stack([long, gap / 10.0, tf.sin(angle), tf.cos(angle)], axis=1)


def _mean(rows: tf.RaggedTensor) -> tf.Tensor:
    """Returns the mean <float>[B, D] of each user's rows, or zeros without rows."""
    total = tf.math.unsorted_segment_sum(rows.values, rows.value_rowids(), rows.nrows())
    return total / tf.cast(tf.maximum(rows.row_lengths(), 1), total.dtype)[:, tf.newaxis]
