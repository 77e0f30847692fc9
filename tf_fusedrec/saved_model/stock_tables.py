"""Served tables by stock TensorFlow ops: ids in ascending order with their rows, found by binary search."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tf_fusedrec._tf_compat import tf


class StockTables(tf.Module):
    """Constant tables of a SavedModel.

    Args:
      tables: By table name, ids <int64>[n], ascending, and rows <float>[n, D].

    Raises:
      ValueError: ids do not ascend, or the number of rows differs from the number of ids.
    """

    def __init__(self, tables: Mapping[str, tuple[np.ndarray, np.ndarray]]):
        super().__init__(name="tables")
        self._tables = {name: _variables(name, *rows) for name, rows in tables.items()}

    def find(self, table: str, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows [n, D] of ids <int64>[n], and whether the table has them, <bool>[n]. Other rows are zeros."""
        known, rows = self._tables[table]
        # The last entry is the default row. Its id repeats the largest id, so a search from the left never finds it.
        default = tf.shape(rows)[0] - 1
        at = tf.minimum(tf.searchsorted(known, ids), default)
        exists = (tf.gather(known, at) == ids) & (at < default)
        return tf.gather(rows, tf.where(exists, at, default)), exists


def _variables(name: str, ids: np.ndarray, rows: np.ndarray) -> tuple[tf.Variable, tf.Variable]:
    """Ids <int64>[n+1] and rows [n+1, D]: the table, followed by the default row."""
    if ids.ndim != 1 or rows.ndim != 2 or len(ids) != len(rows):
        raise ValueError(
            f"table {name!r} of an export has shapes {ids.shape} and {rows.shape}, want ids [n] and rows [n, D]. "
            "Remedy: one row for each id."
        )
    if (ids[1:] <= ids[:-1]).any():  # np.diff could overflow.
        raise ValueError(
            f"table {name!r} of an export has ids that repeat or do not ascend. Remedy: sorted, distinct ids."
        )
    last = ids[-1:] if len(ids) else np.array([np.iinfo(np.int64).max])
    all_ids = np.concatenate([ids, last]).astype(np.int64)
    all_rows = np.concatenate([rows, np.zeros([1, rows.shape[1]], rows.dtype)])
    return (
        tf.Variable(all_ids, trainable=False, name=f"{name}_ids"),
        tf.Variable(all_rows, trainable=False, name=f"{name}_rows"),
    )
