"""How many tokens each token sees: the work that a kernel without padding has, and a divisor of the attention."""

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
    target_group_size: int = 1,
) -> tf.Tensor:
    """Counts the pairs of each asking token under the masks of ops.jagged_attention, without making them.

    Tokens have numbers: context 0, history 1, 2, ... (without context 0, 1, ...), targets the next. A token sees
    the lower numbers that its window reaches, and itself; context sees all context and history; a target sees the
    targets before it in its group.

    Args:
      row_splits: <int64>[B+1].
      num_targets: None or <int>[B].
      contextual_length, attention_window, min_full_length, target_group_size: as of ops.jagged_attention.

    Returns:
      <int64>[T], each >= 1.
    """
    row_splits = tf.cast(row_splits, tf.int64)
    lengths = row_splits[1:] - row_splits[:-1]
    rows, places = jagged.token_places(row_splits)
    context = contextual_lengths(contextual_length, row_splits)
    context = tf.zeros_like(rows) if context is None else tf.gather(context, rows)
    context_beyond_one = tf.maximum(context - 1, 0)
    number = tf.maximum(places - context_beyond_one, 0)
    history_end = lengths if num_targets is None else lengths - tf.cast(num_targets, tf.int64)
    history_end = tf.gather(history_end, rows)
    top = history_end - context_beyond_one
    if num_targets is not None:
        number = tf.minimum(number, top)
    lowest = tf.zeros_like(number)
    if attention_window:
        windowed = tf.ones_like(number, tf.bool)
        if min_full_length:
            windowed = number < top - min_full_length
        lowest = tf.where(windowed, tf.maximum(number - attention_window, 0), lowest)
    # Number 0 stands for all context tokens.
    before = number - lowest + tf.cast((lowest == 0) & (number > 0), tf.int64) * context_beyond_one
    if target_group_size > 1:
        before += tf.maximum(places - history_end, 0) % target_group_size
    is_context = (context > 0) & (number == 0) & (top > 0)
    return tf.where(is_context, history_end, before + 1)
