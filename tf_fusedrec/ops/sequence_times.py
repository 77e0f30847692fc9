"""Times of the tokens of a batch, by which attention measures the distance of two tokens in time."""

from __future__ import annotations

from typing import NamedTuple

from tf_fusedrec._tf_compat import tf


class SequenceTimes(NamedTuple):
    """Times of each token: when it asks, and when it happened."""

    asks: tf.Tensor  # <int64>[T], seconds; [Tq] beside query_splits
    answers: tf.Tensor  # <int64>[T], seconds


def sequence_times(
    timestamps: tf.RaggedTensor, query_times: tf.RaggedTensor | None = None, num_targets: tf.Tensor | None = None
) -> SequenceTimes:
    """Computes when the tokens of a batch ask and when they happened. Call it once per batch, for all blocks.

    Args:
      timestamps: RaggedTensor <int64>[B,(L)], seconds; when each token happened.
      query_times: RaggedTensor <int64>[B,(L)], seconds; when each token asks. The default is the research rule. Token i
        asks at the time of token i+1 (when the answer was wanted), the last token at its own time. When the time of the
        request is known (training to predict a next item, serving), give it here.
      num_targets: None or <int>[B]. Affects the default of query_times only. The last history token and the targets ask
        at their own time, so a target's time reaches no other token.

    Returns:
      SequenceTimes, for `RelativeBias`.

    Raises:
      ValueError: timestamps or query_times is not a RaggedTensor of int64.
    """
    _check_times("timestamps", timestamps)
    if query_times is None:
        return SequenceTimes(_next_times(timestamps, num_targets), timestamps.values)
    _check_times("query_times", query_times)
    return SequenceTimes(query_times.values, timestamps.values)


def _next_times(timestamps: tf.RaggedTensor, num_targets: tf.Tensor | None) -> tf.Tensor:
    """Returns the time of the next token. The last history token and the targets keep their own."""
    row_ends = timestamps.row_splits[1:]
    tokens = tf.range(tf.size(timestamps.values, tf.int64))
    rows = tf.raw_ops.UpperBound(sorted_inputs=row_ends[tf.newaxis], values=tokens[tf.newaxis])[0]
    history_end = row_ends if num_targets is None else row_ends - tf.cast(num_targets, tf.int64)
    successor = tokens + tf.cast(tokens + 1 < tf.gather(history_end, rows), tf.int64)
    return tf.gather(timestamps.values, successor)


def _check_times(name: str, times: tf.RaggedTensor) -> None:
    if not isinstance(times, tf.RaggedTensor) or times.ragged_rank != 1:
        raise ValueError(f"{name} must be a RaggedTensor [B,(L)], got {type(times).__name__}.")
    if times.dtype != tf.int64:
        raise ValueError(f"{name} must be int64 seconds, got {times.dtype.name}. Cast with tf.cast(x, tf.int64).")
