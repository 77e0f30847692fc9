"""DIN, a baseline for GRM: each exposure weighs the events of its user's history by target attention.

    history items, features, actions ─ embeddings ─▶ events ──┬─▶ activation unit ─▶ weights ─▶ sum of events ─┐
    exposed item, its features ─ embeddings ─────▶ candidate ─┴────────────────────────────────────────────────┼─▶ top
    context ids ─ embeddings, dense of exposure and history ───────────────────────────────────────────────────┘

Differences from the paper: ReLU in place of Dice, and the activation unit also sees the time since the event, which
GRM sees too. The weights are no softmax, so that their sum keeps the strength of an interest, as in the paper.

Source: Zhou et al., Deep Interest Network for Click-Through Rate Prediction (KDD 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec import keras, tf
from tf_fusedrec.models.base import Batch
from tf_fusedrec.models.experiment.model_config import DINConfig
from tf_fusedrec.models.exposure_model import ExposureModel, network, products
from tf_fusedrec.models.parts.dense_inputs import DenseInputs, dense_width, log_seconds


class DIN(ExposureModel):
    """Scores every exposure of every user from its own features and a weighted sum of the user's history.

    RankingModel documents the arguments and the call.
    """

    config: DINConfig

    def __init__(
        self,
        config: DINConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        popularity: np.ndarray,
        name: str = "din",
    ):
        super().__init__(config, embedding, catalogue, popularity, name)
        self._event_width = config.dim * len(self.event_columns) + dense_width(config, "history")
        candidate = config.dim * len(config.columns_of("exposed"))
        self.attention = TargetAttention(candidate, config.attention_units, name="attention")
        # Under Keras 3, the gradient of a loop finds no shape of a weight that the first step makes.
        self.attention.build([None, None, self._event_width])
        self.top = network(config.top_units, config.dropout, "top")

    def hidden(self, inputs: Batch, rows: dict[str, Any], numbers: DenseInputs, training: bool | None) -> tf.Tensor:
        parts = [rows[name].values for name in self.event_columns]
        if numbers.history is not None:
            parts.append(tf.cast(numbers.history.values, self.compute_dtype))
        events = inputs["history_item"].with_values(tf.concat(parts, axis=1))
        candidates = tf.concat([rows[name].values for name in self.config.columns_of("exposed")], axis=1)
        candidates = inputs["exposed_item"].with_values(candidates)
        interest = self.attention(events, candidates, inputs["history_time"], inputs["exposed_time"])
        dense = tf.cast(self.dense(inputs, numbers), self.compute_dtype)
        x = self.dropout(tf.concat([dense, *self.vectors(inputs, rows), interest], axis=1), training=training)
        return self.top(x, training=training)

    def hidden_flops(self, batch: Batch) -> tf.Tensor:
        config, dim, event, candidate = self.config, self.config.dim, self._event_width, self.attention.columns
        top = [self.dense_columns + self.num_vectors * dim + event, *config.top_units, len(config.tasks)]
        first, *others = config.attention_units
        counts = batch["history_item"].row_lengths(), batch["exposed_item"].row_lengths()
        total = tf.reduce_sum(counts[0]) * products([event, first])
        total += tf.reduce_sum(counts[1]) * (products([candidate, first]) + products(top))
        total += tf.reduce_sum(counts[0] * counts[1]) * (products([candidate + 1, first, *others, 1]) + 2 * event)
        return tf.cast(total, tf.float64)


class TargetAttention(keras.layers.Layer):
    """Sums the events of a user's history, with a weight of its own for each exposure.

    The weight is a network over [event, candidate, event * candidate, time since the event]. The difference of event
    and candidate, which others add to the inputs, changes nothing: the first layer is linear in both.

    A loop over the users computes a block of all their events and exposures at a time. So nothing is padded, and the
    largest array of a block has events x exposures x units[0] numbers.

    Args:
      columns: Columns n of a candidate.
      units: Outputs of each hidden layer, with ReLU.

    Call:
      events: RaggedTensor <float>[B,(H),m], with m >= n. Their first n columns correspond to the candidates'.
      candidates: RaggedTensor <float>[B,(E),n].
      event_times, candidate_times: RaggedTensors <int64>[B,(H)] and [B,(E)], seconds.
      returns <float>[exposures of the batch, m], zeros without a history.
    """

    def __init__(self, columns: int, units: Sequence[int], **layer_arguments: Any):
        super().__init__(**layer_arguments)
        self.columns, self.units = columns, tuple(units)
        hidden = [keras.layers.Dense(width, activation="relu") for width in self.units[1:]]
        self.others = [*hidden, keras.layers.Dense(1)]

    def build(self, input_shape: tf.TensorShape) -> None:
        self.parts = [input_shape[-1], self.columns, self.columns, 1]  # rows of the kernel by input
        self.kernel = self.add_weight(
            name="kernel", shape=[sum(self.parts), self.units[0]], initializer="glorot_uniform"
        )
        self.bias = self.add_weight(name="bias", shape=[self.units[0]], initializer="zeros")
        for layer, width in zip(self.others, self.units):
            layer.build([None, None, width])  # before the loop, because a loop cannot create weights
        super().build(input_shape)

    def call(
        self,
        events: tf.RaggedTensor,
        candidates: tf.RaggedTensor,
        event_times: tf.RaggedTensor,
        candidate_times: tf.RaggedTensor,
    ) -> tf.Tensor:
        blocks = [_by_user(rows) for rows in (events, candidates, event_times, candidate_times)]
        users = blocks[0].size()
        shape = [None, events.shape[-1]]
        interests = tf.TensorArray(events.dtype, users, infer_shape=False, element_shape=shape)
        kernels = tf.split(self.kernel, self.parts)

        def of_user(user: tf.Tensor, found: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            past, shown, past_times, shown_times = (block.read(user) for block in blocks)
            weights = self._weights(kernels, past, shown, log_seconds(shown_times - past_times[:, tf.newaxis]))
            return user + 1, found.write(user, tf.matmul(weights, past, transpose_a=True))

        _, interests = tf.while_loop(lambda user, _: user < users, of_user, [0, interests], parallel_iterations=1)
        return interests.concat()

    def _weights(
        self, kernels: Sequence[tf.Tensor], events: tf.Tensor, candidates: tf.Tensor, since: tf.Tensor
    ) -> tf.Tensor:
        """Returns the weights of one user, <float>[H, E]. since is <float>[H, E]."""
        of_event, of_candidate, of_product, of_since = kernels
        # (event * candidate) K is event (candidate * K), so one product of matrices serves all pairs.
        scaled = tf.transpose(candidates)[:, :, tf.newaxis] * of_product[:, tf.newaxis]
        x = tf.matmul(events[:, : self.columns], tf.reshape(scaled, [self.columns, -1]))
        x = tf.reshape(x, [tf.shape(events)[0], tf.shape(candidates)[0], self.units[0]])
        x += tf.matmul(events, of_event)[:, tf.newaxis] + tf.matmul(candidates, of_candidate) + self.bias
        x = tf.nn.relu(x + tf.cast(since, x.dtype)[:, :, tf.newaxis] * of_since)
        for layer in self.others:
            x = layer(x)
        return tf.squeeze(x, -1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "columns": self.columns, "units": self.units}


def _by_user(rows: tf.RaggedTensor) -> tf.TensorArray:
    """Returns an array with the tokens of each row, and an empty last entry, because eager arrays cannot have none.

    The gradient of an array's entries is their concatenation. The gradient of a slice would have the size of all rows.
    """
    lengths = tf.concat([rows.row_lengths(), [0]], axis=0)
    shape = [None, *rows.shape[2:]]
    array = tf.TensorArray(rows.dtype, tf.size(lengths), infer_shape=False, element_shape=shape)
    return array.split(rows.values, lengths)
