"""The base of all models: it counts a training step and reduces its loss over ranks.

A batch is ONE dict of features and labels, so `model.fit(dataset)` needs no other argument. ranking.py and
retrieval.py define the loss of a position.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec import keras, losses, tf
from tf_fusedrec.losses.objectives import total_weight
from tf_fusedrec.metrics import SummedMetric
from tf_fusedrec.schedules import PipelinedModel

Batch = Mapping[str, Any]
# A forward matrix product needs two of its size backward. Recomputation in a kernel is not useful work.
TRAINING_PASSES = 3


def constant(layer: keras.layers.Layer, name: str, values: np.ndarray | np.number) -> Any:
    """Returns a weight with these values, which no gradient trains. Checkpoints and exports hold it."""
    weight = layer.add_weight(
        name=name, shape=values.shape, dtype=values.dtype.name, initializer="zeros", trainable=False
    )
    weight.assign(values)
    return weight


class _Total(SummedMetric):
    """A sum over steps. keras.metrics.Sum makes more ops in a step."""

    def __init__(self, name: str):
        super().__init__(name, total=())

    def update_state(self, value: tf.Tensor) -> None:
        self.add(value)

    def value_of(self, *states: tf.Tensor) -> tf.Tensor:
        return states[0]


class _Mean(SummedMetric):
    """A weighted mean over steps. keras.metrics.Mean makes more ops in a step."""

    def __init__(self, name: str):
        super().__init__(name, total=(), weight=())

    def update_state(self, value: tf.Tensor, weight: tf.Tensor) -> None:
        self.add(value * weight, weight)

    def value_of(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(total, weight)


class SequenceModel(PipelinedModel, abc.ABC):
    """A keras.Model over dict batches whose loss is a global mean over positions.

    The attribute `schedule`, which may be set, lays out the training step; see tf_fusedrec.schedules.

    Args:
      embedding: Layer that maps {feature: ids} to {feature: rows}: FusedEmbedding, or any layer with the same call. A
        step calls it once per micro-batch.
    """

    def __init__(self, embedding: keras.layers.Layer, name: str):
        super().__init__(name=name)
        self.embedding = embedding
        # The checkpoint holds the step count, so that a resumed run makes the same draws.
        self.step = constant(self, "step", np.int64(0))
        self._loss = _Mean("loss")
        self._events, self._samples = _Total("events"), _Total("samples")
        self._tokens, self._gflops = _Total("tokens"), _Total("gflops")

    def build(self, input_shape: Any) -> None:
        """Leaves the layers to the first call. Keras 3 would call the model with symbols to build them."""
        self.built = True

    @abc.abstractmethod
    def position_losses(self, batch: Batch, outputs: Any) -> tf.Tensor:
        """Returns the loss of each position of this rank's batch, <float>[n]."""

    @abc.abstractmethod
    def num_positions(self, batch: Batch) -> tf.Tensor:
        """Returns the number n of `position_losses` without computing them, <int64>[]."""

    @abc.abstractmethod
    def counts(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the numbers of samples (users) and of tokens of a batch, <int64>[] each."""

    @abc.abstractmethod
    def forward_flops(self, batch: Batch) -> tf.Tensor:
        """Counts useful multiplications and additions of the matrix products of a forward pass, <float64>[]."""

    @property
    def _layout(self) -> Any:
        """The layout of a FusedEmbedding, which names the ranks that share a loss; None for other layers."""
        return getattr(self.embedding, "layout", None)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self._loss, self._events, self._samples, self._tokens, self._gflops]

    @property
    def alike_on_all_ranks(self) -> list[tf.Variable]:
        """Variables that a batch without samples changes like any other, because all ranks weigh the loss alike."""
        return [self.step, *self._loss.variables]

    def train_step(self, data: Batch) -> dict[str, tf.Tensor]:
        # A step at the end of the data has no batch and must not count.
        with tf.control_dependencies(tf.nest.flatten(data, expand_composites=True)):
            self.step.assign_add(1)
        return super().train_step(data)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> tf.Tensor:
        """Returns R * (sum of this rank's losses) / (positions of all R ranks). Its average over ranks is the mean.

        Where groups of ranks train apart, "all ranks" means the ranks of this rank's group; see losses.global_mean.
        """
        if y is not None or sample_weight is not None:
            raise ValueError(
                f"{self.name} takes one dict of features and labels per batch, got labels or weights "
                "beside it. Put the labels into the dict, and weights into position_losses."
            )
        positions = self.micro_batch.weight
        if positions is None:
            # The count comes from the data, not from the losses, so the backward pass need not wait for other ranks.
            positions = self._positions_of_all(self.num_positions(x), name="loss")
        loss = losses.global_mean(self.position_losses(x, y_pred), total=positions, layout=self._layout)
        samples, tokens = self.counts(x)
        self._events.update_state(self.num_positions(x))
        # A step in which no rank has a position, as at the end of an epoch, is no sample of the mean loss.
        self._loss.update_state(loss, tf.where(positions > 0, self.micro_batch.share, 0.0))
        self._samples.update_state(samples)
        self._tokens.update_state(tokens)
        self._gflops.update_state(TRAINING_PASSES * self.forward_flops(x) / 1e9)
        return loss

    def loss_weights(self, pieces: Sequence[Batch]) -> tf.Tensor:
        """Returns the positions of each micro-batch, summed over the ranks that share the loss: <float32>[M]."""
        return self._positions_of_all(tf.stack([self.num_positions(piece) for piece in pieces]), name="weights")

    def _positions_of_all(self, positions: tf.Tensor, name: str) -> tf.Tensor:
        return total_weight(tf.cast(positions, tf.float32), name=f"{self.name}.{name}", layout=self._layout)
