"""Initial rows by stock TensorFlow ops, for ids that an export lacks and TableConfig.unknown = "initial".

The initial row is a pure function of (seed, table, id). This package's ops draw it with custom_ops/initial_rows. This
module draws the same bits with stock ops. Philox4x32-10 (Salmon et al., SC 2011) runs on unsigned 64-bit integers; the
quantile of the distribution follows in float64 (AS 241, Wichura 1988). Each operation rounds by IEEE 754, in the order
of initial_number.h.

Sums of several terms are written as differences, because TensorFlow's graph optimizer may reorder sums. A compiler that
fuses a product and a sum (XLA) may change the last bit of a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.tables.keys import table_seed

_LOW = (1 << 32) - 1
_MULTIPLIERS, _KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_BELOW_MINUS_2 = 0.022750131948179207  # probability that a standard normal variable is below -2
_LOG_2_HIGH, _LOG_2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# AS 241, PPND16: coefficients, highest power first.
_CENTRAL_TOP = (
    2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
    13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608,
)  # fmt: skip
_CENTRAL_BOTTOM = (
    5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
    5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0,
)  # fmt: skip
_TAIL_TOP = (
    7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
    3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734,
)  # fmt: skip
_TAIL_BOTTOM = (
    1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
    0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0,
)  # fmt: skip


def _many(dtype: tf.DType) -> tf.TensorSpec:
    return tf.TensorSpec([None], dtype)


class InitialRows(NamedTuple):
    """Generator of the initial rows of one table.

    seed: Seed of the table, signed 64 bits.
    distribution, a, b: Distribution and its parameters; see ops.initial_rows.
    dim: Columns of a row, D.
    stored: dtype of a new row in the training table.
    dtype: dtype of the rows that the model gets.
    """

    seed: int
    distribution: str
    a: float
    b: float
    dim: int
    stored: str
    dtype: str

    def of(self, ids: tf.Tensor) -> tf.Tensor:
        """Initial rows <dtype>[n, D] of ids <int64>[n]."""
        # The ops take both parameters as float32.
        a, b = float(np.float32(self.a)), float(np.float32(self.b))
        if self.distribution == "constant":
            rows = tf.fill([tf.size(ids), self.dim], tf.constant(a, tf.float32))
        else:
            p = (tf.cast(_bits(self.seed, ids, self.dim), tf.float64) + 0.5) * 2.0**-32
            if self.distribution == "uniform":
                numbers = a + (b - a) * p
            elif self.distribution == "normal":
                numbers = a + b * _normal_quantile(p)
            else:
                numbers = a + b * _normal_quantile(_BELOW_MINUS_2 + (1.0 - 2.0 * _BELOW_MINUS_2) * p)
            rows = tf.cast(numbers, tf.float32)
        return tf.cast(tf.cast(rows, self.stored), self.dtype)


def unknown_rows(config: TableConfig, seed: int) -> InitialRows | None:
    """Initial rows of a table with this config and layer seed; None if its unknown ids have zeros."""
    if config.unknown == "zeros" or config.external is not None:
        return None
    initializer = config.initializer
    stored = "float16" if config.storage_dtype == "mixed" else config.storage_dtype or config.dtype
    return InitialRows(
        table_seed(seed, config.name), initializer.distribution, initializer.a, initializer.b, config.dim, stored,
        config.dtype,
    )  # fmt: skip


def _bits(seed: int, ids: tf.Tensor, dim: int) -> tf.Tensor:
    """The 32 random bits of each number, <uint64>[n, D]."""
    key = seed & ((1 << 64) - 1)
    keys = np.array([key & _LOW, key >> 32]) + np.outer(np.arange(10), _KEY_STEPS)
    blocks = -(-dim // 4)  # Philox gives four columns at once.
    bits = _philox(tf.bitcast(ids, tf.uint64), tf.range(blocks, dtype=tf.int64), tf.constant(keys & _LOW, tf.uint64))
    return tf.reshape(bits, [-1, 4 * blocks])[:, :dim]


# One graph serves all tables of an export: it takes the keys of the ten rounds as a tensor.
@tf.function(input_signature=[_many(tf.uint64), _many(tf.int64), tf.TensorSpec([10, 2], tf.uint64)], autograph=False)
def _philox(ids: tf.Tensor, blocks: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Random bits <uint64>[n, blocks, 4] of ids <uint64>[n]."""

    def word(value: int) -> tf.Tensor:
        return tf.constant(value, tf.uint64)

    def high(value: tf.Tensor) -> tf.Tensor:
        return tf.bitwise.right_shift(value, word(32))

    def low(value: tf.Tensor) -> tf.Tensor:
        return tf.bitwise.bitwise_and(value, word(_LOW))

    bits = ids[:, tf.newaxis]
    counter = [low(bits), high(bits), tf.bitcast(blocks, tf.uint64)[tf.newaxis], word(0)]
    for of_round in tf.unstack(keys):
        first, second = tf.unstack(of_round)
        products = [word(m) * c for m, c in zip(_MULTIPLIERS, counter[::2])]
        counter = [
            tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(high(products[1]), counter[1]), first),
            low(products[1]),
            tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(high(products[0]), counter[3]), second),
            low(products[0]),
        ]
    return tf.stack(counter, axis=2)


def _natural_log(x: tf.Tensor) -> tf.Tensor:
    """log(x) of normal numbers <float64> > 0.

    log(2^e m) = e log 2 + 2 artanh((m - 1) / (m + 1)), with sqrt(1/2) <= m < sqrt(2).
    """
    bits = tf.bitcast(x, tf.int64)
    rest = tf.bitwise.bitwise_and(bits, tf.constant(0xFFFFFFFFFFFFF, tf.int64))
    upper = tf.cast(rest >= 0x6A09E667F3BCD, tf.int64)  # the mantissa bits of sqrt(2)
    m = tf.bitcast(tf.bitwise.bitwise_or(rest, (1023 - upper) * (1 << 52)), tf.float64)
    exponent = tf.cast(tf.bitwise.right_shift(bits, tf.constant(52, tf.int64)) - 1023 + upper, tf.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = tf.zeros_like(z)
    for k in range(23, 2, -2):
        series = (series + 1.0 / k) * z
    # e high + (2 s + (2 s series + e low))
    minus_small = exponent * -_LOG_2_LOW - 2.0 * s * series
    return 2.0 * s - minus_small - exponent * -_LOG_2_HIGH


def _polynomial(coefficients: Sequence[float], x: tf.Tensor) -> tf.Tensor:
    value = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


@tf.function(input_signature=[tf.TensorSpec([None, None], tf.float64)], autograph=False)
def _normal_quantile(p: tf.Tensor) -> tf.Tensor:
    """Quantile of the standard normal distribution at p <float64>, 1e-11 < p < 1 - 1e-11."""
    q = p - 0.5
    r = 0.180625 - q * q
    central = q * _polynomial(_CENTRAL_TOP, r) / _polynomial(_CENTRAL_BOTTOM, r)
    r = tf.sqrt(-_natural_log(tf.where(q < 0.0, p, 1.0 - p))) - 1.6
    tail = _polynomial(_TAIL_TOP, r) / _polynomial(_TAIL_BOTTOM, r)
    return tf.where(tf.abs(q) <= 0.425, central, tf.where(q < 0.0, -tail, tail))
