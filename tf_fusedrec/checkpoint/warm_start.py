"""Warm start: loads rows from NumPy arrays or Parquet into a table, with fresh optimizer slots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.checkpoint.layers import saved_embeddings
from tf_fusedrec.checkpoint.saving import keeps_changes
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange.topology import RankLayout
from tf_fusedrec.files.hash_order import OWNERS
from tf_fusedrec.files.manifest import unpack_clock
from tf_fusedrec.tables.records import put_numbers

if TYPE_CHECKING:
    import pyarrow as pa


def warm_start(
    model: keras.Model | FusedEmbedding,
    table: str,
    ids: np.ndarray | str | os.PathLike,
    rows: np.ndarray | None = None,
    *,
    id_column: str = "id",
    row_column: str = "row",
) -> int:
    """Sets rows of one table. Their optimizer slots start like the slots of new rows. Not collective.

    In a callback of fit, all ranks must call it, because a schedule then restarts its work on coming batches. Every
    rank keeps only the ids that it owns, so callers may pass all rows to all ranks. Rows of other ids stay.

    Args:
      model: Model with a FusedEmbedding layer that has the table, or the layer itself.
      table: Name of the table.
      ids: <int64>[n], distinct; or the path of a Parquet file of ids and rows, which is read by row group.
      rows: <float>[n, D], finite; rounded to the table's dtype. None with a file.
      id_column: Name of the file's column of integer ids, distinct in the whole file.
      row_column: Name of the file's column of lists, or fixed-size lists, of D floats.

    Returns:
      Number of rows that this rank kept.

    Raises:
      ValueError: the table is unknown; shapes or dtypes are wrong; ids repeat; a number is not finite; a file comes
        with rows, lacks a column or has null values. Row groups before the refused one stay set.

    Examples:
      >>> fr.checkpoint.warm_start(model, "item", np.array([1, 2]), np.zeros([2, 4], "float32"))
      2
      >>> import pyarrow.parquet
      >>> rows = pyarrow.table({"id": [1, 2], "row": [[0.0] * 4, [1.0] * 4]})
      >>> pyarrow.parquet.write_table(rows, "rows.parquet")
      >>> fr.checkpoint.warm_start(model, "item", "rows.parquet")
      2
    """
    layout, backend = _find_table(model, table)
    if not isinstance(ids, (str, os.PathLike)):
        return _set_rows(layout, backend, table, np.asarray(ids), np.asarray(rows))
    if rows is not None:
        raise ValueError(
            f"rows must be None with the file {os.fspath(ids)}, got an array. Use an array of ids, or no rows."
        )
    groups = _row_groups(ids, id_column, row_column, backend.spec(table)["dim"])
    return sum(_set_rows(layout, backend, table, *group) for group in groups)


def _set_rows(layout: RankLayout, backend: Any, table: str, ids: np.ndarray, rows: np.ndarray) -> int:
    dim = backend.spec(table)["dim"]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"ids of table {table!r} are {ids.dtype} {list(ids.shape)}, want integers [n]. Cast them.")
    if rows.shape != (len(ids), dim) or rows.dtype.kind not in "fV":
        raise ValueError(
            f"rows of table {table!r} are {rows.dtype} {list(rows.shape)}, want floats [{len(ids)}, {dim}]. Pass one "
            "row for each id."
        )
    if len(np.unique(ids)) < len(ids):
        raise ValueError(
            f"ids of table {table!r} have {len(ids) - len(np.unique(ids))} repeats, but must be distinct. Keep one row "
            "for each id."
        )
    ids, rows = ids.astype(np.int64), rows.astype(np.float32)
    if not np.isfinite(rows).all():
        raise ValueError(
            f"the row of id {ids[~np.isfinite(rows).all(axis=1)][0]} of table {table!r} is not finite, but must be. "
            "Leave it out."
        )
    kept = OWNERS[backend.owner](ids, layout.group.size) == layout.group.index
    records = backend.new_records(table, int(kept.sum()))
    put_numbers(records, "row", rows[kept])
    if keeps_changes(backend):
        # The rows count as changed and looked up at this moment, for deltas and for eviction.
        changes, lookups = unpack_clock(backend.clock)
        records["updated"], records["last"] = changes + 1, lookups
    backend.restore(table, "rows", ids[kept], records)
    return len(records)


def _row_groups(
    path: str | os.PathLike, id_column: str, row_column: str, dim: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the ids and the rows of each row group of a Parquet file."""
    import pyarrow.parquet as pq  # not with `import tf_fusedrec`

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        for column in (id_column, row_column):
            if column not in names:
                raise ValueError(f"{os.fspath(path)} has no column {column!r}; it has {names}. Name one of them.")
        for group in range(file.num_row_groups):
            columns = file.read_row_group(group, columns=[id_column, row_column])
            ids, rows = columns[id_column].combine_chunks(), columns[row_column].combine_chunks()
            _check_columns(path, ids, rows, dim)
            yield ids.to_numpy(), rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), dim)


def _check_columns(path: str | os.PathLike, ids: pa.Array, rows: pa.Array, dim: int) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = pa.types.is_list(rows.type) or pa.types.is_large_list(rows.type) or pa.types.is_fixed_size_list(rows.type)
    if not lists or not pa.types.is_floating(rows.type.value_type):
        raise ValueError(f"Rows of {os.fspath(path)} are {rows.type}, want lists of floats. Name another column.")
    if ids.null_count or rows.null_count or rows.flatten().null_count:
        raise ValueError(f"{os.fspath(path)} has null values among its ids or rows. Leave those rows out.")
    lengths = np.unique(pc.list_value_length(rows).to_numpy(zero_copy_only=False)).tolist()
    if lengths not in ([], [dim]):
        raise ValueError(
            f"Rows of {os.fspath(path)} have {lengths} numbers, want {dim}. Write rows of the table's dim."
        )


def _find_table(model: keras.Model | FusedEmbedding, table: str) -> tuple[RankLayout, Any]:
    """This rank's layout in the topology of a table, and the table's backend."""
    layers = saved_embeddings(model)
    for layer in layers:
        for group in layer.internals.groups:
            if table in group.table.names:
                return layer.layout, group.table
    known = sorted(name for layer in layers for name in layer.optimizers)
    raise ValueError(f"{model.name!r} has no table {table!r}. It has {known}. Name one of them.")
