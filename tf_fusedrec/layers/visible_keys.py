"""Counts the tokens that each token sees, the work of a kernel without padding and a divisor of the attention."""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.ops import contextual_lengths


def visible_keys(
    row_splits: tf.Tensor,
    num_targets: tf.Tensor | None = None,
    contextual_length: int | tf.Tensor = 0,
    attention_window: int = 0,
    min_full_length: int = 0,
    global_window: int = 0,
    target_group_size: int = 1,
) -> tf.Tensor:
    """Counts the visible keys of each query token under the masks of ops.jagged_attention, without making the pairs.

    Context tokens have number 0, history tokens 1, 2, ... (0, 1, ... without context), and all targets the next number.
    A token sees itself and the lower numbers within its window, or among the first of a global window. A context token
    sees all context and history tokens. A target also sees the earlier targets of its group.

    Args:
      row_splits: <int64>[B+1].
      num_targets: None or <int>[B], number of targets at the end of each row.
      contextual_length, attention_window, min_full_length, global_window, target_group_size: Masks of
        ops.jagged_attention.

    Returns:
      <int64>[T], each >= 1.
    """
    row_splits = tf.cast(row_splits, tf.int64)
    lengths = row_splits[1:] - row_splits[:-1]
    rows, positions = jagged.token_positions(row_splits)
    context = contextual_lengths(contextual_length, row_splits)
    context = tf.zeros_like(rows) if context is None else tf.gather(context, rows)
    context_beyond_one = tf.maximum(context - 1, 0)
    number = tf.maximum(positions - context_beyond_one, 0)
    history_end = lengths if num_targets is None else lengths - tf.cast(num_targets, tf.int64)
    history_end = tf.gather(history_end, rows)
    top = history_end - context_beyond_one
    if num_targets is not None:
        number = tf.minimum(number, top)
    lowest, outside = tf.zeros_like(number), tf.zeros_like(number)
    if attention_window:
        windowed = tf.ones_like(number, tf.bool)
        if min_full_length:
            windowed = number < top - min_full_length
        lowest = tf.where(windowed, tf.maximum(number - attention_window, 0), lowest)
        if global_window:  # the lowest numbers, as far as the window does not reach them
            outside = tf.minimum(global_window + tf.cast(context > 0, tf.int64), lowest)
    # Number 0 stands for all context tokens.
    sees_context = ((lowest == 0) | (outside > 0)) & (number > 0)
    before = number - lowest + outside + tf.cast(sees_context, tf.int64) * context_beyond_one
    if target_group_size > 1:
        before += tf.maximum(positions - history_end, 0) % target_group_size
    is_context = (context > 0) & (number == 0) & (top > 0)
    return tf.where(is_context, history_end, before + 1)
