"""Rows of keys that a TFRA table does not hold: a pure function of (seed, key), from plain TensorFlow operations.

TFRA asks its initializer for a matrix of new rows at every lookup, and tf_keras' initializers draw the same matrix each
time, so that new keys get repeated rows. Here the distribution stays, and the numbers are a hash of the key: equal at
every lookup, on every rank, in a group of layers or alone. No custom op: exported graphs hold nothing of this project.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.tables.keys import mix64, table_seed

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: columns are that far apart before they are mixed
# What a normal, cut at two standard deviations, leaves of its standard deviation: VarianceScaling makes up for it.
_TRUNCATED_STDDEV = 0.87962566103423978

# uniforms in (0, 1) <float64>[n, D] -> rows <float64>[n, D]
Law = Callable[[tf.Tensor], tf.Tensor]


def uniforms(keys: tf.Tensor, salts: tf.Tensor, dim: int) -> tf.Tensor:
    """<float64>[n, D] in (0, 1) of keys <int64>[n] with a salt each <int64>[n]: hashes, so no two rows are alike."""
    seeds = mix64(tf.bitcast(tf.bitwise.bitwise_xor(keys, salts), tf.uint64))
    columns = tf.constant([(_GOLDEN * (column + 1)) % (1 << 64) for column in range(dim)], tf.uint64)
    bits = tf.bitwise.right_shift(mix64(seeds[:, tf.newaxis] + columns), tf.constant(11, tf.uint64))
    return (tf.cast(bits, tf.float64) + 0.5) * 2.0**-53


def _uniform(low: float, high: float) -> Law:
    return lambda u: low + (high - low) * u


def _normal(mean: float, stddev: float) -> Law:
    return lambda u: mean + stddev * tf.math.ndtri(u)


def _truncated_normal(mean: float, stddev: float) -> Law:
    tail = 0.5 * math.erfc(math.sqrt(2.0))  # below two standard deviations
    return lambda u: mean + stddev * tf.math.ndtri(tail + (1.0 - 2.0 * tail) * u)


def _variance_scaling(initializer: Any, rows: int, dim: int) -> Law:
    """Of a matrix [rows, D]; TFRA takes the batch's number of new keys, which says nothing about the table."""
    fans = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        return _uniform(-math.sqrt(3 * variance), math.sqrt(3 * variance))
    if initializer.distribution == "untruncated_normal":
        return _normal(0.0, math.sqrt(variance))
    return _truncated_normal(0.0, math.sqrt(variance) / _TRUNCATED_STDDEV)


def _constant(value: float) -> Law:
    return lambda u: tf.fill(tf.shape(u), tf.constant(value, tf.float64))


def law_of(initializer: Any, *, rows: int, dim: int, layer: str) -> Law | None:
    """The distribution of a tf_keras initializer, or None where the initializer itself gives the rows.

    Args:
      initializer: of the layer. Those that keep random state, and those of a user's own, are asked as TFRA asks them.
      rows: fan-in of the VarianceScaling family (Glorot, He, LeCun): the layer's init_capacity, at least 1.
      dim: D.
      layer: its name, for messages.

    Raises:
      ValueError: a random tf_keras initializer that has no row by row form (Orthogonal, Identity), which would repeat
        rows.
    """
    kinds = keras.initializers
    if isinstance(initializer, (kinds.Orthogonal, kinds.Identity)):
        raise ValueError(
            f"initializer of layer {layer!r} must say what one row is, got {type(initializer).__name__}, which is of a "
            "whole matrix: new keys would get the same rows at every lookup. Use RandomNormal, RandomUniform, "
            "TruncatedNormal, a VarianceScaling initializer, or Constant."
        )
    if isinstance(initializer, kinds.VarianceScaling):
        return _variance_scaling(initializer, max(rows, 1), dim)
    if type(initializer) in (kinds.Zeros, kinds.Ones, kinds.Constant):
        value: Any = {kinds.Zeros: 0.0, kinds.Ones: 1.0}.get(type(initializer))
        value = initializer.value if value is None else value
        return _constant(float(value)) if np.ndim(value) == 0 else None
    laws = {kinds.RandomUniform: _uniform, kinds.RandomNormal: _normal, kinds.TruncatedNormal: _truncated_normal}
    make = laws.get(type(initializer))
    if make is None:
        return None
    config = initializer.get_config()
    names = ("minval", "maxval") if make is _uniform else ("mean", "stddev")
    return make(*(float(config[name]) for name in names))


def seed_of(initializer: Any, layer: str) -> int:
    """Signed 64-bit salt of a layer's rows: a pure function of the initializer's seed and the layer's name."""
    seed = getattr(initializer, "seed", None)
    return table_seed(0 if seed is None else int(seed), layer)
