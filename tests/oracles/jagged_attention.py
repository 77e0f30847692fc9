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


def mixed(bits):
    """lowbias32 (Wellons), of <uint64> arrays with numbers below 2^32."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D % 2**32
    bits = (bits ^ (bits >> 15)) * 0x846CA68B % 2**32
    return bits ^ (bits >> 16)


def kept_pairs(seed, dropout, row, heads, length):
    """Returns the factors [H, length, length] by head, query and key: 1 / (1 - dropout), or 0 for hidden pairs."""
    numbers = lambda *count: np.arange(max(count), dtype=np.uint64).reshape(count)  # noqa: E731
    after = lambda bits, number: mixed((bits + number * 0x9E3779B9) % 2**32)  # noqa: E731
    low, high = (np.full([1, 1, 1], word % 2**32, np.uint64) for word in (seed, seed >> 32))
    of_head = after(after(mixed(low ^ mixed(high)), np.full([1, 1, 1], row, np.uint64)), numbers(heads, 1, 1))
    bits = after(after(of_head, numbers(1, 1, length)), numbers(1, length, 1))
    return (bits >> 1 >= int(float(np.float32(dropout)) * 2**31)) / (1 - dropout)


def attention_oracle(
    query, key, value, row_splits, *, scale, alpha=1.0, num_targets=None, position_weights=None, kind=None,
    parameters=None, thresholds=None, asks=None, answers=None, dropout=0.0, dropout_seed=0, **masks,
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
        if dropout and end > begin:
            weight *= tf.constant(kept_pairs(dropout_seed, dropout, row, q.shape[1], end - begin), q.dtype)
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
