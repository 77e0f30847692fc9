"""HSTU retrieval: the next item of every position of a user's history, with a sampled softmax.

The research form of HSTU with relative position and time bias. A position asks at the time of the NEXT
interaction, which is known when a request is served; see tf_fusedrec/layers/relative_bias.py.
Source: Zhai et al., Actions Speak Louder than Words (ICML 2024), its public experiments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.base import Batch, SequenceModel, hstu_blocks
from models.experiment import RetrievalConfig
from tf_fusedrec import keras, losses, tf
from tf_fusedrec.layers import PositionEmbedding, jagged, time_buckets


class Predictions(NamedTuple):
    """What the loss needs: P positions, n negatives."""

    query: tf.Tensor  # <float>[P, D]
    positive: tf.Tensor  # <float>[P, D], embedding of the item that came next
    negatives: tf.Tensor  # <float>[P, n, D], or [n, D] when shared
    positive_ids: tf.Tensor  # <int64>[P]
    negative_ids: tf.Tensor  # <int64>[P, n], or [n] when shared


class HSTURetrieval(SequenceModel):
    """Learns one vector per item and, from a history, the vector of what comes next.

    Args:
      config: sizes and loss.
      embedding: knows the features item_id and negative, which share one table of config.dim columns.
      catalogue: <int64>[I], distinct ids; negatives are drawn from it uniformly, with replacement.
      seed: of the negatives. The draw is a pure function of (seed, step, rank).
      rank: of this process among the processes that train together.

    Call (training):
      inputs: dict with RaggedTensors <int64>[B,(L)] item_id and timestamp (seconds). The first L - 1
        items of a row predict the last L - 1; a row of fewer than two items gives no position.
      returns Predictions.

    Raises:
      ValueError: catalogue is not a list of at least one distinct id.
      InvalidArgumentError: a history is longer than config.max_history.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        *,
        seed: int = 0,
        rank: int = 0,
        name: str = "hstu_retrieval",
    ):
        super().__init__(embedding, name)
        if catalogue.ndim != 1 or not catalogue.size or len(np.unique(catalogue)) != catalogue.size:
            raise ValueError(
                f"catalogue must hold at least one id, each once, got shape {catalogue.shape} with "
                f"{len(np.unique(catalogue))} distinct ids. Take tf_fusedrec.data.read_items."
            )
        self.config = config
        # Part of the checkpoint: the exported model answers with these ids.
        self.catalogue = tf.Variable(np.sort(catalogue).astype(np.int64), trainable=False, name="catalogue")
        self._seed, self._rank = seed, rank
        self.positions = PositionEmbedding(config.max_history, config.dropout, name="positions")
        self.blocks = hstu_blocks(config, "research", config.max_history)

    def call(self, inputs: Batch, training: bool | None = None) -> Predictions:
        items, times = inputs["item_id"], inputs["timestamp"]
        lengths = items.row_lengths()
        positions = tf.maximum(lengths - 1, 0)
        positive_ids = jagged.last(items, positions).values
        negative_ids = self._negative_ids(tf.size(positive_ids))
        # One call for all the step needs; an item that is both input and positive is looked up once.
        rows = self.embedding({"item_id": items, "negative": negative_ids})
        cut = [positions, lengths - positions]
        encoded = self._encode(
            jagged.split(rows["item_id"], cut)[0],
            jagged.split(times, cut)[0],
            jagged.last(times, positions),
            training,
        )
        return Predictions(
            encoded.values,
            jagged.last(rows["item_id"], positions).values,
            rows["negative"],
            positive_ids,
            negative_ids,
        )

    def embed_users(self, items: tf.RaggedTensor, timestamps: tf.RaggedTensor, query_time: tf.Tensor) -> tf.Tensor:
        """The vector of what each user wants at `query_time`.

        Args:
          items, timestamps: RaggedTensors <int64>[B,(L)], oldest first, L <= config.max_history.
          query_time: <int64>[B] seconds, when the answer is wanted.

        Returns:
          <float>[B, D], L2-normalised; zeros for a user without history.
        """
        rows = self.embedding({"item_id": items}, training=False)["item_id"]
        asked = tf.RaggedTensor.from_row_splits(query_time, tf.range(tf.size(query_time, tf.int64) + 1), validate=False)
        query_times = jagged.last(jagged.concat([timestamps, asked]), items.row_lengths())
        encoded = self._encode(rows, timestamps, query_times, training=False)
        return normalized(tf.reduce_sum(jagged.last(encoded, 1), axis=1))

    def embed_items(self, ids: tf.Tensor) -> tf.Tensor:
        """L2-normalised rows of items <int64>[n]: <float>[n, D]. The score of a pair is the dot product."""
        return normalized(self.embedding({"item_id": ids}, training=False)["item_id"])

    def position_losses(self, batch: Batch, outputs: Predictions) -> tf.Tensor:
        """-log softmax of the item that came next, <float>[P]."""
        return losses.sampled_softmax(*outputs, temperature=self.config.temperature)

    def counts(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        lengths = batch["item_id"].row_lengths()
        return tf.size(lengths, tf.int64), tf.reduce_sum(tf.maximum(lengths - 1, 0))

    def _encode(
        self,
        rows: tf.RaggedTensor,
        timestamps: tf.RaggedTensor,
        query_times: tf.RaggedTensor,
        training: bool | None,
    ) -> tf.RaggedTensor:
        x = self.positions(rows, training=training)
        buckets = None
        if self.config.time_buckets:
            buckets = time_buckets(timestamps, self.config.time_buckets, query_times)
        for block in self.blocks:
            x = block(x, timestamps=buckets, training=training)
        return x

    def _negative_ids(self, num_positions: tf.Tensor) -> tf.Tensor:
        number = self.config.num_negatives
        shape = [number] if self.config.share_negatives else tf.stack([num_positions, number])
        # Two words of seed: one for the run and the rank, one for the step.
        seed = tf.stack([tf.constant(self._seed * 65536 + self._rank, tf.int64), self.step])
        drawn = tf.random.stateless_uniform(shape, seed, maxval=tf.size(self.catalogue, tf.int64), dtype=tf.int64)
        return tf.gather(self.catalogue, drawn)


def normalized(vectors: tf.Tensor) -> tf.Tensor:
    """vectors / max(length, 1e-6), over the last axis; the rule of losses.sampled_softmax."""
    return vectors / tf.maximum(tf.norm(vectors, axis=-1, keepdims=True), losses.NORM_FLOOR)
