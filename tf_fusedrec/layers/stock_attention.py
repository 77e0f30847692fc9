"""Computes jagged_attention and bias_attention with stock TensorFlow ops, for a SavedModel served without our ops.

tf_fusedrec.ops.jagged_attention documents the definitions and the arguments. These functions pad the batch to its
longest row and hold every pair of every head in memory. They serve models; training uses the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.ops import BucketTable, RelativeBias, TimeFunction, contextual_lengths


class _Rows(NamedTuple):
    """The padded form of a batch: B rows with n positions each, the last m of which ask."""

    row_splits: tf.Tensor  # <int64>[B+1]
    query_splits: tf.Tensor  # <int64>[B+1]
    lengths: tf.Tensor  # <int64>[B]
    positions: tf.Tensor  # <int64>[n]
    asking: tf.Tensor  # <int64>[B or 1, m], positions of the queries
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
    bias: RelativeBias | None = None,
    query_splits: tf.Tensor | None = None,
    **masks: Any,
) -> tf.Tensor:
    """Returns [Tq, H, Dv]: out_i = scale_i sum_j SiLU(alpha query_i . key_j + bias_ij) visible_ij value_j by row."""
    rows = _rows(row_splits, num_targets, query_splits)
    queries = jagged.padded(query, rows.query_splits)
    keys, values = (jagged.padded(tokens, rows.row_splits) for tokens in (key, value))
    scores = alpha * tf.einsum("bihd,bjhd->bhij", queries, keys)
    if bias is not None:
        for part in (_position_map(bias, rows), _time_map(bias, rows)):
            scores = scores if part is None else scores + part[:, tf.newaxis]
    visible = tf.cast(_visible(rows, **masks), scores.dtype)
    out = tf.einsum("bhij,bjhd->bihd", tf.nn.silu(scores) * visible[:, tf.newaxis], values)
    scale = tf.reshape(tf.cast(scale, out.dtype), [-1, 1, 1])
    return tf.cast(jagged.from_dense(out, rows.query_splits).values * scale, value.dtype)


def bias_attention(
    value: tf.Tensor,
    row_splits: tf.Tensor,
    *,
    bias: RelativeBias,
    num_targets: tf.Tensor | None = None,
    query_splits: tf.Tensor | None = None,
    **masks: Any,
) -> tf.Tensor:
    """Returns per head [sum_j position_ij visible_ij value_j | the same with time_ij], [Tq, H, 2 Dv].

    A bias with one of the two maps gives [Tq, H, Dv].
    """
    rows = _rows(row_splits, num_targets, query_splits)
    values = jagged.padded(value, rows.row_splits)
    visible = tf.cast(_visible(rows, **masks), values.dtype)
    maps = [part for part in (_position_map(bias, rows), _time_map(bias, rows)) if part is not None]
    channels = [tf.einsum("bij,bjhd->bihd", part * visible, values) for part in maps]
    return tf.cast(jagged.from_dense(tf.concat(channels, axis=-1), rows.query_splits).values, value.dtype)


def _rows(row_splits: tf.Tensor, num_targets: tf.Tensor | None, query_splits: tf.Tensor | None) -> _Rows:
    row_splits = tf.cast(row_splits, tf.int64)
    lengths = row_splits[1:] - row_splits[:-1]
    positions = tf.range(tf.reduce_max(tf.concat([lengths, [0]], axis=0)))
    targets = None if num_targets is None else tf.cast(num_targets, tf.int64)
    if query_splits is None:
        return _Rows(row_splits, row_splits, lengths, positions, positions[tf.newaxis], targets)
    query_splits = tf.cast(query_splits, tf.int64)
    queries = query_splits[1:] - query_splits[:-1]
    asking = (lengths - queries)[:, tf.newaxis] + tf.range(tf.reduce_max(tf.concat([queries, [0]], axis=0)))
    # Padding after a row asks from its last position, which every table has.
    asking = tf.minimum(asking, tf.maximum(lengths - 1, 0)[:, tf.newaxis])
    return _Rows(row_splits, query_splits, lengths, positions, asking, targets)


def _visible(
    rows: _Rows,
    contextual_length: int | tf.Tensor = 0,
    attention_window: int = 0,
    min_full_length: int = 0,
    global_window: int = 0,
    target_group_size: int = 1,
) -> tf.Tensor:
    """Returns <bool>[B, m, n] by (query, key). Numbers as in jagged.visible_keys."""
    context = contextual_lengths(contextual_length, rows.row_splits)
    context = tf.zeros_like(rows.lengths) if context is None else context
    beyond_one = tf.maximum(context - 1, 0)[:, tf.newaxis]
    query, key = (tf.maximum(positions - beyond_one, 0) for positions in (rows.asking, rows.positions))
    history_end = (rows.lengths if rows.num_targets is None else rows.lengths - rows.num_targets)[:, tf.newaxis]
    top = history_end - beyond_one
    if rows.num_targets is not None:
        query, key = tf.minimum(query, top), tf.minimum(key, top)
    query, key, top = query[:, :, tf.newaxis], key[:, tf.newaxis, :], top[:, :, tf.newaxis]
    asking, answering = rows.asking[:, :, tf.newaxis], rows.positions[tf.newaxis, tf.newaxis, :]
    visible = (query > key) | (asking == answering)
    if attention_window:
        near = query - key <= attention_window
        if min_full_length:
            near |= query >= top - min_full_length
        if global_window:
            near |= key < global_window + tf.cast(context > 0, tf.int64)[:, tf.newaxis, tf.newaxis]
        visible &= near
    visible |= (context > 0)[:, tf.newaxis, tf.newaxis] & (query == 0) & (key < top)
    if target_group_size > 1:
        history_end = history_end[:, :, tf.newaxis]
        groups = [(places - history_end) // target_group_size for places in (asking, answering)]
        visible |= (asking > answering) & (answering >= history_end) & (groups[0] == groups[1])
    return visible


def _position_map(bias: RelativeBias, rows: _Rows) -> tf.Tensor | None:
    """Returns <float32>[B or 1, m, n]. All targets of a row share the position after its history."""
    if bias.position_weights is None:
        return None
    asking, answering = rows.asking, rows.positions[tf.newaxis]
    if rows.num_targets is not None:
        history_end = (rows.lengths - rows.num_targets)[:, tf.newaxis]
        asking, answering = tf.minimum(asking, history_end), tf.minimum(answering, history_end)
    centre = tf.shape(bias.position_weights, tf.int64)[0] // 2
    distance = answering[:, tf.newaxis, :] - asking[:, :, tf.newaxis]
    return tf.gather(tf.cast(bias.position_weights, tf.float32), centre + distance)


def _time_map(bias: RelativeBias, rows: _Rows) -> tf.Tensor | None:
    """Returns <float32>[B, m, n] by (query, key), or None without a time bias."""
    if bias.time is None or bias.times is None:
        return None
    query_times, key_times = (
        jagged.padded(times, splits) for times, splits in zip(bias.times, (rows.query_splits, rows.row_splits))
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


class AttentionKernels(NamedTuple):
    """Functions of ops/attention.py, which documents their arguments."""

    attention: Callable[..., tf.Tensor]
    bias_attention: Callable[..., tf.Tensor]
    gates: bool  # whether attention takes a gate


FUSED = AttentionKernels(ops.jagged_attention, ops.bias_attention, gates=True)
STOCK = AttentionKernels(jagged_attention, bias_attention, gates=False)
