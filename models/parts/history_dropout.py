"""Leaves events out of histories in training, so that no model rests on single events of its training rows."""

from __future__ import annotations

from typing import Any

from tf_fusedrec import tf
from tf_fusedrec.models.base import Batch
from tf_fusedrec.models.parts.dense_inputs import DenseInputs


def without_events(
    share: float, inputs: Batch, rows: dict[str, Any], numbers: DenseInputs
) -> tuple[Batch, dict[str, Any], DenseInputs]:
    """Returns a batch, its rows and its numbers without a random share of the history's events.

    Exposures, context and the time features of the exposures stay as they are.

    Args:
      share: Probability with which an event is left out, 0 .. 1.
      inputs: The batch. In the result, history_item and history_time alone are cut.
      rows: Result of `RankingModel.rows_of`.
      numbers: Result of `RankingModel.dense_of`.
    """
    splits = inputs["history_item"].row_splits
    stays = tf.random.uniform([splits[-1]]) >= share
    at = tf.where(stays)[:, 0]
    before = tf.concat([[0], tf.cumsum(tf.cast(stays, tf.int64))], axis=0)  # events that stay, before each event
    new_splits = tf.gather(before, splits)

    def cut(x: tf.RaggedTensor) -> tf.RaggedTensor:
        return tf.RaggedTensor.from_row_splits(tf.gather(x.values, at), new_splits, validate=False)

    shorter = {name: cut(inputs[name]) for name in ("history_item", "history_time")}
    of_history = numbers.history if numbers.history is None else cut(numbers.history)
    rows = {name: cut(x) if name.startswith("history_") else x for name, x in rows.items()}
    return {**inputs, **shorter}, rows, numbers._replace(history=of_history)
