"""Tables as plain TensorFlow serves them: ids in ascending order and rows, found by binary search."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tf_fusedrec._tf_compat import tf


class StockTables(tf.Module):
    """Tables that never change. An id that is in none of them has a row of zeros.

    Args:
      tables: table name -> ids <int64>[n], ascending, and rows <float>[n, D].

    Raises:
      ValueError: ids that do not ascend, or other than one row per id.
    """

    def __init__(self, tables: Mapping[str, tuple[np.ndarray, np.ndarray]]):
        super().__init__(name="tables")
        self._tables = {name: _variables(name, *rows) for name, rows in tables.items()}

    def rows(self, table: str, ids: tf.Tensor) -> tf.Tensor:
        """Rows [n, D] of ids <int64>[n]."""
        known, rows = self._tables[table]
        # The last entry is the default row; its id repeats the largest, which a search from the left never answers.
        default = tf.shape(rows)[0] - 1
        at = tf.minimum(tf.searchsorted(known, ids), default)
        return tf.gather(rows, tf.where(tf.gather(known, at) == ids, at, default))


def _variables(name: str, ids: np.ndarray, rows: np.ndarray) -> tuple[tf.Variable, tf.Variable]:
    """ids [n+1] and rows [n+1, D]: the table and, behind it, the default row."""
    if ids.ndim != 1 or rows.ndim != 2 or len(ids) != len(rows):
        raise ValueError(f"table {name!r} must be ids [n] and rows [n, D], got shapes {ids.shape} and {rows.shape}.")
    if (ids[1:] <= ids[:-1]).any():  # a difference would overflow
        raise ValueError(f"ids of table {name!r} must ascend without repeats.")
    last = ids[-1:] if len(ids) else np.array([np.iinfo(np.int64).max])
    all_ids = np.concatenate([ids, last]).astype(np.int64)
    all_rows = np.concatenate([rows, np.zeros([1, rows.shape[1]], rows.dtype)])
    return (
        tf.Variable(all_ids, trainable=False, name=f"{name}_ids"),
        tf.Variable(all_rows, trainable=False, name=f"{name}_rows"),
    )
