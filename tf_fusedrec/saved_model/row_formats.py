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


def encoded(table: str, rows: np.ndarray, dtype: str) -> np.ndarray:
    """Rows [n, D] in `dtype`: <dtype>[n, D], or <int8>[n, D+4].

    Raises:
      ValueError: dtype is int8, and a row is not finite.
    """
    if dtype != "int8":
        return rows.astype(tf.as_dtype(dtype).as_numpy_dtype)
    numbers = rows.astype(np.float32)
    scales = np.abs(numbers).max(axis=1, keepdims=True, initial=0) / np.float32(_STEPS)
    if not np.isfinite(scales).all():
        raise ValueError(
            f"rows is 'int8', but table {table!r} has {int((~np.isfinite(scales)).sum())} rows that are not finite. "
            "Remedy: find the step that made them, or export with rows=None."
        )
    # The product of the scale and all steps must stay finite.
    scales = np.minimum(scales, np.nextafter(np.finfo(np.float32).max / np.float32(_STEPS), np.float32(0)))
    steps = np.rint(np.divide(numbers, scales, out=np.zeros_like(numbers), where=scales > 0))
    # The quotient of a subnormal scale may exceed the largest step.
    steps = np.clip(steps, -_STEPS, _STEPS).astype(np.int8)
    return np.concatenate([steps, scales.astype("<f4").view(np.int8)], axis=1)


def decoded(rows: tf.Tensor, dim: int) -> tf.Tensor:
    """The numbers [n, dim] of encoded rows, in their dtype; <float32> for int8."""
    if rows.dtype != tf.int8:
        return rows
    scales = tf.bitcast(rows[:, dim:], tf.float32)
    return tf.cast(rows[:, :dim], tf.float32) * scales[:, tf.newaxis]
