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

from models.base import Batch
from models.dense_inputs import dense_width, log_seconds
from models.exposure_model import ExposureModel, network, products
from models.model_config import DINConfig
from tf_fusedrec import keras, tf
from tf_fusedrec.layers import jagged


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
        self.unit = ActivationUnit(config.attention_units, name="unit")
        self.top = network(config.top_units, config.dropout, "top")

    def hidden(self, inputs: Batch, rows: dict[str, Any], training: bool | None) -> tf.Tensor:
        parts = [rows[name].values for name in self.event_columns]
        numbers = self.dense_of(inputs).history
        if numbers is not None:
            parts.append(tf.cast(numbers.values, self.compute_dtype))
        events = tf.concat(parts, axis=1)
        candidates = tf.concat([rows[name].values for name in self.config.columns_of("exposed")], axis=1)
        exposure, event = pairs(inputs["history_item"].row_splits, inputs["exposed_item"].value_rowids())
        times = inputs["exposed_time"].values, inputs["history_time"].values
        since = log_seconds(tf.gather(times[0], exposure) - tf.gather(times[1], event))
        weights = self.unit(events, candidates, exposure, event, since)
        weighted = weights[:, tf.newaxis] * jagged.gather_rows(events, event)
        interest = tf.math.unsorted_segment_sum(weighted, exposure, tf.shape(candidates)[0])
        dense = tf.cast(self.dense(inputs), self.compute_dtype)
        x = self.dropout(tf.concat([dense, *self.vectors(inputs, rows), interest], axis=1), training=training)
        return self.top(x, training=training)

    def hidden_flops(self, batch: Batch) -> tf.Tensor:
        config, dim = self.config, self.config.dim
        event, candidate = (dim * len(columns) for columns in (self.event_columns, config.columns_of("exposed")))
        event += dense_width(config, "history")
        top = [self.dense_columns + self.num_vectors * dim + event, *config.top_units, len(config.tasks)]
        first, *others = config.attention_units
        counts = batch["history_item"].row_lengths(), batch["exposed_item"].row_lengths()
        total = tf.reduce_sum(counts[0]) * products([event, first])
        total += tf.reduce_sum(counts[1]) * (products([candidate, first]) + products(top))
        total += tf.reduce_sum(counts[0] * counts[1]) * (products([candidate + 1, first, *others, 1]) + 2 * event)
        return tf.cast(total, tf.float64)


class ActivationUnit(keras.layers.Layer):
    """The weight of an event for a candidate: a network over [event, candidate, event * candidate, time since].

    The first layer adds products of the event, of the candidate, and of the pair, so only the last is made for every
    pair. The difference event - candidate, which others add to the inputs, changes nothing: it is linear in both.

    Args:
      units: Outputs of each hidden layer, with ReLU.

    Call:
      events: <float>[H, m], with m >= n. Their first n columns correspond to the candidates'.
      candidates: <float>[E, n].
      exposure, event: <int64>[P], the candidate and the event of each pair.
      since: <float>[P].
      returns <float>[P].
    """

    def __init__(self, units: Sequence[int], **layer_arguments: Any):
        super().__init__(**layer_arguments)
        first, *others = self.units = tuple(units)
        self.of_event = keras.layers.Dense(first, use_bias=False, name="of_event")
        self.of_candidate = keras.layers.Dense(first, name="of_candidate")
        self.of_pair = keras.layers.Dense(first, use_bias=False, name="of_pair")
        self.others = [*(keras.layers.Dense(width, activation="relu") for width in others), keras.layers.Dense(1)]

    def call(
        self, events: tf.Tensor, candidates: tf.Tensor, exposure: tf.Tensor, event: tf.Tensor, since: tf.Tensor
    ) -> tf.Tensor:
        alike = jagged.gather_rows(events[:, : candidates.shape[-1]], event)
        product = alike * jagged.gather_rows(candidates, exposure)
        x = self.of_pair(tf.concat([product, tf.cast(since, product.dtype)[:, tf.newaxis]], axis=1))
        x += jagged.gather_rows(self.of_event(events), event)
        x = tf.nn.relu(x + jagged.gather_rows(self.of_candidate(candidates), exposure))
        for layer in self.others:
            x = layer(x)
        return tf.squeeze(x, -1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def pairs(history_splits: tf.Tensor, user: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns all pairs of an exposure and an event of its user's history, by exposure and then by event.

    Args:
      history_splits: <int64>[B+1]. The events of user b are history_splits[b] .. history_splits[b+1] - 1.
      user: <int64>[E], user of each exposure.

    Returns:
      exposure, event: <int64>[P].

    Example:
      history_splits 0 2 2 3, user 0 0 1 2  ->  exposure 0 0 1 1 3,  event 0 1 0 1 2
    """
    begin = tf.gather(history_splits, user)
    lengths = tf.gather(history_splits, user + 1) - begin
    exposure, place = jagged.token_positions(tf.concat([[0], tf.cumsum(lengths)], axis=0))
    return exposure, tf.gather(begin, exposure) + place
