"""Rows that deltas changed while a server runs, in front of the rows that the server loaded.

Tables with equal dim and dtype form a group. A group's overlay holds entries (id, table), each a changed row or a
removed one, ascending by (id, table). A look-up searches the distinct ids once for all tables of the group. A bit mask
per id tells which tables have an entry for it. The entries of an id are neighbours, so the number of lower bits in the
mask leads from the first one to the table's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import tf

_MOST_TABLES = 64  # bits of a mask


class Group(NamedTuple):
    """Tables that share an overlay: names in order, columns of a row, dtype of a row."""

    names: tuple[str, ...]
    dim: int
    dtype: tf.DType

    def empty(self) -> Overlay:
        """An overlay without entries."""
        nothing = tf.zeros([0], tf.int64)
        rows = tf.zeros([0, self.dim], self.dtype)
        return Overlay.of(nothing, nothing, tf.zeros([0], tf.bool), rows)

    def specs(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of an overlay's tensors, by field."""
        many = tf.TensorSpec([None], tf.int64)
        alive, rows = tf.TensorSpec([None], tf.bool), tf.TensorSpec([None, self.dim], self.dtype)
        return [*Overlay(many, many, many, many, many, alive, rows)]


def groups_of(tables: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Groups the tables {name: {"dim", "dtype"}} of an export."""
    by_form: dict[tuple[int, str], list[str]] = {}
    for name, table in tables.items():
        by_form.setdefault((table["dim"], table["dtype"]), []).append(name)
    return [
        Group(tuple(names[at : at + _MOST_TABLES]), dim, tf.as_dtype(dtype))
        for (dim, dtype), names in by_form.items()
        for at in range(0, len(names), _MOST_TABLES)
    ]


class Overlay(NamedTuple):
    """Entries of one group, with the index of their ids.

    distinct: <int64>[U+1], ascending: ids that have entries, then the largest int64.
    masks: <int64>[U+1]: bit t is set if table t has an entry for the id; 0 at the end.
    first: <int64>[U+1]: position of the id's first entry.
    ids, tables: <int64>[m], ascending by (id, table).
    alive: <bool>[m], False for a removed row.
    rows: <dtype>[m, D], zeros for a removed row.
    """

    distinct: tf.Tensor
    masks: tf.Tensor
    first: tf.Tensor
    ids: tf.Tensor
    tables: tf.Tensor
    alive: tf.Tensor
    rows: tf.Tensor

    @classmethod
    def of(cls, ids: tf.Tensor, tables: tf.Tensor, alive: tf.Tensor, rows: tf.Tensor) -> Overlay:
        """Indexes entries in any order. The first of several entries for one (id, table) counts."""
        order = tf.argsort(tables, stable=True)
        order = tf.gather(order, tf.argsort(tf.gather(ids, order), stable=True))
        new_id = _differs_from_previous(tf.gather(ids, order))
        order = tf.boolean_mask(order, new_id | _differs_from_previous(tf.gather(tables, order)))
        ids, tables, alive, rows = (tf.gather(part, order) for part in (ids, tables, alive, rows))
        new_id = _differs_from_previous(ids)
        first = tf.where(new_id)[:, 0]
        masks = tf.math.segment_sum(
            tf.bitwise.left_shift(tf.ones_like(tables), tables), tf.cumsum(tf.cast(new_id, tf.int64)) - 1
        )
        distinct = tf.concat([tf.gather(ids, first), [tf.int64.max]], 0)
        masks, first = (tf.concat([part, [0]], 0) for part in (masks, first))
        return cls(distinct, masks, first, ids, tables, alive, rows)

    def after(self, ids: tf.Tensor, tables: tf.Tensor, alive: tf.Tensor, rows: tf.Tensor) -> Overlay:
        """The overlay after a delta with these entries."""
        newer = ids, tables, alive, rows
        older = self.ids, self.tables, self.alive, self.rows
        return Overlay.of(*(tf.concat(parts, 0) for parts in zip(newer, older)))

    def find(self, ids: tf.Tensor, tables: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether (id, table) has an entry, <bool>[n], and its position <int64>[n], any where it has none."""
        at = tf.searchsorted(self.distinct, ids, out_type=tf.int64)
        masks = tf.where(tf.gather(self.distinct, at) == ids, tf.gather(self.masks, at), 0)
        bits = tf.bitwise.left_shift(tf.ones_like(tables), tables)
        lower = tf.raw_ops.PopulationCount(x=tf.bitwise.bitwise_and(masks, bits - 1))
        found = tf.bitwise.bitwise_and(masks, bits) != 0
        return found, tf.gather(self.first, at) + tf.cast(lower, tf.int64)


def _differs_from_previous(values: tf.Tensor) -> tf.Tensor:
    """<bool>[n]: True at the first value and wherever a value differs from the one before."""
    return tf.concat([tf.ones_like(values[:1], tf.bool), values[1:] != values[:-1]], 0)
