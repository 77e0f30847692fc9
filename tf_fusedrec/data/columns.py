"""Declarations of columns, and checks of Parquet schemas and the model's features against them.

BadInput refuses unusable input, or skips and logs it. One policy applies to all kinds of bad input.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from tf_fusedrec.config import FeatureConfig

# Texts that are integers: int64 as str() writes it. pandas writes such an integer with .0 if its column lacks a value.
_UP_TO_INT64 = (  # numbers of 19 digits
    "[1-8][0-9]{18}|9[0-1][0-9]{17}|92[0-1][0-9]{16}|922[0-2][0-9]{15}|9223[0-2][0-9]{14}|"
    "92233[0-6][0-9]{13}|922337[0-1][0-9]{12}|92233720[0-2][0-9]{10}|922337203[0-5][0-9]{9}|"
    "9223372036[0-7][0-9]{8}|92233720368[0-4][0-9]{7}|922337203685[0-3][0-9]{6}|"
    "9223372036854[0-6][0-9]{5}|92233720368547[0-6][0-9]{4}|922337203685477[0-4][0-9]{3}|"
    "9223372036854775[0-7][0-9]{2}|922337203685477580[0-6]|9223372036854775807"
)
INT64_TEXT = f"^(0|-?([1-9][0-9]{{0,17}}|{_UP_TO_INT64})|-9223372036854775808)$"
FLOAT_TEXT = r"^(0|-?[1-9][0-9]*)\.0$"
_ARROW = {"int64": pa.int64(), "float32": pa.float32(), "string": pa.string()}


@dataclasses.dataclass(frozen=True)
class Column:
    """One column to read: a scalar per row, or with ragged=True a list per row.

    Attributes:
      name: Name of the column in the files.
      dtype: "int64", "float32", or "string" for ids that become int64 fingerprints (fingerprint.py).
      ragged: True if the column has a list per row.
      keep_last: Number of last (newest) values to keep of each row, >= 1; None keeps all. Tokens are counted after
        this cut.
      aligned_with: Name of another list column with rows of the same lengths, such as items and their times. The reader
        refuses rows of different lengths.

    Raises:
      ValueError: dtype or keep_last is unknown or out of range; a scalar has keep_last or aligned_with.
    """

    name: str
    dtype: str = "int64"
    ragged: bool = False
    keep_last: int | None = None
    aligned_with: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _ARROW:
            raise ValueError(
                f"Column.dtype of {self.name!r} must be one of {sorted(_ARROW)}, got {self.dtype!r}. "
                "Ids are int64 or string, values and labels float32."
            )
        if not self.ragged and (self.keep_last is not None or self.aligned_with is not None):
            raise ValueError(
                f"Column {self.name!r} is a scalar, so keep_last and aligned_with do not apply. "
                "Set ragged=True or leave them out."
            )
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"Column.keep_last of {self.name!r} must be >= 1, got {self.keep_last}. Use None to keep whole rows."
            )

    @property
    def value_dtype(self) -> str:
        """dtype of the values that the model gets, "int64" or "float32"."""
        return "int64" if self.dtype == "string" else self.dtype

    def type_name(self) -> str:
        """Type in messages and dataset.json, such as "int64" or "list<int64>"."""
        return f"list<{self.dtype}>" if self.ragged else self.dtype

    def arrow_type(self) -> pa.DataType:
        """Arrow type in files written by this package."""
        return pa.list_(_ARROW[self.dtype]) if self.ragged else _ARROW[self.dtype]


def check_columns(columns: Sequence[Column]) -> None:
    """Raises ValueError for no columns, a repeated name, or an aligned_with that cannot hold."""
    if not columns:
        raise ValueError("columns must name at least one Column, got none. List the columns to read.")
    by_name = {column.name: column for column in columns}
    names = [column.name for column in columns]
    for column in columns:
        if names.count(column.name) > 1:
            raise ValueError(f"columns names {column.name!r} more than once. Declare each column once.")
        if column.aligned_with is None:
            continue
        target = by_name.get(column.aligned_with)
        if target is None or not target.ragged:
            raise ValueError(
                f"Column {column.name!r} is aligned_with {column.aligned_with!r}, which is not a declared list "
                f"column; list columns are {sorted(c.name for c in columns if c.ragged)}. Declare it with ragged=True."
            )
        if target.keep_last != column.keep_last:
            raise ValueError(
                f"Column {column.name!r} has keep_last={column.keep_last}, but its aligned column {target.name!r} has "
                f"keep_last={target.keep_last}. Give both the same value."
            )


def check_schema(where: str, schema: pa.Schema, columns: Sequence[Column], partitions: Mapping[str, str]) -> None:
    """Raises ValueError if the file `where` lacks a column or stores it in a type that the Column does not declare.

    `partitions` are column values of the file's folders. A scalar int64 or string column may be one of them.
    """
    for column in columns:
        index = schema.get_field_index(column.name)
        if index >= 0:
            _check_type(where, column, schema.field(index).type)
        elif column.name in partitions:
            _check_partition(where, column, partitions[column.name])
        else:
            raise ValueError(
                f"{where}: column {column.name!r} is missing; the file has {schema.names}. "
                "Name one of these columns, or convert the data again."
            )


def _check_type(where: str, column: Column, stored: pa.DataType) -> None:
    is_list = pa.types.is_list(stored) or pa.types.is_large_list(stored)
    values = stored.value_type if is_list else stored
    plain = values.value_type if column.dtype == "string" and pa.types.is_dictionary(values) else values
    matches = plain == _ARROW[column.dtype] or (column.dtype == "string" and pa.types.is_large_string(plain))
    if is_list != column.ragged or not matches:
        remedy = "Rewrite the file with that type, or declare the Column with the file's type."
        if is_list and pa.types.is_struct(values):
            remedy = "Lists of structs are not supported: write one list column for each field of the struct."
        raise ValueError(f"{where}: column {column.name!r} must be {column.type_name()}, got {stored}. {remedy}")


def _check_partition(where: str, column: Column, value: str) -> None:
    if column.ragged or column.dtype == "float32":
        raise ValueError(
            f"{where}: column {column.name!r} comes from the folder {column.name}={value}, but is declared as "
            f"{column.type_name()}. Declare it as a scalar int64 or string."
        )
    if column.dtype == "int64" and not value.removeprefix("-").isdecimal():
        raise ValueError(
            f"{where}: column {column.name!r} must be int64, got the folder {column.name}={value}. "
            'Declare it with dtype="string".'
        )


def check_features(columns: Sequence[Column], features: Iterable[FeatureConfig], made: Iterable[str] = ()) -> None:
    """Raises ValueError for a feature of the model without a column of ids. Call it before the first step.

    Args:
      columns: Columns of the reader.
      features: Features of the embedding layer.
      made: Names of features that the model makes itself, such as sampled negatives.
    """
    by_name = {column.name: column for column in columns}
    for feature in features:
        if feature.name in made:
            continue
        column = by_name.get(feature.name)
        if column is None:
            raise ValueError(
                f"feature {feature.name!r} (table {feature.table_name!r}) has no column among {sorted(by_name)}. "
                "Read a column of that name, or name the feature after a column."
            )
        if column.value_dtype != "int64":
            raise ValueError(
                f"feature {feature.name!r} (table {feature.table_name!r}) needs ids, but its column is "
                f"{column.type_name()}. Store ids as int64 or string."
            )


POLICIES = ("error", "skip")
_LOG = logging.getLogger("tf_fusedrec.data")


class BadInput:
    """Handles bad input: "error" raises for the first one, "skip" skips it, and the log names and counts it."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"bad_rows must be one of {POLICIES}, got {policy!r}.")
        self.skips = policy == "skip"
        self._rows: dict[str, set[int]] = {}  # numbers of the skipped rows, by place
        self._lock = threading.Lock()  # Several threads read.

    @property
    def skipped_rows(self) -> int:
        """Number of distinct rows skipped by this process. A file with an unreadable footer counts no rows."""
        return sum(len(rows) for rows in self._rows.values())

    def handle(self, place: str, fault: str, rows: Iterable[int] = ()) -> None:
        """Raises ValueError("place: fault"), or under "skip" logs the fault of these rows of a row group once."""
        if not self.skips:
            raise ValueError(f"{place}: {fault}")
        with self._lock:
            known = self._rows.get(place)
            new = set(rows) - (known or set())
            if known is not None and not new:
                return  # Every epoch meets the same bad input again.
            self._rows.setdefault(place, set()).update(new)
            counts = f"{len(new)} rows; in all {self.skipped_rows} rows at {len(self._rows)} places"
        _LOG.warning("skipped: %s: %s (%s)", place, fault, counts)
