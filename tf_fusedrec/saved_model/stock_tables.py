"""Tables as plain TensorFlow serves them: ids in ascending order and rows, found by binary search."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model.initial_rows import InitialRows


class StockTables(tf.Module):
    """Tables that never change.

    Args:
      tables: table name -> ids <int64>[n], ascending, and rows <float>[n, D].
      unknown: table name -> rows of ids that the table does not hold; a table without has zeros.

    Raises:
      ValueError: ids that do not ascend, or other than one row per id.
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
        # The last entry is the default row; its id repeats the largest, which a search from the left never answers.
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

        # Most calls of a server know all their ids, and then draw nothing.
        return tf.cond(tf.reduce_all(exists), lambda: found, with_initial)


def _variables(name: str, ids: np.ndarray, rows: np.ndarray) -> tuple[tf.Variable, tf.Variable]:
    """ids [n+1] and rows [n+1, D]: the table and, behind it, the default row."""
    if ids.ndim != 1 or rows.ndim != 2 or len(ids) != len(rows):
        raise ValueError(
            f"table {name!r} of an export has shapes {ids.shape} and {rows.shape}, wants ids [n] and rows [n, D]. "
            "Remedy: one row for each id."
        )
    if (ids[1:] <= ids[:-1]).any():  # a difference would overflow
        raise ValueError(
            f"table {name!r} of an export has ids that do not ascend, or repeat. Remedy: sorted ids, each once."
        )
    last = ids[-1:] if len(ids) else np.array([np.iinfo(np.int64).max])
    all_ids = np.concatenate([ids, last]).astype(np.int64)
    all_rows = np.concatenate([rows, np.zeros([1, rows.shape[1]], rows.dtype)])
    return (
        tf.Variable(all_ids, trainable=False, name=f"{name}_ids"),
        tf.Variable(all_rows, trainable=False, name=f"{name}_rows"),
    )
