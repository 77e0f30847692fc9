"""Computes jagged_attention and bias_attention with stock TensorFlow ops, for a SavedModel served without our ops.

tf_fusedrec.ops.jagged_attention documents the definitions and the arguments. These functions pad the batch to its
longest row and hold every pair of every head in memory. They serve models; training uses the op.
"""

from __future__ import annotations

from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.ops import BucketTable, RelativeBias, TimeFunction, contextual_lengths


class _Rows(NamedTuple):
    """The padded form of a batch: B rows with n positions each."""

    row_splits: tf.Tensor  # <int64>[B+1]
    lengths: tf.Tensor  # <int64>[B]
    positions: tf.Tensor  # <int64>[n]
    num_targets: tf.Tensor | None  # <int64>[B]


def jagged_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    row_splits: tf.Tensor,
    *,
    scale: float | tf.Tensor,
    alpha: float = 1.0,
    num_targets: tf.Tensor | None = None,
    contextual_length: int | tf.Tensor = 0,
    attention_window: int = 0,
    min_full_length: int = 0,
    target_group_size: int = 1,
    bias: RelativeBias | None = None,
) -> tf.Tensor:
    """Returns [T, H, Dv]: out_i = scale_i sum_j SiLU(alpha query_i . key_j + bias_ij) visible_ij value_j by row."""
    rows = _rows(row_splits, num_targets)
    queries, keys, values = (_padded(tokens, rows) for tokens in (query, key, value))
    scores = alpha * tf.einsum("bihd,bjhd->bhij", queries, keys)
    if bias is not None:
        for part in (_position_map(bias, rows), _time_map(bias, rows)):
            scores = scores if part is None else scores + part[:, tf.newaxis]
    visible = _visible(rows, contextual_length, attention_window, min_full_length, target_group_size)
    visible = tf.cast(visible, scores.dtype)
    out = tf.einsum("bhij,bjhd->bihd", tf.nn.silu(scores) * visible[:, tf.newaxis], values)
    scale = tf.reshape(tf.cast(scale, out.dtype), [-1, 1, 1])
    return tf.cast(jagged.from_dense(out, rows.row_splits).values * scale, value.dtype)


def bias_attention(
    value: tf.Tensor,
    row_splits: tf.Tensor,
    *,
    bias: RelativeBias,
    num_targets: tf.Tensor | None = None,
    contextual_length: int | tf.Tensor = 0,
    attention_window: int = 0,
    min_full_length: int = 0,
    target_group_size: int = 1,
) -> tf.Tensor:
    """Returns per head [sum_j position_ij visible_ij value_j | the same with time_ij], [T, H, 2 Dv].

    A bias with one of the two maps gives [T, H, Dv].
    """
    rows = _rows(row_splits, num_targets)
    values = _padded(value, rows)
    visible = _visible(rows, contextual_length, attention_window, min_full_length, target_group_size)
    visible = tf.cast(visible, values.dtype)
    maps = [part for part in (_position_map(bias, rows), _time_map(bias, rows)) if part is not None]
    channels = [tf.einsum("bij,bjhd->bihd", part * visible, values) for part in maps]
    return tf.cast(jagged.from_dense(tf.concat(channels, axis=-1), rows.row_splits).values, value.dtype)


def _rows(row_splits: tf.Tensor, num_targets: tf.Tensor | None) -> _Rows:
    row_splits = tf.cast(row_splits, tf.int64)
    lengths = row_splits[1:] - row_splits[:-1]
    longest = tf.reduce_max(tf.concat([lengths, [0]], axis=0))
    targets = None if num_targets is None else tf.cast(num_targets, tf.int64)
    return _Rows(row_splits, lengths, tf.range(longest), targets)


def _padded(tokens: tf.Tensor, rows: _Rows) -> tf.Tensor:
    """Pads [T, ...] to [B, n, ...], in float32 or wider."""
    tokens = tf.cast(tokens, tf.float32) if tokens.dtype.size < 4 else tokens
    return jagged.to_dense(tf.RaggedTensor.from_row_splits(tokens, rows.row_splits, validate=False))


