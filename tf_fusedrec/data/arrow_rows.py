"""Converts Arrow record batches to Rows, without copies where rows stay whole, and checks every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_fusedrec.data.bad_input import BadInput
from tf_fusedrec.data.columns import Column
from tf_fusedrec.data.fingerprint import fingerprint_arrow
from tf_fusedrec.data.rows import Ragged, Rows, Values, splits_of

GOOD = "\0good"  # extra column <bool>[B] under policy "skip": False for a skipped row


def rows_from_arrow(
    batch: pa.RecordBatch,
    columns: Sequence[Column],
    where: str,
    bad: BadInput,
    *,
    first_row: int = 0,
    partitions: Mapping[str, str] | None = None,
) -> Rows:
    """Converts a record batch to Rows. A skipped row has no values, and False in the column GOOD.

    Args:
      batch: Record batch with the columns, except the columns of `partitions`.
      columns: Columns to convert.
      where: File and row group, for messages.
      bad: Handler of nulls, and of aligned columns whose rows differ in length.
      first_row: Number of the batch's first row in the row group.
      partitions: Column values given by the file's folders.
    """
    stored = [column for column in columns if batch.schema.get_field_index(column.name) >= 0]
    good = _good_rows(batch, stored, where, bad, first_row)
    if good is not None:
        batch = batch.filter(pa.array(good))
    values: dict[str, Values] = {}
    for column in columns:
        if column in stored:
            values[column.name] = _to_numpy(batch.column(column.name), column)
        else:
            values[column.name] = _repeated((partitions or {})[column.name], column, batch.num_rows)
    rows = Rows(values, batch.num_rows)
    if not bad.skips:
        return rows
    if good is None:
        return Rows({**values, GOOD: np.ones(rows.num_rows, bool)}, rows.num_rows)
    return _spread(rows, good)


def empty_rows(columns: Sequence[Column], num_rows: int = 0) -> Rows:
    """Rows with empty lists and zeros, such as the batch of a rank without further rows."""
    values: dict[str, Values] = {}
    for column in columns:
        if column.ragged:
            values[column.name] = Ragged(np.empty(0, column.value_dtype), np.zeros(num_rows + 1, np.int64))
        else:
            values[column.name] = np.zeros(num_rows, column.value_dtype)
    return Rows(values, num_rows)


def skipped_rows(columns: Sequence[Column], num_rows: int) -> Rows:
    """Rows that could not be read, in the form of rows_from_arrow's skipped rows."""
    return Rows({**empty_rows(columns, num_rows).columns, GOOD: np.zeros(num_rows, bool)}, num_rows)


def _good_rows(
    batch: pa.RecordBatch, columns: Sequence[Column], where: str, bad: BadInput, first_row: int
) -> np.ndarray | None:
    """<bool>[B] mask, False for rows to skip; None if all rows are good."""
    good = np.ones(batch.num_rows, bool)

    def refuse(rows: np.ndarray, fault: str) -> None:
        good[rows] = False
        numbers = (first_row + np.flatnonzero(rows)).tolist()
        bad.handle(where, f"{fault} Row {numbers[0]} is the first.", numbers)

    remedy = "Write a default value instead of null (an id, 0.0, or an empty list)."
    for column in columns:
        array = batch.column(column.name)
        prefix = f"column {column.name!r} has"
        if array.null_count:
            nulls = array.is_null().to_numpy(zero_copy_only=False)
            kind = "null rows" if column.ragged else "null values"
            refuse(nulls, f"{prefix} {int(nulls.sum())} {kind}. {remedy}")
        if column.ragged and array.values.null_count:
            values = array.flatten()  # Values of null rows do not count.
            if values.null_count:
                inside = pc.list_parent_indices(array).to_numpy()[values.is_null().to_numpy(zero_copy_only=False)]
                nulls = np.bincount(inside, minlength=len(array)).astype(bool)
                refuse(nulls, f"{prefix} {values.null_count} null values inside its lists. {remedy}")
    for column in columns:
        if column.aligned_with is not None and batch.schema.get_field_index(column.aligned_with) >= 0:
            lengths, wanted = _lengths(batch.column(column.name)), _lengths(batch.column(column.aligned_with))
            differ = (lengths != wanted) & good
            if differ.any():
                row = int(np.flatnonzero(differ)[0])
                refuse(
                    differ,
                    f"column {column.name!r} must have as many values as {column.aligned_with!r} in every row, got "
                    f"{lengths[row]} and {wanted[row]} in one. Write both lists together.",
                )
    return None if good.all() else good


def _lengths(array: pa.Array) -> np.ndarray:
    return np.diff(array.offsets.to_numpy(zero_copy_only=True))


def _to_numpy(array: pa.Array, column: Column) -> Values:
    if not column.ragged:
        return _flat(array, column)
    # An array may be a slice of a larger one. Its offsets then start above 0, and `values` belongs to the larger one.
    offsets = array.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    ragged = Ragged(_flat(values, column), offsets - offsets[0])
    return ragged if column.keep_last is None else ragged.keep_last(column.keep_last)


def _flat(array: pa.Array, column: Column) -> np.ndarray:
    return fingerprint_arrow(array) if column.dtype == "string" else array.to_numpy(zero_copy_only=True)


def _repeated(value: str, column: Column, num_rows: int) -> np.ndarray:
    one = fingerprint_arrow(pa.array([value])) if column.dtype == "string" else np.array([int(value)])
    return np.repeat(one, num_rows)


def _spread(rows: Rows, good: np.ndarray) -> Rows:
    """Moves rows to the places where good <bool>[B] is True. The other places get no values."""
    values: dict[str, Values] = {GOOD: good}
    for name, column in rows.columns.items():
        if isinstance(column, Ragged):
            lengths = np.zeros(len(good), np.int64)
            lengths[good] = column.lengths()
            values[name] = Ragged(column.values, splits_of(lengths))
        else:
            values[name] = np.zeros(len(good), column.dtype)
            values[name][good] = column  # type: ignore[index]
    return Rows(values, len(good))
