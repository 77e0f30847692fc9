"""What a column is: its declaration, the check of a Parquet schema against it, and its way into NumPy."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.rows import Ragged, Rows, Values

_ARROW = {"int64": pa.int64(), "float32": pa.float32()}


@dataclasses.dataclass(frozen=True)
class Column:
    """One column to read: a scalar per row, or with ragged=True a list per row.

    `keep_last` keeps the newest (last) so many values of each row: long histories are cut where they are read, so
    that tokens are counted after the cut. `aligned_with` names another list column whose rows must have the same
    lengths (an item and its time); a row that lies about it is refused by the reader.
    """

    name: str
    dtype: str = "int64"  # "int64" or "float32"
    ragged: bool = False
    keep_last: int | None = None  # values
    aligned_with: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _ARROW:
            raise ValueError(
                f"Column.dtype of {self.name!r} must be one of {sorted(_ARROW)}, got {self.dtype!r}. "
                "Ids are int64, values and labels float32."
            )
        if not self.ragged and (self.keep_last is not None or self.aligned_with is not None):
            raise ValueError(
                f"Column {self.name!r} is a scalar, so keep_last and aligned_with mean nothing. "
                "Set ragged=True or leave them out."
            )
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"Column.keep_last of {self.name!r} must be >= 1, got {self.keep_last}. Use None to keep whole rows."
            )

    def type_name(self) -> str:
        """The type as messages and dataset.json spell it: "int64" or "list<int64>"."""
        return f"list<{self.dtype}>" if self.ragged else self.dtype

    def arrow_type(self) -> pa.DataType:
        """The Arrow type that a file written by this package has."""
        return pa.list_(_ARROW[self.dtype]) if self.ragged else _ARROW[self.dtype]


def check_columns(columns: Sequence[Column]) -> None:
    """Refuses no columns, a name declared twice, and an aligned_with that cannot hold."""
    if not columns:
        raise ValueError("columns must name at least one Column, got none. List the columns to read.")
    names = [column.name for column in columns]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"columns names {name!r} more than once. Declare each column once.")
    by_name = dict(zip(names, columns))
    for column in columns:
        if column.aligned_with is None:
            continue
        other = by_name.get(column.aligned_with)
        if other is None or not other.ragged:
            raise ValueError(
                f"Column {column.name!r} is aligned_with {column.aligned_with!r}, which is not a list column read "
                f"here; those are {sorted(c.name for c in columns if c.ragged)}. Declare it with ragged=True."
            )
        if other.keep_last != column.keep_last:
            raise ValueError(
                f"Column {column.name!r} has keep_last={column.keep_last} but {other.name!r}, with which it is "
                f"aligned, has keep_last={other.keep_last}. Give both the same."
            )


def check_schema(path: pathlib.Path, schema: pa.Schema, columns: Sequence[Column]) -> None:
    """Refuses a file whose schema lacks a column or has it with another type, naming both."""
    for column in columns:
        index = schema.get_field_index(column.name)
        if index < 0:
            raise ValueError(
                f"{path}: column {column.name!r} is missing; the file has {schema.names}. "
                "Name a column that is there, or convert the data again."
            )
        found = schema.field(index).type
        if _matches(found, column):
            continue
        remedy = "Rewrite the file with that type, or declare the Column as it is."
        if _is_list(found) and pa.types.is_struct(found.value_type):
            remedy = "Lists of structs are not read: write one list column for each field of the struct."
        raise ValueError(f"{path}: column {column.name!r} must be {column.type_name()}, got {found}. {remedy}")


def rows_from_arrow(batch: pa.RecordBatch, columns: Sequence[Column], where: str) -> Rows:
    """Turns a record batch into Rows, without copying where a row is kept whole.

    Raises:
      ValueError: a null value, or aligned columns whose rows differ in length; `where` tells file and row group.
    """
    scalars: dict[str, Values] = {}
    lists: dict[str, Ragged] = {}
    for column in columns:
        array = batch.column(column.name)
        if column.ragged:
            lists[column.name] = _list_to_numpy(array, column, where)
        else:
            scalars[column.name] = _scalar_to_numpy(array, column, where)
    for column in columns:
        if column.aligned_with in lists:
            _check_aligned(column, lists[column.name], lists[column.aligned_with], where)
    for column in columns:
        if column.keep_last is not None:
            lists[column.name] = lists[column.name].keep_last(column.keep_last)
    return Rows({**scalars, **lists}, batch.num_rows)


def empty_rows(columns: Sequence[Column]) -> Rows:
    """No rows of these columns: the batch of a rank that ran out."""
    values: dict[str, Values] = {}
    for column in columns:
        nothing = np.empty(0, column.dtype)
        values[column.name] = Ragged(nothing, np.zeros(1, np.int64)) if column.ragged else nothing
    return Rows(values, 0)


def _is_list(found: pa.DataType) -> bool:
    return pa.types.is_list(found) or pa.types.is_large_list(found)


def _matches(found: pa.DataType, column: Column) -> bool:
    if column.ragged:
        return _is_list(found) and found.value_type == _ARROW[column.dtype]
    return found == _ARROW[column.dtype]


def _scalar_to_numpy(array: pa.Array, column: Column, where: str) -> np.ndarray:
    if array.null_count:
        _refuse_nulls(array.null_count, "null values", column, where)
    return array.to_numpy(zero_copy_only=True)


def _list_to_numpy(array: pa.Array, column: Column, where: str) -> Ragged:
    if array.null_count:
        _refuse_nulls(array.null_count, "null rows", column, where)
    # An array may be a window on a larger one: its offsets then start above 0, and `values` is the larger one's.
    offsets = array.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    if values.null_count:
        _refuse_nulls(values.null_count, "null values inside its lists", column, where)
    return Ragged(values.to_numpy(zero_copy_only=True), offsets - offsets[0])


def _refuse_nulls(count: int, what: str, column: Column, where: str) -> None:
    raise ValueError(
        f"{where}: column {column.name!r} has {count} {what}. Write a value of your own for what is missing "
        "(an id, 0.0, or an empty list)."
    )


def _check_aligned(column: Column, values: Ragged, other: Ragged, where: str) -> None:
    if np.array_equal(values.row_splits, other.row_splits):
        return
    lengths, wanted = values.lengths(), other.lengths()
    row = int(np.flatnonzero(lengths != wanted)[0])
    raise ValueError(
        f"{where}: column {column.name!r} must have as many values as {column.aligned_with!r} in every row, got "
        f"{lengths[row]} and {wanted[row]} in one (row {row} of the rows read at once). Write both lists together."
    )
