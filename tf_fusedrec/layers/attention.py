"""SiLU attention over rows of different length: the heart of an HSTU block.

hstu.py projects tokens to queries, keys and values and calls `jagged_attention`. This version is
made of TensorFlow ops and pads the batch to its longest row; the signature says nothing of that, so
that a fused op can take its place.
"""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.masks import attention_mask
from tf_fusedrec.layers.relative_bias import RelativeBias, pair_bias


def jagged_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    row_splits: tf.Tensor,
    *,
    scale: float,
    num_targets: tf.Tensor | None = None,
    contextual_length: int = 0,
    relative_bias: RelativeBias | None = None,
) -> tf.Tensor:
    """out_i = scale * sum_j SiLU(query_i . key_j + bias_ij) * visible_ij * value_j, in each row.

    The mask multiplies after SiLU and there is no softmax: weights do not sum to one. `scale` is 1
    / N in the HSTU papers' code, N being the static maximum length, not the length of the row, so
    that the result does not depend on which rows share a batch. Scores are not divided by
    sqrt(Dqk): scale the query before the call if that is wanted (the bias is added to the scaled
    product).

    float16 and bfloat16 inputs are computed in float32 and the result is cast back. Peak memory is
    a few arrays of [B, H, n, n] for n = longest row; scores are computed again in the backward pass
    instead of being kept.

    Args:
      query, key: <float>[T, H, Dqk].
      value: <float>[T, H, Dv].
      row_splits: <int64>[B+1] bounds of the rows in the tokens. Rows may be empty, B and T may be
        0.
      scale: factor of the output.
      num_targets: None or <int>[B], targets at the end of each row; a target sees context, history
        and itself.
      contextual_length: C, context tokens at the start of each row; see masks.py.
      relative_bias: position and time bias, shared by the heads, gradients of its weights are
        dense.

    Returns:
      <float>[T, H, Dv], in the dtype of value.

    Raises:
      ValueError: contextual_length is negative; query, key or value is not of rank 3.
      InvalidArgumentError: num_targets is not between 0 and the row's length, or relative_bias does
        not fit.

    Source: Zhai et al., Actions Speak Louder than Words (HSTU), section 3; masks as in its public
    operators.
    """
    _check_arguments(query, key, value, contextual_length)
    row_splits = tf.cast(row_splits, tf.int64)
    lengths = row_splits[1:] - row_splits[:-1]
    longest = tf.reduce_max(tf.concat([lengths, [0]], axis=0))
    if num_targets is not None:
        num_targets = _checked_targets(num_targets, lengths)
    compute_dtype = tf.float32 if value.dtype.size < 4 else value.dtype
    padded = [_heads_first(tokens, row_splits, compute_dtype) for tokens in (query, key, value)]
    mask = tf.cast(attention_mask(lengths, longest, num_targets, contextual_length), compute_dtype)[:, tf.newaxis]
    if relative_bias is None:
        out = _attend(*padded, mask)
    else:
        bias = pair_bias(_cast_weights(relative_bias, compute_dtype), lengths, longest, num_targets)
        out = _attend_with_bias(*padded, tf.broadcast_to(bias, [tf.size(lengths, tf.int64), longest, longest]), mask)
    tokens = jagged.from_dense(tf.transpose(out, [0, 2, 1, 3]), row_splits).values
    return tf.cast(tokens * scale, value.dtype)


@tf.custom_gradient
def _attend(query, key, value, mask):
    """[B, H, n, D] queries, keys, values and a [B or 1, 1, n, n] mask -> [B, H, n, Dv]."""

    def gradient(upstream):
        d_query, d_key, d_value, _ = _attend_gradient(query, key, value, _scores(query, key), mask, upstream)
        return d_query, d_key, d_value, None

    return _weighted_values(_scores(query, key), mask, value), gradient


@tf.custom_gradient
def _attend_with_bias(query, key, value, bias, mask):
    """As `_attend`, with a [B, n, n] bias on the scores of every head."""

    def biased_scores():
        return _scores(query, key) + bias[:, tf.newaxis]

    def gradient(upstream):
        d_query, d_key, d_value, d_scores = _attend_gradient(query, key, value, biased_scores(), mask, upstream)
        return d_query, d_key, d_value, tf.reduce_sum(d_scores, axis=1), None

    return _weighted_values(biased_scores(), mask, value), gradient


def _scores(query, key):
    return tf.matmul(query, key, transpose_b=True)


def _weighted_values(scores, mask, value):
    return tf.matmul(tf.nn.silu(scores) * mask, value)


def _attend_gradient(query, key, value, scores, mask, upstream):
    """SiLU'(x) = s + x s (1 - s), s = sigmoid(x). The mask is multiplied once, for both terms."""
    sigmoid = tf.sigmoid(scores)
    visible_sigmoid = sigmoid * mask
    weights = scores * visible_sigmoid
    slope = visible_sigmoid + weights * (1.0 - sigmoid)
    d_scores = tf.matmul(upstream, value, transpose_b=True) * slope
    d_query = tf.matmul(d_scores, key)
    d_key = tf.matmul(d_scores, query, transpose_a=True)
    d_value = tf.matmul(weights, upstream, transpose_a=True)
    return d_query, d_key, d_value, d_scores


def _heads_first(tokens, row_splits, dtype):
    """[T, H, D] -> [B, H, n, D], zeros behind each row."""
    rows = tf.RaggedTensor.from_row_splits(tf.cast(tokens, dtype), row_splits, validate=False)
    return tf.transpose(jagged.to_dense(rows), [0, 2, 1, 3])


def _cast_weights(bias: RelativeBias, dtype: tf.DType) -> RelativeBias:
    time_weights = None if bias.time_weights is None else tf.cast(bias.time_weights, dtype)
    return bias._replace(position_weights=tf.cast(bias.position_weights, dtype), time_weights=time_weights)


def _checked_targets(num_targets: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    num_targets = tf.cast(num_targets, tf.int64)
    message = "num_targets must have one entry per row, between 0 and the row's length"
    checks = [
        tf.debugging.assert_equal(tf.shape(num_targets), tf.shape(lengths), message=message),
        tf.debugging.assert_non_negative(num_targets, message=message),
        tf.debugging.assert_less_equal(num_targets, lengths, message=message),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(num_targets)


def _check_arguments(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, contextual_length: int) -> None:
    for name, tokens in (("query", query), ("key", key), ("value", value)):
        if tokens.shape.rank != 3:
            raise ValueError(f"{name} must be [T, H, D], got shape {tokens.shape}. Split the heads with tf.reshape.")
    if contextual_length < 0:
        raise ValueError(f"contextual_length must be >= 0, got {contextual_length}. Use 0 for no context.")
