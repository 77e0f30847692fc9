"""Rows that deltas changed while a server runs, in front of the rows that the server loaded.

Tables with equal dim and dtype form a group. A group's overlay holds entries (id, table), each a changed row or a
removed one, ascending by (id, table). A look-up searches the ids once for all tables of the group (find_entries).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model import applying


class Group(NamedTuple):
    """Tables that share an overlay: names in order, numbers of a row, dtype of a row as it is kept."""

    names: tuple[str, ...]
    dim: int
    dtype: tf.DType

    @property
    def columns(self) -> int:
        """Columns of a row as it is kept; see row_formats.py."""
        return self.dim + 4 if self.dtype == tf.int8 else self.dim

    def empty(self) -> Overlay:
        """An overlay without entries."""
        nothing = tf.zeros([0], tf.int64)
        rows = tf.zeros([0, self.columns], self.dtype)
        return Overlay.of(nothing, nothing, tf.zeros([0], tf.bool), rows)

    def specs(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of an overlay's tensors, by field."""
        many = tf.TensorSpec([None], tf.int64)
        alive, rows = tf.TensorSpec([None], tf.bool), tf.TensorSpec([None, self.columns], self.dtype)
        return [*Overlay(many, many, many, alive, rows)]


def groups_of(tables: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Groups the tables {name: {"dim", "dtype"}} of an export."""
    return [
        Group(names, tables[names[0]]["dim"], tf.as_dtype(tables[names[0]]["dtype"]))
        for names in applying.groups_of(tables)
    ]


def find_entries(
    entries: tf.Tensor, masks: tf.Tensor, ids: tf.Tensor, tables: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Searches sorted entries of a group; applying.joined describes them.

    Args:
      entries: <int64>[m+1].
      masks: <int>[m+1].
      ids, tables: <int64>[n].

    Returns:
      found: <bool>[n], whether (id, table) has an entry.
      at: <int64>[n], the entry's position, any in [0, m] where it has none.
    """
    first = tf.searchsorted(entries, ids, out_type=tf.int64)
    masks = tf.where(tf.gather(entries, first) == ids, tf.gather(masks, first), 0)
    bits = tf.bitwise.left_shift(tf.ones_like(masks), tf.cast(tables, masks.dtype))
    found = tf.bitwise.bitwise_and(masks, bits) != 0
    # The entries of an id are neighbours, so the lower bits lead from its first one to the table's own.
    lower = tf.raw_ops.PopulationCount(x=tf.bitwise.bitwise_and(masks, bits - 1))
    return found, first + tf.where(found, tf.cast(lower, tf.int64), 0)


class Overlay(NamedTuple):
    """Entries of one group.

    ids: <int64>[m+1], ascending by (id, table), then the largest int64.
    masks: <int64>[m+1], at the first entry of an id: bit t is set if table t has an entry for it; 0 elsewhere.
    tables: <int64>[m].
    alive: <bool>[m+1], False for a removed row and at the end.
    rows: <dtype>[m+1, D], zeros for a removed row and at the end.
    """

    ids: tf.Tensor
    masks: tf.Tensor
    tables: tf.Tensor
    alive: tf.Tensor
    rows: tf.Tensor

    @classmethod
    def of(cls, ids: tf.Tensor, tables: tf.Tensor, alive: tf.Tensor, rows: tf.Tensor) -> Overlay:
        """Sorts m entries, given in any order. The first of several entries for one (id, table) counts."""
        order = tf.argsort(tables, stable=True)
        order = tf.gather(order, tf.argsort(tf.gather(ids, order), stable=True))
        new_id = _differs_from_previous(tf.gather(ids, order))
        order = tf.boolean_mask(order, new_id | _differs_from_previous(tf.gather(tables, order)))
        ids, tables, alive, rows = (tf.gather(part, order) for part in (ids, tables, alive, rows))
        new_id = _differs_from_previous(ids)
        masks = tf.math.segment_sum(
            tf.bitwise.left_shift(tf.ones_like(tables), tables), tf.cumsum(tf.cast(new_id, tf.int64)) - 1
        )
        masks = tf.scatter_nd(tf.where(new_id), masks, tf.shape(ids, tf.int64) + 1)
        ids = tf.concat([ids, [tf.int64.max]], 0)
        return cls(ids, masks, tables, tf.pad(alive, [[0, 1]]), tf.pad(rows, [[0, 1], [0, 0]]))

    def after(self, ids: tf.Tensor, tables: tf.Tensor, alive: tf.Tensor, rows: tf.Tensor) -> Overlay:
        """The overlay after a delta with these entries."""
        newer = ids, tables, alive, rows
        older = self.ids[:-1], self.tables, self.alive[:-1], self.rows[:-1]
        return Overlay.of(*(tf.concat(parts, 0) for parts in zip(newer, older)))

    def find(self, ids: tf.Tensor, tables: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns whether (id, table) has an entry, and its position; see find_entries."""
        return find_entries(self.ids, self.masks, ids, tables)


def _differs_from_previous(values: tf.Tensor) -> tf.Tensor:
    """<bool>[n]: True at the first value and wherever a value differs from the one before."""
    return tf.concat([tf.ones_like(values[:1], tf.bool), values[1:] != values[:-1]], 0)