def _visible(
    rows: _Rows, contextual_length: int | tf.Tensor, attention_window: int, min_full_length: int, target_group_size: int
) -> tf.Tensor:
    """Returns <bool>[B, n, n] by (query, key). Numbers as in visible_keys.py."""
    context = contextual_lengths(contextual_length, rows.row_splits)
    context = tf.zeros_like(rows.lengths) if context is None else context
    beyond_one = tf.maximum(context - 1, 0)[:, tf.newaxis]
    numbers = tf.maximum(rows.positions - beyond_one, 0)
    history_end = (rows.lengths if rows.num_targets is None else rows.lengths - rows.num_targets)[:, tf.newaxis]
    top = history_end - beyond_one
    if rows.num_targets is not None:
        numbers = tf.minimum(numbers, top)
    query, key, top = numbers[:, :, tf.newaxis], numbers[:, tf.newaxis, :], top[:, :, tf.newaxis]
    visible = (query > key) | tf.eye(tf.size(rows.positions), dtype=tf.bool)
    if attention_window:
        near = query - key <= attention_window
        if min_full_length:
            near |= query >= top - min_full_length
        visible &= near
    visible |= (context > 0)[:, tf.newaxis, tf.newaxis] & (query == 0) & (key < top)
    if target_group_size > 1:
        groups = (rows.positions - history_end) // target_group_size
        later = (rows.positions[:, tf.newaxis] > rows.positions) & (rows.positions >= history_end)[:, tf.newaxis, :]
        visible |= later & (groups[:, :, tf.newaxis] == groups[:, tf.newaxis, :])
    return visible


def _position_map(bias: RelativeBias, rows: _Rows) -> tf.Tensor | None:
    """Returns <float32>[B or 1, n, n]. All targets of a row share the position after its history."""
    if bias.position_weights is None:
        return None
    positions = rows.positions[tf.newaxis]
    if rows.num_targets is not None:
        positions = tf.minimum(positions, (rows.lengths - rows.num_targets)[:, tf.newaxis])
    centre = tf.shape(bias.position_weights, tf.int64)[0] // 2
    distance = positions[:, tf.newaxis, :] - positions[:, :, tf.newaxis]
    return tf.gather(tf.cast(bias.position_weights, tf.float32), centre + distance)


def _time_map(bias: RelativeBias, rows: _Rows) -> tf.Tensor | None:
    """Returns <float32>[B, n, n] by (query, key), or None without a time bias."""
    if bias.time is None or bias.times is None:
        return None
    query_times, key_times = (
        jagged.to_dense(tf.RaggedTensor.from_row_splits(times, rows.row_splits, validate=False)) for times in bias.times
    )
    difference = query_times[:, :, tf.newaxis] - key_times[:, tf.newaxis, :]
    if isinstance(bias.time, BucketTable):
        flat = tf.reshape(tf.abs(difference), [-1])
        buckets = tf.searchsorted(bias.time.thresholds, flat, side="right")
        return tf.reshape(tf.gather(tf.cast(bias.time.weights, tf.float32), buckets), tf.shape(difference))
    return _function_of_time(bias.time, tf.cast(tf.maximum(difference, 0), tf.float32))


def _function_of_time(function: TimeFunction, seconds: tf.Tensor) -> tf.Tensor:
    scalars = tf.unstack(tf.cast(function.parameters, tf.float32))
    if function.kind == "power":
        return scalars[0] * (seconds + 1.0) ** -scalars[1]
    if function.kind == "exponential":
        return scalars[0] * tf.exp(-tf.exp(scalars[1]) * seconds)
    if function.kind == "stretched":
        return scalars[0] * tf.exp(-tf.nn.softplus(scalars[1]) * (seconds + 1.0) ** scalars[2])
    raise ValueError(f"time.kind must be power, exponential or stretched, got {function.kind!r}.")
