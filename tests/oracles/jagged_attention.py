"""Oracle for jagged_attention: its definitions over one dense row at a time, in the dtype of the inputs.

It is plain TensorFlow, which differentiates it. It shares nothing with the op.
"""

import numpy as np

from tests.oracles.visible_pairs import masks_of_row, visible_pairs
from tf_fusedrec._tf_compat import tf


def time_map(kind, parameters, thresholds, asks, answers):
    """Returns the time bias [length, length] of one row."""
    difference = asks[:, None] - answers[None, :]
    if kind == "buckets":
        buckets = np.sum(np.abs(difference)[:, :, None] >= thresholds, axis=-1)
        return tf.gather(parameters, buckets)
    past = tf.constant(np.maximum(difference, 0), parameters.dtype)
    if kind == "power":
        return parameters[0] * (past + 1.0) ** -parameters[1]
    if kind == "exponential":
        return parameters[0] * tf.exp(-tf.exp(parameters[1]) * past)
    return parameters[0] * tf.exp(-tf.math.softplus(parameters[1]) * (past + 1.0) ** parameters[2])


def position_map(weights, length, num_targets):
    """Returns the position bias [length, length]. All targets share the position after the history."""
    places = np.minimum(np.arange(length), length - num_targets)
    return tf.gather(weights, weights.shape[0] // 2 + places[None, :] - places[:, None])


def _rows(row_splits, num_targets):
    splits = np.asarray(row_splits)
    counts = np.zeros(len(splits) - 1, int) if num_targets is None else np.asarray(num_targets)
    return enumerate(zip(splits[:-1], splits[1:], counts))


def _maps(begin, end, count, position_weights, kind, parameters, thresholds, asks, answers):
    position = None if position_weights is None else position_map(position_weights, end - begin, count)
    time = None
    if kind is not None:
        time = time_map(kind, parameters, thresholds, np.asarray(asks)[begin:end], np.asarray(answers)[begin:end])
    return position, time


def attention_oracle(
    query, key, value, row_splits, *, scale, alpha=1.0, num_targets=None, position_weights=None, kind=None,
    parameters=None, thresholds=None, asks=None, answers=None, **masks,
):  # fmt: skip
    """Returns [T, H, Dv]. scale is a number or [T]."""
    scale = tf.broadcast_to(tf.cast(scale, value.dtype), [value.shape[0]])
    outs = [value[:0]]
    for row, (begin, end, count) in _rows(row_splits, num_targets):
        q, k, v = query[begin:end], key[begin:end], value[begin:end]
        score = tf.cast(alpha, q.dtype) * tf.einsum("ihd,jhd->hij", q, k)
        for part in _maps(begin, end, count, position_weights, kind, parameters, thresholds, asks, answers):
            if part is not None:
                score += part
        seen = tf.constant(visible_pairs(end - begin, count, **masks_of_row(masks, row)), q.dtype)
        weight = score * tf.sigmoid(score) * seen * scale[begin:end, None]
        outs.append(tf.einsum("hij,jhd->ihd", weight, v))
    return tf.concat(outs, axis=0)


def bias_attention_oracle(
    value, row_splits, *, num_targets=None, position_weights=None, kind=None, parameters=None, thresholds=None,
    asks=None, answers=None, **masks,
):  # fmt: skip
    """Returns [T, H, channels * Dv]: the given channels, position before time."""
    channels = (position_weights is not None) + (kind is not None)
    outs = [tf.zeros([0, value.shape[1], channels * value.shape[2]], value.dtype)]
    for row, (begin, end, count) in _rows(row_splits, num_targets):
        seen = tf.constant(visible_pairs(end - begin, count, **masks_of_row(masks, row)), value.dtype)
        maps = _maps(begin, end, count, position_weights, kind, parameters, thresholds, asks, answers)
        parts = [tf.einsum("ij,jhd->ihd", part * seen, value[begin:end]) for part in maps if part is not None]
        outs.append(tf.concat(parts, axis=-1))
    return tf.concat(outs, axis=0)
