"""Initial rows by stock TensorFlow ops, for ids that an export lacks and TableConfig.unknown = "initial".

The initial row is a pure function of (seed, table, id). This package's ops draw it with custom_ops/initial_rows. This
module draws the same bits with stock ops. Philox4x32-10 (Salmon et al., SC 2011) runs on unsigned 64-bit integers; the
quantile of the distribution follows in float64 (AS 241, Wichura 1988). Each operation rounds by IEEE 754, in the order
of initial_number.h.

Sums of several terms are written as differences, because TensorFlow's graph optimizer may reorder sums. A compiler that
fuses a product and a sum (XLA) may change the last bit of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.files.hash_order import table_seed

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


class InitialRows(NamedTuple):
    """Generator of the initial rows of one table."""

    seed: int  # of the table, signed 64 bits
    distribution: str  # with its parameters a and b, see ops.initial_rows
    a: float
    b: float
    dim: int
    stored: str  # dtype of a new row in the training table


def drawn_rows(generators: Sequence[InitialRows | None], ids: tf.Tensor, tables: tf.Tensor) -> tf.Tensor:
    """<float32>[n, D] initial rows of ids of several tables with equal dim, rounded to the dtype `stored`.

    `tables` <int64>[n] are positions in `generators`, which has None for a table without requests.
    """
    forms: dict[tuple[str, str], list[int]] = {}
    for position, initial in enumerate(generators):
        if initial is not None:
            forms.setdefault((initial.distribution, initial.stored), []).append(position)
    if len(forms) == 1:
        return _rows_of_form(generators, ids, tables)
    rows = tf.zeros([tf.size(ids), next(initial.dim for initial in generators if initial is not None)])
    for members in forms.values():
        selected = [initial if position in members else None for position, initial in enumerate(generators)]
        places = tf.where(tf.gather(tf.constant([initial is not None for initial in selected]), tables))
        form_rows = _rows_of_form(selected, tf.gather_nd(ids, places), tf.gather_nd(tables, places))
        rows = tf.tensor_scatter_nd_update(rows, places, form_rows)
    return rows


def _rows_of_form(generators: Sequence[InitialRows | None], ids: tf.Tensor, tables: tf.Tensor) -> tf.Tensor:
    """drawn_rows for tables with equal distribution and stored dtype."""
    any_table = next(initial for initial in generators if initial is not None)

    def by_id(value: Callable[[InitialRows], float | int], dtype: type) -> tf.Tensor:
        """<dtype>[n, 1], a value of each id's table."""
        values = [0 if initial is None else value(initial) for initial in generators]
        return tf.gather(tf.constant(np.array(values, dtype)), tables)[:, tf.newaxis]

    # The ops take both parameters as float32.
    a = by_id(lambda initial: float(np.float32(initial.a)), np.float64)
    if any_table.distribution == "constant":
        numbers = tf.repeat(a, any_table.dim, axis=1)
    else:
        seeds = by_id(lambda initial: initial.seed & ((1 << 64) - 1), np.uint64)
        p = (tf.cast(_bits(seeds, ids, any_table.dim), tf.float64) + 0.5) * 2.0**-32
        b = by_id(lambda initial: float(np.float32(initial.b)), np.float64)
        if any_table.distribution == "uniform":
            numbers = a + (b - a) * p
        elif any_table.distribution == "normal":
            numbers = a + b * _normal_quantile(p)
        else:
            numbers = a + b * _normal_quantile(_BELOW_MINUS_2 + (1.0 - 2.0 * _BELOW_MINUS_2) * p)
    return tf.cast(tf.cast(tf.cast(numbers, tf.float32), any_table.stored), tf.float32)


def unknown_rows(config: TableConfig, seed: int, rows: str | None) -> InitialRows | None:
    """Initial rows of a table with this config and layer seed; None if its unknown ids have zeros.

    rows: As in export. Initial rows are rounded to bfloat16 with the others, but not to int8.
    """
    if config.unknown == "zeros" or config.external is not None:
        return None
    initializer = config.initializer
    stored: str = "bfloat16" if rows == "bfloat16" else config.storage.dtype or config.dtype
    return InitialRows(
        table_seed(seed, config.name), initializer.distribution, initializer.a, initializer.b, config.dim,
        "float16" if stored == "mixed" else stored,
    )  # fmt: skip


def _bits(seeds: tf.Tensor, ids: tf.Tensor, dim: int) -> tf.Tensor:
    """The 32 random bits of each number, <uint64>[n, D]. seeds: <uint64>[n, 1]."""

    def word(value: int) -> tf.Tensor:
        return tf.constant(value, tf.uint64)

    def high(value: tf.Tensor) -> tf.Tensor:
        return tf.bitwise.right_shift(value, word(32))

    def low(value: tf.Tensor) -> tf.Tensor:
        return tf.bitwise.bitwise_and(value, word(_LOW))

    keys = [low(seeds), high(seeds)]
    blocks = -(-dim // 4)  # Philox gives four columns at once.
    bits = tf.bitcast(ids, tf.uint64)[:, tf.newaxis]
    counter = [low(bits), high(bits), tf.range(blocks, dtype=tf.int64)[tf.newaxis], word(0)]
    counter[2] = tf.bitcast(counter[2], tf.uint64)
    for _ in range(10):
        products = [word(m) * c for m, c in zip(_MULTIPLIERS, counter[::2])]
        counter = [
            tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(high(products[1]), counter[1]), keys[0]),
            low(products[1]),
            tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(high(products[0]), counter[3]), keys[1]),
            low(products[0]),
        ]
        keys = [low(k + word(step)) for k, step in zip(keys, _KEY_STEPS)]
    return tf.reshape(tf.stack(counter, axis=2), [-1, 4 * blocks])[:, :dim]


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


# One graph for all calls of an export.
@tf.function(input_signature=[tf.TensorSpec([None, None], tf.float64)], autograph=False)
def _normal_quantile(p: tf.Tensor) -> tf.Tensor:
    """Quantile of the standard normal distribution at p <float64>, 1e-11 < p < 1 - 1e-11."""
    q = p - 0.5
    r = 0.180625 - q * q
    central = q * _polynomial(_CENTRAL_TOP, r) / _polynomial(_CENTRAL_BOTTOM, r)
    r = tf.sqrt(-_natural_log(tf.where(q < 0.0, p, 1.0 - p))) - 1.6
    tail = _polynomial(_TAIL_TOP, r) / _polynomial(_TAIL_BOTTOM, r)
    return tf.where(tf.abs(q) <= 0.425, central, tf.where(q < 0.0, -tail, tail))
