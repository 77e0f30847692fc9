"""Which token of a sequence sees which: context, causal history, targets.

Called by attention.py once per attention. The rule is that of the public HSTU operators (reference
implementation of meta-recsys/generative-recommenders), without its attention window.
"""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf


def attention_mask(
    lengths: tf.Tensor, longest: tf.Tensor, num_targets: tf.Tensor | None, contextual_length: int
) -> tf.Tensor:
    """Visible pairs of [context | history | targets] sequences.

    Context tokens see all context and all history. History is causal and sees the context and
    itself. A target sees context, history and itself; never another target. Example, 2 context, 3
    history, 2 target tokens (rows ask, columns answer):

        1 1 1 1 1 0 0
        1 1 1 1 1 0 0
        1 1 1 0 0 0 0
        1 1 1 1 0 0 0
        1 1 1 1 1 0 0
        1 1 1 1 1 1 0
        1 1 1 1 1 0 1

    Args:
      lengths: <int64>[B], tokens of each row, context and targets included.
      longest: <int64>[] n, the padded length.
      num_targets: None or <int64>[B], targets at the end of each row.
      contextual_length: C >= 0, context tokens at the start of each row.

    Returns:
      <bool>[B, n, n]; or <bool>[1, n, n] where all rows share one rule (no targets, no context). No
      token of a row sees padding. Rows that belong to padding tokens hold arbitrary values.
    """
    places = tf.range(longest)[tf.newaxis, :]
    group = tf.maximum(places - contextual_length + 1, 0) if contextual_length else places
    if num_targets is None and not contextual_length:
        return group[:, :, tf.newaxis] >= group[:, tf.newaxis, :]
    # The context is one group, number 0; every history token is a group of its own; all targets
    # share the number `top`.
    top = lengths - max(contextual_length - 1, 0)
    if num_targets is not None:
        top = top - num_targets
        group = tf.minimum(group, top[:, tf.newaxis])
    asks, answers = group[:, :, tf.newaxis], group[:, tf.newaxis, :]
    visible = (asks > answers) | tf.eye(longest, dtype=tf.bool)[tf.newaxis]
    if contextual_length:
        visible |= (asks == 0) & (answers < top[:, tf.newaxis, tf.newaxis])
    return visible
