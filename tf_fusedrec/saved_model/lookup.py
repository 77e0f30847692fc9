"""Look-ups of a served model: rows that deltas changed, before loaded rows, before initial rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Union

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model.native_tables import NativeTables
from tf_fusedrec.saved_model.overlay import Group, Overlay
from tf_fusedrec.saved_model.stock_initial_rows import InitialRows
from tf_fusedrec.saved_model.stock_tables import StockTables

ServedTables = Union[StockTables, NativeTables]
Found = tuple[tf.Tensor, tf.Tensor]


class Lookup:
    """Reads rows of a served model.

    Args:
      tables: The loaded rows.
      unknown: By table name, the initial rows of ids without a row; None: zeros.
      groups: All tables, by group.
    """

    def __init__(self, tables: ServedTables, unknown: Mapping[str, InitialRows | None], groups: Sequence[Group]):
        self._tables, self._unknown, self._groups = tables, unknown, groups
        self._overlays: Sequence[Overlay] = ()

    @contextlib.contextmanager
    def over(self, overlays: Sequence[Overlay]) -> Iterator[None]:
        """In this context look-ups read `overlays`, one per group, first."""
        self._overlays = overlays
        try:
            yield
        finally:
            self._overlays = ()

    def rows(self, asked: Sequence[tuple[str, tf.Tensor]]) -> list[tf.Tensor]:
        """Rows [n, D] for each table name and its ids <int64>[n]."""
        found = [self._tables.find(table, ids) for table, ids in asked]
        for group, overlay in zip(self._groups, self._overlays):
            members = [at for at, (table, _) in enumerate(asked) if table in group.names]
            if members:
                changed = _changed(group, overlay, [asked[at] for at in members], [found[at] for at in members])
                for at, piece in zip(members, changed):
                    found[at] = piece
        return [self._complete(table, ids, *of) for (table, ids), of in zip(asked, found)]

    def _complete(self, table: str, ids: tf.Tensor, rows: tf.Tensor, exists: tf.Tensor) -> tf.Tensor:
        """Replaces the rows of ids that do not exist by their initial rows."""
        initial = self._unknown.get(table)
        if initial is None:
            return rows

        def with_initial() -> tf.Tensor:
            missing = tf.where(~exists)
            return tf.tensor_scatter_nd_update(rows, missing, initial.of(tf.gather_nd(ids, missing)))

        # Most requests hold known ids only, and then nothing is drawn.
        return tf.cond(tf.reduce_all(exists), lambda: rows, with_initial)


def _changed(
    group: Group, overlay: Overlay, asked: Sequence[tuple[str, tf.Tensor]], found: Sequence[Found]
) -> list[Found]:
    """Replaces the rows of ids that have an entry in the overlay."""
    sizes = tf.stack([tf.size(ids) for _, ids in asked])
    tables = tf.repeat(tf.constant([group.names.index(table) for table, _ in asked], tf.int64), sizes)
    changed, at = overlay.find(tf.concat([ids for _, ids in asked], 0), tables)

    def replaced() -> list[tf.Tensor]:
        outputs = []
        for (rows, exists), mine, where in zip(found, tf.split(changed, sizes), tf.split(at, sizes)):
            where = tf.where(mine, where, 0)  # The overlay has an entry here, because some id has one.
            new = tf.cast(tf.gather(overlay.rows, where), rows.dtype)
            outputs += [tf.where(mine[:, tf.newaxis], new, rows)]
            outputs += [tf.where(mine, tf.gather(overlay.alive, where), exists)]
        return outputs

    # Before the first delta no id has an entry.
    outputs = tf.cond(tf.reduce_any(changed), replaced, lambda: [tensor for of in found for tensor in of])
    return list(zip(outputs[::2], outputs[1::2]))
