"""What a column is: its declaration, and the check of a Parquet schema and of the model's features against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from tf_fusedrec.config import FeatureConfig

_ARROW = {"int64": pa.int64(), "float32": pa.float32(), "string": pa.string()}


@dataclasses.dataclass(frozen=True)
class Column:
    """One column to read: a scalar per row, or with ragged=True a list per row.

    `keep_last` keeps the newest (last) so many values of each row: long histories are cut where they are read, so
    that tokens are counted after the cut. `aligned_with` names another list column whose rows must have the same
    lengths (an item and its time); a row that lies about it is refused by the reader.
    """

    name: str
    dtype: str = "int64"  # "int64", "float32", or "string": ids that become int64 fingerprints (fingerprint.py)
    ragged: bool = False
    keep_last: int | None = None  # values
    aligned_with: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _ARROW:
            raise ValueError(
                f"Column.dtype of {self.name!r} must be one of {sorted(_ARROW)}, got {self.dtype!r}. "
                "Ids are int64 or string, values and labels float32."
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

    @property
    def value_dtype(self) -> str:
        """Of the values that the model gets: "int64" or "float32"."""
        return "int64" if self.dtype == "string" else self.dtype

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


def check_schema(
    where: str, schema: pa.Schema, columns: Sequence[Column], partitions: Mapping[str, str] | None = None
) -> None:
    """Refuses a file whose schema lacks a column or has it with another type, naming both.

    `partitions` are values that the file's folders give; a scalar int64 column may come from there.
    """
    for column in columns:
        index = schema.get_field_index(column.name)
        if index < 0 and column.name in (partitions or {}):
            _check_partition(where, column, (partitions or {})[column.name])
            continue
        if index < 0:
            raise ValueError(
                f"{where}: column {column.name!r} is missing; the file has {schema.names}. "
                "Name a column that is there, or convert the data again."
            )
        found = schema.field(index).type
        if _matches(found, column):
            continue
        remedy = "Rewrite the file with that type, or declare the Column as it is."
        if _is_list(found) and pa.types.is_struct(found.value_type):
            remedy = "Lists of structs are not read: write one list column for each field of the struct."
        raise ValueError(f"{where}: column {column.name!r} must be {column.type_name()}, got {found}. {remedy}")


def check_features(columns: Sequence[Column], features: Iterable[FeatureConfig], made: Iterable[str] = ()) -> None:
    """Refuses a feature of the model that no column of ids feeds. Call it before the first step.

    Args:
      columns: what the reader reads.
      features: of the embedding layer.
      made: features that the model makes itself (sampled negatives).
    """
    by_name = {column.name: column for column in columns}
    for feature in features:
        if feature.name in made:
            continue
        column = by_name.get(feature.name)
        if column is None:
            raise ValueError(
                f"feature {feature.name!r} (table {feature.table!r}) has no column; columns are {sorted(by_name)}. "
                "Read a column of that name, or name the feature after a column."
            )
        if column.value_dtype != "int64":
            raise ValueError(
                f"feature {feature.name!r} (table {feature.table!r}) wants ids, but its column is "
                f"{column.type_name()}. Store ids as int64 or string."
            )


def _check_partition(where: str, column: Column, value: str) -> None:
    if column.ragged or column.dtype == "float32":
        raise ValueError(
            f"{where}: column {column.name!r} is a folder's name ({column.name}={value}), which gives an int64 or "
            f"string per row, got {column.type_name()}. Declare the Column so."
        )
    if column.dtype == "int64" and not value.removeprefix("-").isdecimal():
        raise ValueError(
            f"{where}: column {column.name!r} must be int64, got the folder {column.name}={value}. "
            'Declare it as dtype="string".'
        )


def _is_list(found: pa.DataType) -> bool:
    return pa.types.is_list(found) or pa.types.is_large_list(found)


def _matches(found: pa.DataType, column: Column) -> bool:
    if column.ragged:
        return _is_list(found) and _holds(found.value_type, column)
    return _holds(found, column)


def _holds(found: pa.DataType, column: Column) -> bool:
    if column.dtype == "string" and pa.types.is_dictionary(found):
        found = found.value_type
    return found == _ARROW[column.dtype] or (column.dtype == "string" and pa.types.is_large_string(found))
