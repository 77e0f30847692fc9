"""Pools the events of a user's history into vectors of the user, for models that score exposures from them.

`mean` weighs all events alike. EventProfiles learns weights, so that a rating above its expectation counts for an item
and one below it counts against it.
"""

from __future__ import annotations

from typing import Any

from tf_fusedrec import keras, tf
from tf_fusedrec.layers import jagged


class EventProfiles(keras.layers.Layer):
    """The user's side of Asymmetric-SVD: profile_p = n^-1/2 sum_j w_p(event_j) row_j over the n events of a history.

    w is linear in the event's own columns. In Asymmetric-SVD it is a rating less the one that user and item lead to
    expect; here the model learns it. The inner product of a profile and an item's row is the item's score.

    Args:
      count: Profiles P of a user.

    Call:
      rows: RaggedTensor <float>[B,(H),D], rows of the items.
      events: RaggedTensor <float>[B,(H),m], columns of the events.
      returns P tensors <float>[B, D], zeros without a history.

    Source: Koren, Factorization Meets the Neighborhood (KDD 2008), equation 13.
    """

    def __init__(self, count: int, **layer_arguments: Any):
        super().__init__(**layer_arguments)
        self.count = count
        self.weights_of = keras.layers.Dense(count, name="weights")

    def call(self, rows: tf.RaggedTensor, events: tf.RaggedTensor) -> list[tf.Tensor]:
        weights = self.weights_of(events.values)
        lengths = tf.cast(tf.maximum(rows.row_lengths(), 1), weights.dtype)[:, tf.newaxis]
        weighed = [rows.with_values(rows.values * part) for part in tf.split(weights, self.count, axis=1)]
        return [total(part) * tf.math.rsqrt(lengths) for part in weighed]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "count": self.count}


def mean(rows: tf.RaggedTensor) -> tf.Tensor:
    """Returns the mean <float>[B, D] of each user's rows, or zeros without rows."""
    return total(rows) / tf.cast(tf.maximum(rows.row_lengths(), 1), rows.dtype)[:, tf.newaxis]


def total(rows: tf.RaggedTensor) -> tf.Tensor:
    """Returns the sum <float>[B, D] of each user's rows."""
    return tf.math.unsorted_segment_sum(rows.values, jagged.token_rows(rows.row_splits), rows.nrows())
