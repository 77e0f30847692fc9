"""The base of the models without a sequence model (dlrm.py, din.py, dcn.py), which score every exposure alone.

They get equal inputs: dense columns of the exposure, the rows of its user's context, its own rows, and the history.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec import keras, tf
from tf_fusedrec.models.base import Batch
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.parts.dense_inputs import DenseInputs
from tf_fusedrec.models.ranking import RankingModel


class ExposureModel(RankingModel):
    """Scores every exposure of every user from a last hidden layer of its own, by one output for each task.

    RankingModel documents the arguments and the call.
    """

    def __init__(
        self,
        config: RankingConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        popularity: np.ndarray,
        name: str,
    ):
        super().__init__(config, embedding, catalogue, popularity, name)
        self.dropout = keras.layers.Dropout(config.dropout)
        self.head = keras.layers.Dense(len(config.tasks), name="head")

    @abc.abstractmethod
    def hidden(self, inputs: Batch, rows: dict[str, Any], numbers: DenseInputs, training: bool | None) -> tf.Tensor:
        """Returns the last hidden layer, <float>[E, n].

        Args:
          inputs: The batch.
          rows: Embedding rows of all features, as `rows_of` returns them.
          numbers: Normalised numbers, as `dense_of` returns them.
          training: True if dropout is on.
        """

    @abc.abstractmethod
    def hidden_flops(self, batch: Batch) -> tf.Tensor:
        """Counts multiplications and additions of the matrix products of `hidden` and of the head, <float64>[]."""

    def call(self, inputs: Batch, training: bool | None = None) -> dict[str, tf.Tensor]:
        logits = self.head(self.hidden(*self.read(inputs, training), training))
        return dict(zip(self.config.tasks, tf.unstack(tf.cast(logits, tf.float32), axis=1)))

    def counts(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        history, exposed = batch["history_item"], batch["exposed_item"]
        return history.nrows(), tf.size(history.values, tf.int64) + tf.size(exposed.values, tf.int64)

    def forward_flops(self, batch: Batch) -> tf.Tensor:
        return self.hidden_flops(batch) + self.projection_flops(batch)

    def dense(self, inputs: Batch, numbers: DenseInputs) -> tf.Tensor:
        """Returns the numbers of each exposure, of its user, and the mean of the history's, <float32>[E, n]."""
        parts = [*self.own_numbers(inputs, numbers), *self.mean_numbers(inputs, numbers)]
        return tf.concat(parts, axis=1) if parts else tf.zeros([tf.size(inputs["exposed_item"].values), 0])


def network(units: Sequence[int], dropout: float, name: str) -> keras.Sequential:
    """Returns layers of `units` outputs with ReLU, each with dropout behind it."""
    layers: list[Any] = []
    for width in units:
        layers += [keras.layers.Dense(width, activation="relu"), keras.layers.Dropout(dropout)]
    return keras.Sequential(layers, name=name)


def products(sizes: Sequence[int]) -> int:
    """Counts multiplications and additions of a chain of layers of these sizes, the input's first, for one row."""
    return 2 * sum(math.prod(pair) for pair in zip(sizes, sizes[1:]))
