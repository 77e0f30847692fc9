"""Served tables by stock TensorFlow ops: ids in ascending order with their rows, found by binary search."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model.stock_initial_rows import InitialRows


class StockTables(tf.Module):
    """Constant tables of a SavedModel.

    Args:
      tables: By table name, ids <int64>[n], ascending, and rows <float>[n, D].
      unknown: By table name, the initial rows of ids that the table lacks; None, or no entry: zeros.

    Raises:
      ValueError: ids do not ascend, or the number of rows differs from the number of ids.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[np.ndarray, np.ndarray]],
        unknown: Mapping[str, InitialRows | None] | None = None,
    ):
        super().__init__(name="tables")
        self._tables = {name: _variables(name, *rows) for name, rows in tables.items()}
        self._unknown = dict(unknown or {})

    def rows(self, table: str, ids: tf.Tensor) -> tf.Tensor:
        """Rows [n, D] of ids <int64>[n]."""
        known, rows = self._tables[table]
        # The last entry is the default row. Its id repeats the largest id, so a search from the left never finds it.
        default = tf.shape(rows)[0] - 1
        at = tf.minimum(tf.searchsorted(known, ids), default)
        exists = (tf.gather(known, at) == ids) & (at < default)
        found = tf.gather(rows, tf.where(exists, at, default))
        initial = self._unknown.get(table)
        if initial is None:
            return found

        def with_initial() -> tf.Tensor:
            missing = tf.where(~exists)
            return tf.tensor_scatter_nd_update(found, missing, initial.of(tf.gather_nd(ids, missing)))

        # Most requests hold known ids only, and then nothing is drawn.
        return tf.cond(tf.reduce_all(exists), lambda: found, with_initial)


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
