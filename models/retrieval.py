"""Retrieval model: predicts the next item at every position of a user's history, with a sampled softmax.

Its blocks are the research form of HSTU with relative position and time bias, or others (parts/encoders.py). The query
time of a position is the time of the NEXT interaction, which a server knows; see ops.sequence_times. Histories,
positives and negatives are jagged, with one entry per token of the batch. Only SASRec's softmax pads.
Source: Zhai et al., Actions Speak Louder than Words (ICML 2024), its public experiments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tf_fusedrec import keras, losses, tf
from tf_fusedrec.layers import PositionEmbedding, jagged, sequence_times
from tf_fusedrec.losses.negatives import NORM_FLOOR, Sampler, other_positions, reuse
from tf_fusedrec.losses.objectives import sampled_softmax_of_catalogue
from tf_fusedrec.models.base import Batch, SequenceModel, constant
from tf_fusedrec.models.experiment.model_config import RetrievalConfig
from tf_fusedrec.models.parts.encoders import attends_by_time, encoder_blocks


class Predictions(NamedTuple):
    """Inputs of the loss: P positions with n negatives each, out of U rows."""

    query: tf.Tensor  # <float>[P, D]
    positive: tf.Tensor  # <float>[P, D], embedding of the next item
    negatives: tf.Tensor  # <float>[U, D]
    positive_ids: tf.Tensor  # <int64>[P]
    negative_ids: tf.Tensor  # <int64>[U]
    chosen: tf.Tensor | None  # <int32>[P, n], rows of negatives; None when all positions share them
    log_q: tuple[tf.Tensor, tf.Tensor] | None  # <float>[P] and [U]
    reused_from: tf.Tensor | None  # <int32>[P, m], positions whose logits are reused


class CataloguePredictions(NamedTuple):
    """Inputs of the loss when all I items are looked up. Positives and negatives are rows of `items`."""

    query: tf.Tensor  # <float>[P, D]
    items: tf.Tensor  # <float>[I, D], in the order of the catalogue
    positives: tf.Tensor  # <int64>[P]
    negatives: tf.Tensor  # <int64>[P, n]
    log_q: tf.Tensor | None  # <float>[I]
    reused_from: tf.Tensor | None  # <int32>[P, m]


class HSTURetrieval(SequenceModel):
    """Learns one vector per item, and predicts the vector of the next item from a history.

    Args:
      config: Sizes and loss.
      embedding: Layer with the features item_id and negative, which share one table of config.dim columns.
      catalogue: <int64>[I], distinct ids. Negatives are drawn from it with replacement, by config.sampling.
      popularity: <int64>[I], training interactions of each item of the catalogue; None for samplings without counts.
      seed: Seed of the negatives. A draw is a pure function of (seed, step, rank).
      rank: Rank of this process among the processes that train together.

    Call (training):
      inputs: Dict with RaggedTensors <int64>[B,(L)] item_id and timestamp (seconds). The first L - 1 items of a row
        predict the last L - 1. A row of fewer than two items gives no position.
      returns Predictions, or CataloguePredictions with config.whole_catalogue.

    Raises:
      ValueError: `catalogue` is empty, repeats an id, or is not of rank 1.
      InvalidArgumentError: A history is longer than config.max_sequence_length, or, with whole_catalogue, holds an item
        outside the catalogue.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        popularity: np.ndarray | None = None,
        *,
        seed: int = 0,
        rank: int = 0,
        name: str = "hstu_retrieval",
    ):
        super().__init__(embedding, name)
        if catalogue.ndim != 1 or not catalogue.size or len(np.unique(catalogue)) != catalogue.size:
            raise ValueError(
                f"catalogue must hold at least one id, each once, got shape {catalogue.shape} with "
                f"{len(np.unique(catalogue))} distinct ids. Take tf_fusedrec.models.data_sets.layouts.read_items."
            )
        self.config = config
        # The checkpoint holds the catalogue, because the exported model returns its ids.
        order = np.argsort(catalogue)
        self.catalogue = constant(self, "catalogue", catalogue[order].astype(np.int64))
        counts = None if popularity is None else np.asarray(popularity)[order]
        self._sampler = Sampler(catalogue.size, config.sampling, counts)
        self._seed, self._rank = seed, rank
        self.positions = PositionEmbedding(config.max_sequence_length, config.dropout, name="positions")
        self.blocks = encoder_blocks(config)

    def call(self, inputs: Batch, training: bool | None = None) -> Predictions | CataloguePredictions:
        if self.config.whole_catalogue:
            return self._call_with_catalogue(inputs, training)
        items = inputs["item_id"]
        positive_ids = _after_first(items).values
        drawn = self._negatives(tf.size(positive_ids))
        in_batch = self.config.sampling == "in_batch"
        ids = {"item_id": items}
        if not in_batch:
            # An item that is drawn several times is looked up, sent and kept once.
            negative_indices, chosen = tf.unique(tf.reshape(drawn, [-1]))
            drawn = tf.reshape(chosen, tf.shape(drawn))
            ids["negative"] = negative_ids = tf.gather(self.catalogue, negative_indices)
        # One call looks up all ids of the step. An item that is both input and positive is looked up once.
        rows = self.embedding(ids)
        positive = _after_first(rows["item_id"]).values
        log_q = None
        if self.config.log_q:
            own = self._sampler.log_q(self._catalogue_indices(positive_ids))
            log_q = own, own if in_batch else self._sampler.log_q(negative_indices)
        query = self._encode_all_but_last(rows["item_id"], inputs["timestamp"], training).values
        if self.config.share_negatives:
            return Predictions(query, positive, rows["negative"], positive_ids, negative_ids, None, log_q, None)
        negatives_from, logits_from = self._expansion(tf.size(positive_ids))
        if negatives_from is not None:
            drawn = tf.concat([drawn, reuse(drawn, negatives_from)], axis=1)
        if in_batch:
            return Predictions(query, positive, positive, positive_ids, positive_ids, drawn, log_q, logits_from)
        return Predictions(query, positive, rows["negative"], positive_ids, negative_ids, drawn, log_q, logits_from)

    def _call_with_catalogue(self, inputs: Batch, training: bool | None) -> CataloguePredictions:
        items = inputs["item_id"]
        indices = items.with_values(self._catalogue_indices(items.values))
        positives = _after_first(indices).values
        vectors = self.embedding({"item_id": self.catalogue})["item_id"]
        rows = items.with_values(jagged.gather_rows(vectors, indices.values))
        negatives = self._negatives(tf.size(positives))
        if self.config.sampling == "in_batch":
            negatives = tf.gather(positives, negatives)
        negatives_from, logits_from = self._expansion(tf.size(positives))
        if negatives_from is not None:
            negatives = tf.concat([negatives, reuse(negatives, negatives_from)], axis=1)
        return CataloguePredictions(
            self._encode_all_but_last(rows, inputs["timestamp"], training).values,
            vectors,
            positives,
            negatives,
            self._sampler.log_q(tf.range(tf.size(self.catalogue))) if self.config.log_q else None,
            logits_from,
        )

    def embed_users(self, items: tf.RaggedTensor, timestamps: tf.RaggedTensor, query_time: tf.Tensor) -> tf.Tensor:
        """Returns the vector of each user's next item at `query_time`.

        Args:
          items, timestamps: RaggedTensors <int64>[B,(L)], oldest first, L <= config.max_history.
          query_time: <int64>[B], time of the request in seconds.

        Returns:
          <float>[B, D], L2-normalised, or zeros for a user without history.
        """
        rows = self.embedding({"item_id": items}, training=False)["item_id"]
        splits = tf.range(tf.size(query_time, tf.int64) + 1)
        request_times = tf.RaggedTensor.from_row_splits(query_time, splits, validate=False)
        query_times = jagged.last(jagged.concat([timestamps, request_times]), items.row_lengths())
        encoded = self._encode(rows, timestamps, query_times, training=False)
        return normalized(tf.reduce_sum(jagged.last(encoded, 1), axis=1))

    def embed_items(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the L2-normalised rows <float>[n, D] of items <int64>[n]. A pair's score is the dot product."""
        return normalized(self.embedding({"item_id": ids}, training=False)["item_id"])

    def position_losses(self, batch: Batch, outputs: Predictions | CataloguePredictions) -> tf.Tensor:
        """Returns -log softmax of the next item, <float>[P]."""
        temperature, log_q, reused_from = self.config.temperature, outputs.log_q, outputs.reused_from
        if isinstance(outputs, CataloguePredictions):
            return sampled_softmax_of_catalogue(*outputs[:4], temperature, log_q=log_q, reused_from=reused_from)
        return losses.sampled_softmax(
            *outputs[:5], temperature, chosen=outputs.chosen, log_q=log_q, reused_from=reused_from
        )

    def num_positions(self, batch: Batch) -> tf.Tensor:
        return self.counts(batch)[1]

    def counts(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        lengths = batch["item_id"].row_lengths()
        return tf.size(lengths, tf.int64), tf.reduce_sum(tf.maximum(lengths - 1, 0))

    def forward_flops(self, batch: Batch) -> tf.Tensor:
        lengths = tf.maximum(batch["item_id"].row_lengths() - 1, 0)
        splits = tf.concat([[0], tf.cumsum(lengths)], axis=0)
        blocks = tf.add_n([block.forward_flops(splits, self.config.dim) for block in self.blocks])
        computed = self.config.num_negatives
        if self.config.sharing == "negatives":
            computed *= self.config.expansion
        scores = tf.cast(splits[-1] * (1 + computed), tf.float64)
        return blocks + scores * 2 * self.config.dim

    def _encode_all_but_last(
        self, rows: tf.RaggedTensor, timestamps: tf.RaggedTensor, training: bool | None
    ) -> tf.RaggedTensor:
        """Encodes all positions but the last. A position's query time is the time of the next item."""
        positions = tf.maximum(rows.row_lengths() - 1, 0)
        cut = [positions, rows.row_lengths() - positions]
        return self._encode(
            jagged.split(rows, cut)[0], jagged.split(timestamps, cut)[0], _after_first(timestamps), training
        )

    def _encode(
        self,
        rows: tf.RaggedTensor,
        timestamps: tf.RaggedTensor,
        query_times: tf.RaggedTensor,
        training: bool | None,
    ) -> tf.RaggedTensor:
        x = self.positions(rows, training=training)
        times = {"timestamps": sequence_times(timestamps, query_times)} if attends_by_time(self.config) else {}
        for block in self.blocks:
            x = block(x, training=training, **times)
        return x

    def _negatives(self, num_positions: tf.Tensor) -> tf.Tensor:
        """Draws negatives <int32>[P, n], or [n] for one shared pool."""
        number = self.config.num_negatives
        shape = [number] if self.config.share_negatives else tf.stack([num_positions, number])
        return self._sampler.draw(shape, self._seed_of(shared=self.config.share_negatives), num_positions)

    def _expansion(self, num_positions: tf.Tensor) -> tuple[tf.Tensor | None, tf.Tensor | None]:
        """Returns the positions whose negatives, or whose logits, each position reuses: <int32>[P, (k-1) n]."""
        config = self.config
        if config.expansion == 1:
            return None, None
        # Seeds of draws are not negative, so a negative seed gives independent numbers.
        seed = -1 - 2 * self._seed_of(shared=False)
        source = other_positions(num_positions, (config.expansion - 1) * config.num_negatives, seed)
        return (source, None) if config.sharing == "negatives" else (None, source)

    def _seed_of(self, shared: bool) -> tf.Tensor:
        """Returns a seed of two words: (run, rank) and (step, micro-batch). A shared pool ignores the micro-batch."""
        step = self.step + self.steps_ahead
        draw = step if shared else step + (self.micro_batch.number << 40)
        return tf.stack([tf.constant(self._seed * 65536 + self._rank, tf.int64), draw])

    def _catalogue_indices(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the index of each id in the ascending catalogue."""
        last = tf.size(self.catalogue, tf.int64) - 1
        indices = tf.minimum(tf.searchsorted(self.catalogue, ids, out_type=tf.int64), last)
        message = "item_id holds an item that the catalogue lacks; set model.whole_catalogue to false"
        known = tf.debugging.assert_equal(tf.gather(self.catalogue, indices), ids, message=message)
        with tf.control_dependencies([] if known is None else [known]):
            return tf.identity(indices)


def _after_first(rows: tf.RaggedTensor) -> tf.RaggedTensor:
    """Drops the first entry of every row, which gives the next entry for each entry but the last."""
    return jagged.last(rows, tf.maximum(rows.row_lengths() - 1, 0))


def normalized(vectors: tf.Tensor) -> tf.Tensor:
    """Returns vectors / max(length, 1e-6) over the last axis in float32, as losses.sampled_softmax normalises."""
    vectors = tf.cast(vectors, tf.float32)  # of a mixed precision: users of its compute dtype, items of float32
    return vectors / tf.maximum(tf.norm(vectors, axis=-1, keepdims=True), NORM_FLOOR)
