"""Served tables by stock TensorFlow ops: the sorted entries of each group of tables, found by one binary search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.overlay import Group, find_entries


class StockTables(tf.Module):
    """Constant tables of a SavedModel.

    Args:
      tables: By table name, ids <int64>[n], ascending, and rows [n, D].
      groups: All tables, by group.

    Raises:
      ValueError: ids do not ascend, or the number of rows differs from the number of ids.
    """

    def __init__(self, tables: Mapping[str, tuple[np.ndarray, np.ndarray]], groups: Sequence[Group]):
        super().__init__(name="tables")
        for name, (ids, rows) in tables.items():
            _check(name, ids, rows)
        self._tables = [_variables(number, [tables[name] for name in of.names]) for number, of in enumerate(groups)]

    def find(
        self, group: int, asked: Sequence[tuple[str, tf.Tensor]], ids: tf.Tensor, tables: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Looks up ids of the tables of one group.

        Args:
          group: Number of the group.
          asked: Not read. NativeTables.find reads it.
          ids, tables: <int64>[n], ids and the positions of their tables in the group.

        Returns:
          Rows [n, D], zeros where the table lacks the id, and whether the table has it, <bool>[n].
        """
        entries, masks, rows = self._tables[group]
        exists, at = find_entries(entries, masks, ids, tables)
        zeros = tf.shape(rows, tf.int64)[0] - 1  # position of the default row
        return tf.gather(rows, tf.where(exists, at, zeros)), exists


def _variables(number: int, tables: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[tf.Variable, ...]:
    parts = zip(("ids", "masks", "rows"), applying.joined(tables))
    return tuple(tf.Variable(part, trainable=False, name=f"group{number}_{name}") for name, part in parts)


def _check(name: str, ids: np.ndarray, rows: np.ndarray) -> None:
    if ids.ndim != 1 or rows.ndim != 2 or len(ids) != len(rows):
        raise ValueError(
            f"table {name!r} of an export has shapes {ids.shape} and {rows.shape}, want ids [n] and rows [n, D]. "
            "Remedy: one row for each id."
        )
    if (ids[1:] <= ids[:-1]).any():  # np.diff could overflow.
        raise ValueError(
            f"table {name!r} of an export has ids that repeat or do not ascend. Remedy: sorted, distinct ids."
        )
