"""The signatures of a served retrieval model; export.py lists their inputs and outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import tf_fusedrec as fr
from tf_fusedrec import tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.item_index import IndexOptions, ItemIndex
from tf_fusedrec.models.kept_states import Answer, KeptStates, StateOptions
from tf_fusedrec.models.retrieval import HSTURetrieval
from tf_fusedrec.models.top_k import best_of_all, best_of_lists, seen_positions
from tf_fusedrec.models.user_state import RetrievalStates


class RetrievalServer:
    """The signatures of a retrieval model.

    Args:
      model: Trained model.
      texts: Text of each item of the catalogue, in its order, which searches then answer, too; None: they have ids.
    """

    def __init__(self, model: HSTURetrieval, texts: Sequence[str] | None = None):
        self._model = model
        # Signatures capture it as a constant, so a delta with other texts is refused.
        self._texts = None if texts is None else tf.constant(texts)

    def signatures(self) -> dict[str, fr.Signature]:
        names = ("item_id", "timestamp", "row_splits", "query_time")
        inputs = {name: tf.TensorSpec([None], tf.int64) for name in names}
        return {
            "serving_default": fr.Signature(self.user_embedding, inputs),
            "top_k": fr.Signature(self.top_k, {**inputs, "k": tf.TensorSpec([], tf.int32)}),
        }

    def with_index(self, options: IndexOptions) -> dict[str, fr.Signature]:
        catalogue = self._model.catalogue
        index = ItemIndex(catalogue.shape[0], self._model.config.dim, options)
        vectors = self._model.embed_items(tf.convert_to_tensor(catalogue))  # Every rank sends its rows.
        if fr.rank() == 0:  # Rank 0 writes the export.
            index.build(vectors.numpy())
        inputs = self.signatures()["top_k"].inputs
        search = functools.partial(self.top_k, index=index)
        return {"top_k_ivf": fr.Signature(search, inputs, weights=index.variables)}

    def user_embedding(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        newest = self._model.config.max_history
        items, times = (
            jagged.last(tf.RaggedTensor.from_row_splits(inputs[name], inputs["row_splits"]), newest)
            for name in ("item_id", "timestamp")
        )
        return {"user_embedding": self._model.embed_users(items, times, inputs["query_time"])}

    def with_state(self, options: StateOptions) -> tuple[KeptStates, Answer]:
        states = RetrievalStates(self._model)
        kept = KeptStates(states, self._model.config, options)

        def user_embedding(inputs: dict[str, tf.Tensor], version: tf.Tensor) -> dict[str, tf.Tensor]:
            items, times = (
                tf.RaggedTensor.from_row_splits(inputs[name], inputs["row_splits"]) for name in ("item_id", "timestamp")
            )
            resumed = kept.resume(inputs["user"], version, inputs["events_before"], times)
            items, times = resumed.only_new([items, times])
            vectors, change = states.answer(items, times, inputs["query_time"], resumed.state)
            kept.keep(resumed, change)
            return {"user_embedding": tf.where(resumed.found[:, tf.newaxis], vectors, math.nan), "found": resumed.found}

        return kept, user_embedding

    def top_k(self, inputs: dict[str, tf.Tensor], index: ItemIndex | None = None) -> dict[str, tf.Tensor]:
        users = self.user_embedding(inputs)["user_embedding"]
        catalogue = tf.convert_to_tensor(self._model.catalogue)
        seen = seen_positions(catalogue, inputs["item_id"], inputs["row_splits"])

        def embed(positions: tf.Tensor) -> tf.Tensor:
            return self._model.embed_items(tf.gather(catalogue, positions))

        if index is None:
            best, scores = best_of_all(users, seen, inputs["k"], catalogue.shape[0], embed)
        else:
            best, scores = best_of_lists(users, seen, inputs["k"], index, embed)
        ids = tf.gather(catalogue, tf.maximum(best, 0))
        # Items of the history have the lowest score, and come where there are fewer than k others.
        is_item = scores > scores.dtype.min
        answer = {"ids": tf.where(is_item, ids, tf.constant(-1, tf.int64)), "scores": scores}
        if self._texts is not None:
            answer["items"] = tf.where(is_item, tf.gather(self._texts, tf.maximum(best, 0)), "")
        return answer
