"""Lookups of a served model: rows that deltas changed, before loaded rows, before initial rows.

Tables with equal dim and dtype form a group. The ids of all features whose tables share a group are looked up together,
so the number of operations does not grow with the number of tables. The loaded rows are sorted entries (StockTables) or
a hash table (native_tables.py). An Overlay has the rows that deltas changed while the server runs.

A server can keep rows in fewer bytes: bfloat16, or int8 with a scale per row. A row of D numbers has D + 4 bytes in
int8: the numbers in units of the scale, then the scale <float32>, little-endian. The scale is the largest absolute
value of the row over 127. A number differs from its float32 value by at most half the scale, apart from the rounding of
float32. Overlays, deltas and digests treat all bytes of a row as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.native_tables import NativeTables
from tf_fusedrec.saved_model.stock_initial_rows import InitialRows, drawn_rows

ROWS = (None, "bfloat16", "int8")
_STEPS = 127  # in the largest number of a row


class Lookup:
    """Reads rows of a served model, in the dtype that `dtypes` gives each table.

    An id without a row in `tables` has the initial row of `unknown`, or zeros where that is None.
    """

    def __init__(
        self,
        tables: StockTables | NativeTables,
        unknown: Mapping[str, InitialRows | None],
        groups: Sequence[Group],
        dtypes: Mapping[str, str],
    ):
        self._tables, self._unknown, self._groups, self._dtypes = tables, unknown, groups, dtypes
        self._overlays: Sequence[Overlay] = ()

    @contextlib.contextmanager
    def over(self, overlays: Sequence[Overlay]) -> Iterator[None]:
        """In this context lookups read `overlays`, one per group, first."""
        self._overlays = overlays
        try:
            yield
        finally:
            self._overlays = ()

    def rows(self, requests: Sequence[tuple[str, tf.Tensor]]) -> list[tf.Tensor]:
        """Rows [n, D] for each table name and its ids <int64>[n]."""
        outputs: dict[int, tf.Tensor] = {}
        for number, group in enumerate(self._groups):
            members = [at for at, (table, _) in enumerate(requests) if table in group.names]
            if members:
                outputs.update(zip(members, self._group_rows(number, [requests[at] for at in members])))
        return [tf.cast(outputs[at], self._dtypes[table]) for at, (table, _) in enumerate(requests)]

    def _group_rows(self, number: int, requests: Sequence[tuple[str, tf.Tensor]]) -> Sequence[tf.Tensor]:
        group, overlay = self._groups[number], self._overlays[number]
        group_ids = GroupIds.of(group, requests)
        rows, exists = self._tables.find(number, group_ids)

        def over() -> tuple[tf.Tensor, tf.Tensor]:
            changed, at = overlay.find(group_ids.ids, group_ids.tables())
            new, alive = decoded(tf.gather(overlay.rows, at)), tf.gather(overlay.alive, at)
            return tf.where(changed[:, tf.newaxis], new, rows), tf.where(changed, alive, exists)

        # Before the first delta no id has an entry.
        rows, exists = tf.cond(tf.size(overlay.tables) > 0, over, lambda: (rows, exists))
        return tf.split(self._with_initial(group, group_ids, rows, exists), group_ids.sizes)

    def _with_initial(self, group: Group, group_ids: GroupIds, rows: tf.Tensor, exists: tf.Tensor) -> tf.Tensor:
        """Replaces the rows of ids that do not exist by their initial rows."""
        unknown = [self._unknown.get(name) for name in group.names]
        drawn = [initial is not None for initial in unknown]
        if not any(drawn):
            return rows

        def with_initial() -> tf.Tensor:
            tables = group_ids.tables()
            missing = ~exists if all(drawn) else ~exists & tf.gather(tf.constant(drawn), tables)
            places = tf.where(missing)
            initial = drawn_rows(unknown, tf.gather_nd(group_ids.ids, places), tf.gather_nd(tables, places))
            return tf.tensor_scatter_nd_update(rows, places, tf.cast(initial, rows.dtype))

        # Most requests have known ids only, and then nothing is drawn.
        return tf.cond(tf.reduce_all(exists), lambda: rows, with_initial)


class GroupIds(NamedTuple):
    """The ids of all requests of a group."""

    requests: Sequence[tuple[str, tf.Tensor]]  # the table of each, and its ids
    ids: tf.Tensor  # <int64>[n], of all
    sizes: tf.Tensor  # <int32>[r], ids of each request
    names: tf.Tensor  # <int64>[r], the position of each request's table in the group

    @classmethod
    def of(cls, group: Group, requests: Sequence[tuple[str, tf.Tensor]]) -> GroupIds:
        names = [group.names.index(table) for table, _ in requests]
        sizes = tf.stack([tf.size(ids) for _, ids in requests])
        return cls(requests, tf.concat([ids for _, ids in requests], 0), sizes, tf.constant(names, tf.int64))

    def tables(self) -> tf.Tensor:
        """The position of each id's table in the group, <int64>[n]."""
        # tf.repeat takes four times the operations.
        ends, places = tf.cumsum(self.sizes), tf.range(tf.size(self.ids))
        return tf.gather(self.names, tf.raw_ops.UpperBound(sorted_inputs=[ends], values=[places])[0])


