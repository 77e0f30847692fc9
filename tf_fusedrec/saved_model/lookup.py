"""Look-ups of a served model: rows that deltas changed, before loaded rows, before initial rows.

The ids of all features whose tables share a group are looked up together. The number of operations does not grow with
the number of tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model.native_tables import NativeTables
from tf_fusedrec.saved_model.overlay import Group, Overlay
from tf_fusedrec.saved_model.row_formats import decoded
from tf_fusedrec.saved_model.stock_initial_rows import InitialRows, drawn_rows
from tf_fusedrec.saved_model.stock_tables import StockTables

ServedTables = StockTables | NativeTables


class Lookup:
    """Reads rows of a served model.

    Args:
      tables: The loaded rows.
      unknown: By table name, the initial rows of ids without a row; None: zeros.
      groups: All tables, by group.
      dtypes: By table name, dtype of the rows that the model gets.
    """

    def __init__(
        self,
        tables: ServedTables,
        unknown: Mapping[str, InitialRows | None],
        groups: Sequence[Group],
        dtypes: Mapping[str, str],
    ):
        self._tables, self._unknown, self._groups, self._dtypes = tables, unknown, groups, dtypes
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
        outputs: dict[int, tf.Tensor] = {}
        for number, group in enumerate(self._groups):
            members = [at for at, (table, _) in enumerate(asked) if table in group.names]
            if members:
                outputs.update(zip(members, self._of_group(number, [asked[at] for at in members])))
        return [tf.cast(outputs[at], self._dtypes[table]) for at, (table, _) in enumerate(asked)]

    def _of_group(self, number: int, asked: Sequence[tuple[str, tf.Tensor]]) -> Sequence[tf.Tensor]:
        group, overlay = self._groups[number], self._overlays[number]
        ids, sizes = tf.concat([ids for _, ids in asked], 0), tf.stack([tf.size(ids) for _, ids in asked])
        names = tf.constant([group.names.index(table) for table, _ in asked], tf.int64)
        # tf.repeat takes four times the operations.
        part = tf.raw_ops.UpperBound(sorted_inputs=[tf.cumsum(sizes)], values=[tf.range(tf.size(ids))])[0]
        tables = tf.gather(names, part)
        rows, exists = self._tables.find(number, asked, ids, tables)
        changed, at = overlay.find(ids, tables)

        def replaced() -> tuple[tf.Tensor, tf.Tensor]:
            new, alive = tf.gather(overlay.rows, at), tf.gather(overlay.alive, at)
            return tf.where(changed[:, tf.newaxis], new, rows), tf.where(changed, alive, exists)

        # Before the first delta no id has an entry.
        rows, exists = tf.cond(tf.reduce_any(changed), replaced, lambda: (rows, exists))
        return tf.split(self._complete(group, ids, tables, decoded(rows, group.dim), exists), sizes)

    def _complete(
        self, group: Group, ids: tf.Tensor, tables: tf.Tensor, rows: tf.Tensor, exists: tf.Tensor
    ) -> tf.Tensor:
        """Replaces the rows of ids that do not exist by their initial rows."""
        unknown = [self._unknown.get(name) for name in group.names]
        drawn = [initial is not None for initial in unknown]
        if not any(drawn):
            return rows
        missing = ~exists if all(drawn) else ~exists & tf.gather(tf.constant(drawn), tables)

        def with_initial() -> tf.Tensor:
            places = tf.where(missing)
            initial = drawn_rows(unknown, tf.gather_nd(ids, places), tf.gather_nd(tables, places))
            return tf.tensor_scatter_nd_update(rows, places, tf.cast(initial, rows.dtype))

        # Most requests hold known ids only, and then nothing is drawn.
        return tf.cond(tf.reduce_any(missing), with_initial, lambda: rows)
