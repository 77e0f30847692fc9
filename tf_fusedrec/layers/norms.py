"""Normalisations over the last axis, computed in float32 under every mixed precision policy."""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf

EPSILON = 1e-6  # HSTU and FuXi use the same value.


def layer_norm(x: tf.Tensor, epsilon: float = EPSILON) -> tf.Tensor:
    """Returns (x - mean) / sqrt(variance + epsilon), without weights, in the shape and dtype of x <float>[..., D]."""
    wide = _wide(x)
    centred = wide - tf.reduce_mean(wide, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
    return tf.cast(centred * tf.math.rsqrt(variance + epsilon), x.dtype)


def rms_norm(x: tf.Tensor, epsilon: float = EPSILON) -> tf.Tensor:
    """Returns x / sqrt(mean(x^2) + epsilon), without weights, in the shape and dtype of x <float>[..., D]."""
    wide = _wide(x)
    return tf.cast(wide * tf.math.rsqrt(tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True) + epsilon), x.dtype)


def _wide(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x
