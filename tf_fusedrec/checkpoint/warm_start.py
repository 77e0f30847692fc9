"""Rows from elsewhere: NumPy arrays or Parquet of (id, row) become rows of a table that no optimizer has seen yet."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint.layers import embeddings_of
from tf_fusedrec.checkpoint.saving import counters, keeps_changes
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange.topology import Place
from tf_fusedrec.tables.hash_order import hash_range_owner
from tf_fusedrec.tables.tfra import owner_of


def warm_start(model: keras.Model | FusedEmbedding, table: str, ids: np.ndarray, rows: np.ndarray) -> int:
    """Sets rows of one table; their optimizer slots start as those of new rows. Not collective.

    Every rank keeps the ids that it owns, so all ranks may be given all rows, or each its own. Rows of other ids stay.

    Args:
      model: the table is one of its FusedEmbedding layers'; or that layer.
      table: name of the table.
      ids: <int64>[n], distinct.
      rows: <float>[n, D], finite; rounded to the table's dtype.

    Returns:
      How many rows this rank has taken.

    Raises:
      ValueError: an unknown table, other shapes or types, ids that repeat, numbers that are not finite.
    """
    place, backend = _held(model, table)
    ids, rows = np.asarray(ids), np.asarray(rows)
    dim = backend.spec(table)["dim"]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"ids of table {table!r} must be integers [n], got {ids.dtype} {list(ids.shape)}.")
    if rows.shape != (len(ids), dim) or rows.dtype.kind not in "fV":
        raise ValueError(
            f"rows of table {table!r} must be floats [{len(ids)}, {dim}], got {rows.dtype} {list(rows.shape)}."
        )
    if len(np.unique(ids)) < len(ids):
        raise ValueError(f"ids of table {table!r} must be distinct, got {len(ids) - len(np.unique(ids))} repeats.")
    ids, rows = ids.astype(np.int64), rows.astype(np.float32)
    if not np.isfinite(rows).all():
        raise ValueError(f"rows of table {table!r} must be finite, but that of id {ids[_first_bad(rows)]} is not.")
    owner = owner_of if backend.owner == "tfra" else hash_range_owner
    mine = owner(ids, place.group.size) == place.group.index
    records = backend.new_records(table, int(mine.sum()))
    if records["row"].dtype == "<u2":
        records["row"] = rows[mine].astype(tf.bfloat16.as_numpy_dtype).view(np.uint16)
    else:
        records["row"] = rows[mine]
    if keeps_changes(backend):
        # They are as new from now on: a delta has them, and eviction counts from here.
        changes, lookups = counters(backend.clock)
        records["updated"], records["last"] = changes + 1, lookups
    backend.restore(table, "rows", ids[mine], records)
    return len(records)


def _first_bad(rows: np.ndarray) -> int:
    return int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])


def warm_start_parquet(
    model: keras.Model | FusedEmbedding,
    table: str,
    path: str | os.PathLike,
    *,
    id_column: str = "id",
    row_column: str = "row",
) -> int:
    """Sets rows of one table from a Parquet file, one row group at a time. Not collective; see warm_start.

    Args:
      model: the table is one of its FusedEmbedding layers'; or that layer.
      table: name of the table.
      path: of the file; every rank reads all of it.
      id_column: of integers, distinct in the whole file.
      row_column: of lists (or fixed-size lists) of D floats.

    Returns:
      How many rows this rank has taken.

    Raises:
      ValueError: columns that are missing or of other types, null values, rows of other lengths; all that warm_start
        refuses. Row groups before the one that is refused have been set.
    """
    dim = _held(model, table)[1].spec(table)["dim"]
    taken = 0
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        for column in (id_column, row_column):
            if column not in names:
                raise ValueError(f"{os.fspath(path)} has no column {column!r}; it has {names}.")
        for group in range(file.num_row_groups):
            columns = file.read_row_group(group, columns=[id_column, row_column])
            ids, rows = columns[id_column].combine_chunks(), columns[row_column].combine_chunks()
            _check_columns(path, ids, rows, dim)
            values = rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), dim)
            taken += warm_start(model, table, ids.to_numpy(), values)
    return taken


def _check_columns(path: str | os.PathLike, ids: pa.Array, rows: pa.Array, dim: int) -> None:
    lists = pa.types.is_list(rows.type) or pa.types.is_large_list(rows.type) or pa.types.is_fixed_size_list(rows.type)
    if not lists or not pa.types.is_floating(rows.type.value_type):
        raise ValueError(f"Rows of {os.fspath(path)} must be lists of floats, got {rows.type}.")
    if ids.null_count or rows.null_count or rows.flatten().null_count:
        raise ValueError(f"{os.fspath(path)} has null values among its ids or rows.")
    lengths = np.unique(pc.list_value_length(rows).to_numpy(zero_copy_only=False)).tolist()
    if lengths not in ([], [dim]):
        raise ValueError(f"Rows of {os.fspath(path)} must have {dim} numbers each, got {lengths}.")


def _held(model: keras.Model | FusedEmbedding, table: str) -> tuple[Place, Any]:
    """Where this process stands in the topology of a table, and the table's backend."""
    layers = embeddings_of(model)
    for layer in layers:
        for lookup in layer.lookups:
            if table in lookup.table.names:
                return layer.place, lookup.table
    known = sorted(name for layer in layers for name in layer.optimizers)
    raise ValueError(f"{model.name!r} has no table {table!r}. Known tables: {known}.")
