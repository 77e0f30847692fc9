"""Rows of an export in fewer bytes: bfloat16, or int8 with a scale per row.

A row of D numbers is D + 4 bytes in int8: the numbers in units of the scale, then the scale <float32>, little-endian.
The scale is the largest absolute value of the row over 127. A number differs from its float32 value by at most half the
scale, apart from the rounding of float32. Overlays, deltas and digests treat all bytes of a row as one.
"""

from __future__ import annotations

import numpy as np

from tf_fusedrec._tf_compat import tf

ROWS = (None, "bfloat16", "int8")
_STEPS = 127  # in the largest number of a row


def encoded(table: str, ids: np.ndarray, rows: np.ndarray, dtype: str) -> np.ndarray:
    """Rows [n, D] of ids <int64>[n] in `dtype`: <dtype>[n, D], or <int8>[n, D+4].

    Raises:
      ValueError: a row is not finite in that dtype.
    """
    numbers = rows.astype(np.float32 if dtype == "int8" else tf.as_dtype(dtype).as_numpy_dtype)
    bad = ~np.isfinite(numbers).all(axis=1)
    if bad.any():
        raise ValueError(
            f"table {table!r} has {int(bad.sum())} rows that are not finite in {numbers.dtype.name}, the first of id "
            f"{ids[bad][0]}. Remedy: load an earlier save (checkpoint.saves lists them), and look for the cause, such "
            "as a learning rate that is too high or a NaN in the data."
        )
    if dtype != "int8":
        return numbers
    scales = np.abs(numbers).max(axis=1, keepdims=True, initial=0) / np.float32(_STEPS)
    # The product of the scale and all steps must stay finite.
    scales = np.minimum(scales, np.nextafter(np.finfo(np.float32).max / np.float32(_STEPS), np.float32(0)))
    steps = np.rint(np.divide(numbers, scales, out=np.zeros_like(numbers), where=scales > 0))
    # The quotient of a subnormal scale may exceed the largest step.
    steps = np.clip(steps, -_STEPS, _STEPS).astype(np.int8)
    return np.concatenate([steps, scales.astype("<f4").view(np.int8)], axis=1)


def decoded(rows: tf.Tensor, dim: int) -> tf.Tensor:
    """The numbers [n, dim] of encoded rows, in their dtype; <float32> for int8, whose rows have dim + 4 columns."""
    if rows.dtype != tf.int8:
        return rows
    scales = tf.bitcast(rows[:, dim:], tf.float32)
    return tf.cast(rows[:, :dim], tf.float32) * scales[:, tf.newaxis]