class Group(NamedTuple):
    """Tables that share an overlay: names in order, numbers of a row, dtype of a row as it is kept."""

    names: tuple[str, ...]
    dim: int
    dtype: tf.DType

    @property
    def columns(self) -> int:
        """Columns of a row as it is kept."""
        return applying.row_bytes(self.dim, self.dtype.name) // self.dtype.size

    def empty(self) -> Overlay:
        """An overlay without entries."""
        nothing = tf.zeros([0], tf.int64)
        rows = tf.zeros([0, self.columns], self.dtype)
        return Overlay.of(nothing, nothing, tf.zeros([0], tf.bool), rows)

    def specs(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of an overlay's tensors, by field."""
        ints = tf.TensorSpec([None], tf.int64)
        alive, rows = tf.TensorSpec([None], tf.bool), tf.TensorSpec([None, self.columns], self.dtype)
        return [*Overlay(ints, ints, ints, alive, rows)]


def groups_of(tables: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Groups the tables {name: {"dim", "dtype"}} of an export."""
    return [
        Group(names, tables[names[0]]["dim"], tf.as_dtype(tables[names[0]]["dtype"]))
        for names in applying.groups_of(tables)
    ]


def find_entries(
    entries: tf.Tensor, masks: tf.Tensor, ids: tf.Tensor, tables: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Searches the entries and masks [m+1] of a group (applying.joined) for ids and their tables, <int64>[n].

    Returns whether (id, table) has an entry, <bool>[n], and its position <int64>[n], any in [0, m] where it has none.
    """
    first = tf.searchsorted(entries, ids, out_type=tf.int64)
    masks = tf.where(tf.gather(entries, first) == ids, tf.gather(masks, first), 0)
    bits = tf.bitwise.left_shift(tf.ones_like(masks), tf.cast(tables, masks.dtype))
    exists = tf.bitwise.bitwise_and(masks, bits) != 0
    # The entries of an id are neighbors, so the lower bits lead from its first entry to that of the table.
    lower = tf.raw_ops.PopulationCount(x=tf.bitwise.bitwise_and(masks, bits - 1))
    return exists, first + tf.where(exists, tf.cast(lower, tf.int64), 0)


class Overlay(NamedTuple):
    """Changed and removed rows of one group: m entries, ascending by (id, table)."""

    ids: tf.Tensor  # <int64>[m+1], then the largest int64
    masks: tf.Tensor  # <int64>[m+1], at the first entry of an id: bit t is set if table t has an entry; 0 elsewhere
    tables: tf.Tensor  # <int64>[m]
    alive: tf.Tensor  # <bool>[m+1], False for a removed row and at the end
    rows: tf.Tensor  # <dtype>[m+1, D], zeros for a removed row and at the end

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
        older = self.ids[:-1], self.tables, self.alive[:-1], self.rows[:-1]
        return Overlay.of(*(tf.concat(parts, 0) for parts in zip((ids, tables, alive, rows), older)))

    def find(self, ids: tf.Tensor, tables: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns whether (id, table) has an entry, and its position; see find_entries."""
        return find_entries(self.ids, self.masks, ids, tables)


def _differs_from_previous(values: tf.Tensor) -> tf.Tensor:
    """<bool>[n]: True at the first value and wherever a value differs from the one before."""
    return tf.concat([tf.ones_like(values[:1], tf.bool), values[1:] != values[:-1]], 0)


class StockTables(tf.Module):
    """Constant tables of a SavedModel, by stock ops: sorted entries of each group, found by one binary search.

    tables: By table name, ids <int64>[n], ascending, and rows [n, D].
    """

    def __init__(self, tables: Mapping[str, tuple[np.ndarray, np.ndarray]], groups: Sequence[Group]):
        super().__init__(name="tables")
        for name, (ids, _) in tables.items():
            if (ids[1:] <= ids[:-1]).any():  # np.diff could overflow.
                raise ValueError(
                    f"table {name!r} of an export has ids that repeat or do not ascend. Use sorted, distinct ids."
                )
        self._tables = [
            tuple(
                tf.Variable(part, trainable=False, name=f"group{number}_{name}")
                for name, part in zip(("ids", "masks", "rows"), applying.joined([tables[t] for t in group.names]))
            )
            for number, group in enumerate(groups)
        ]

    def find(self, group: int, group_ids: GroupIds) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows [n, D] and whether their tables have them, <bool>[n]. The row of a missing id is zero."""
        entries, masks, rows = self._tables[group]
        exists, at = find_entries(entries, masks, group_ids.ids, group_ids.tables())
        zeros = tf.shape(rows, tf.int64)[0] - 1  # position of the default row
        return decoded(tf.gather(rows, tf.where(exists, at, zeros))), exists


def encoded(table: str, ids: np.ndarray, rows: np.ndarray, dtype: str) -> np.ndarray:
    """Rows [n, D] of ids <int64>[n] in `dtype`: <dtype>[n, D], or <int8>[n, D+4]. They must be finite in that dtype."""
    numbers = rows.astype(np.float32 if dtype == "int8" else tf.as_dtype(dtype).as_numpy_dtype)
    bad = ~np.isfinite(numbers).all(axis=1)
    if bad.any():
        raise ValueError(
            f"table {table!r} has {int(bad.sum())} rows that are not finite in {numbers.dtype.name}, the first of id "
            f"{ids[bad][0]}. Load an earlier save (checkpoint.saves lists them), and look for the cause, such "
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


def decoded(rows: tf.Tensor) -> tf.Tensor:
    """The numbers [n, D] of encoded rows, in their dtype; <float32> for int8, with D + 4 columns."""
    if rows.dtype != tf.int8:
        return rows
    dim = rows.shape[1] - applying.SCALE_BYTES
    scales = tf.bitcast(rows[:, dim:], tf.float32)
    return tf.cast(rows[:, :dim], tf.float32) * scales[:, tf.newaxis]
