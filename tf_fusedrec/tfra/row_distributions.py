"""Draws a new key's row as a pure function of (seed, key), in the distribution of the layer's initializer.

TFRA calls its initializer for a matrix of new rows at every lookup. tf_keras' initializers draw the same matrix each
time, so different new keys get equal rows. Here the random numbers are a hash of the key. A key's row is therefore
equal at every lookup, on every rank, with and without a group. Stock TensorFlow operations keep exported graphs
portable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.config import Constant, Initializer, Normal, TruncatedNormal, Uniform, initializer_record
from tf_fusedrec.files.hash_order import table_seed
from tf_fusedrec.tfra.table import tensor_mix64

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the distance between the seeds of neighbouring columns.
# Standard deviation of a standard normal truncated at two standard deviations. VarianceScaling divides by it.
_TRUNCATED_STDDEV = 0.87962566103423978

# Maps uniforms in (0, 1) <float64>[n, D] to rows <float64>[n, D].
Distribution = Callable[[tf.Tensor], tf.Tensor]


def uniforms(keys: tf.Tensor, salts: tf.Tensor, dim: int) -> tf.Tensor:
    """Hashes keys <int64>[n], each with its salt <int64>[n], to <float64>[n, D] in (0, 1). Different keys differ."""
    seeds = tensor_mix64(tf.bitcast(tf.bitwise.bitwise_xor(keys, salts), tf.uint64))
    columns = tf.constant([(_GOLDEN * (column + 1)) % (1 << 64) for column in range(dim)], tf.uint64)
    bits = tf.bitwise.right_shift(tensor_mix64(seeds[:, tf.newaxis] + columns), tf.constant(11, tf.uint64))
    return (tf.cast(bits, tf.float64) + 0.5) * 2.0**-53


def _uniform(low: float, high: float) -> Distribution:
    return lambda u: low + (high - low) * u


def _normal(mean: float, stddev: float) -> Distribution:
    return lambda u: mean + stddev * tf.math.ndtri(u)


def _truncated_normal(mean: float, stddev: float) -> Distribution:
    tail = 0.5 * math.erfc(math.sqrt(2.0))  # Probability below minus two standard deviations.
    return lambda u: mean + stddev * tf.math.ndtri(tail + (1.0 - 2.0 * tail) * u)


def _variance_scaling(initializer: Any, rows: int, dim: int) -> Initializer:
    """Scales for a matrix [rows, D]. TFRA takes the batch's number of new keys for `rows`."""
    fans = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        return Uniform(-math.sqrt(3 * variance), math.sqrt(3 * variance))
    if initializer.distribution == "untruncated_normal":
        return Normal(0.0, math.sqrt(variance))
    return TruncatedNormal(0.0, math.sqrt(variance) / _TRUNCATED_STDDEV)


def record_of(initializer: Any, *, rows: int, dim: int, layer: str) -> Initializer | None:
    """The record of a tf_keras initializer. None for a stateful or a user's one.

    rows: Fan-in for the VarianceScaling family (Glorot, He, LeCun): the layer's init_capacity, at least 1.
    """
    kinds = keras.initializers
    if isinstance(initializer, (kinds.Orthogonal, kinds.Identity)):
        raise ValueError(
            f"initializer of layer {layer!r} is {type(initializer).__name__}, which defines a whole matrix; new keys "
            "need rows that are drawn one by one. Use RandomNormal, RandomUniform, "
            "TruncatedNormal, a VarianceScaling initializer, or Constant."
        )
    if isinstance(initializer, kinds.VarianceScaling):
        return _variance_scaling(initializer, max(rows, 1), dim)
    return initializer_record(initializer)


def distribution_of(record: Initializer) -> Distribution:
    """The distribution of a record."""
    if isinstance(record, Constant):
        return _uniform(record.value, record.value)
    makers = {Uniform: _uniform, Normal: _normal, TruncatedNormal: _truncated_normal}
    return makers[type(record)](record.a, record.b)


def seed_of(initializer: Any, layer: str) -> int:
    """Returns the signed 64-bit salt of a layer's rows, a pure function of the initializer's seed and the name."""
    seed = getattr(initializer, "seed", None)
    return table_seed(0 if seed is None else int(seed), layer)
