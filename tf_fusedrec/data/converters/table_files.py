"""Reads named columns of a folder of CSV or Parquet files, and knows the file and the row of each value.

Columns become ids, numbers, labels, times or lists of ids. Rows with unusable values are refused, or skipped and
logged (bad_input.py).
"""

from __future__ import annotations

import bisect
import contextlib
import datetime
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from tf_fusedrec.data.bad_input import BadInput
from tf_fusedrec.data.converters.text_log import ids_of
from tf_fusedrec.data.rows import Ragged, splits_of

ENDINGS = (".csv", ".csv.gz", ".parquet")
MISSING = -1  # id of a missing value
LIST_SEPARATOR = "|"


class TableFiles:
    """The rows of all files of a folder, in the order of the files' names.

    Args:
      source: Folder, or one file.
      wanted: Names of the columns to read.
      bad: Handler of unusable rows.

    Raises:
      ValueError: there is no file, there are files of both kinds, or a file is unreadable or lacks a column.
    """

    def __init__(self, source: pathlib.Path, wanted: Iterable[str], bad: BadInput) -> None:
        self.path = source
        found = sorted(source.iterdir()) if source.is_dir() else [source]
        self.files = [path for path in found if path.name.endswith(ENDINGS)]
        kinds = {path.suffix == ".parquet" for path in self.files}
        if len(kinds) != 1:
            raise ValueError(
                f"input {str(source)!r} has {[path.name for path in self.files]}, want files of one kind, "
                "*.parquet or *.csv(.gz). Name a folder with these files alone."
            )
        tables = [_read(path, list(dict.fromkeys(wanted))) for path in self.files]
        self._ends = np.cumsum([table.num_rows for table in tables]).tolist()
        self._columns = {
            name: pa.chunked_array([chunk for table in tables for chunk in _alike(name, tables, table)])
            for name in tables[0].column_names
        }
        self._bad = bad
        self.good = np.ones(self._ends[-1], bool)
        if not self.num_rows:
            raise ValueError(f"{source}: {len(self.files)} files have no rows. Check the files.")

    @property
    def num_rows(self) -> int:
        return len(self.good)

    def file_of(self, rows: np.ndarray) -> np.ndarray:
        """Number of the file of each row <int64>[n]."""
        return np.searchsorted(self._ends, rows, side="right")

    def place(self, row: int) -> str:
        """File and row, counted from 1 behind a header, of a row of the table."""
        file = bisect.bisect_right(self._ends, row)
        return f"{self.files[file]}, row {row - ([0, *self._ends][file]) + 1}"

    def refuse(self, bad: np.ndarray, fault: Callable[[int], str]) -> None:
        """Handles the rows where `bad` <bool>[N] is True: raises ValueError, or logs and skips them.

        Args:
          bad: Mask of the rows.
          fault: Words about the first bad row, which name the column, the value and the remedy.
        """
        rows = np.flatnonzero(bad & self.good)
        if len(rows):
            self._bad.handle(self.place(rows[0]), f"{fault(rows[0])} Such rows: {len(rows)}.", rows.tolist())
            self.good[rows] = False

    def ids(self, column: str, required: bool = False) -> tuple[np.ndarray, dict[int, str]]:
        """Ids <int64>[N] and the strings of fingerprints; MISSING where a value is missing and not required."""
        values = self._values(column, required)
        known = values.drop_null()
        if pa.types.is_floating(known.type) or pa.types.is_boolean(known.type):
            known = known.cast(pa.string())
        ids, strings = ids_of(self.path, column, known)
        found = np.full(self.num_rows, MISSING, np.int64)
        found[_known(values)] = ids
        self._check_differs(column, found)
        return found, strings

    def numbers(self, column: str) -> np.ndarray:
        """Numbers <float32>[N], NaN where a value is missing."""
        values = self._values(column, required=False)
        with np.errstate(over="ignore"):  # A number beyond float32 becomes infinite, which is refused below.
            found = self._cast(column, values, pa.float64(), "a number").astype(np.float32)
        self.refuse(
            np.isinf(found),
            lambda row: (
                f"column {column!r} has {values[int(row)].as_py()!r}, want a finite float32, or nothing where the "
                "number is missing. Correct the row."
            ),
        )
        self._check_differs(column, found[~np.isnan(found)])
        return found

    def labels(self, column: str) -> np.ndarray:
        """Labels <float32>[N], 0 or 1."""
        values = self._values(column, required=True)
        found = self._cast(column, values, pa.float64(), "0 or 1")
        self.refuse(
            (found != 0) & (found != 1),
            lambda row: f"column {column!r} is a label and has {found[row]:g}, want 0 or 1. Correct the row.",
        )
        self._check_differs(column, found[self.good])
        return np.where(self.good, found, 0).astype(np.float32)

    def times(self, column: str) -> np.ndarray:
        """Times <int64>[N]: integers as they are, dates and text in microseconds since 1970."""
        values = self._values(column, required=True)
        for wanted in (pa.int64(), pa.timestamp("us")):
            if pa.types.is_temporal(values.type) and wanted == pa.int64():
                continue
            with contextlib.suppress(pa.ArrowException):
                whole = values.cast(wanted).cast(pa.int64())
                return whole.fill_null(0).to_numpy()
        found = [_moment(value) for value in values.to_pylist()]
        self._refuse_unread(column, values, found, "a time: an integer, or text like 2024-05-01 12:30:00")
        return np.array([value or 0 for value in found], np.int64)

    def lists(self, column: str) -> tuple[Ragged, dict[int, str]]:
        """Several ids of each row, from lists or from text with LIST_SEPARATOR; missing is an empty list."""
        values = self._values(column, required=False)
        if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
            values = pc.split_pattern(values.cast(pa.string()).fill_null(""), LIST_SEPARATOR)
        lists = [[one for one in row or () if one not in (None, "")] for row in values.to_pylist()]
        flat = pa.chunked_array([pa.array([str(one) for row in lists for one in row], pa.string())])
        ids, strings = ids_of(self.path, column, flat)
        if not len(ids):
            raise ValueError(
                f"{self._everywhere(column)} has no value: all of its rows are empty. Remove it from the map."
            )
        return Ragged(ids, splits_of(np.array([len(row) for row in lists], np.int64))), strings

    def _values(self, column: str, required: bool) -> pa.ChunkedArray:
        values = self._columns[column]
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            values = pc.if_else(pc.equal(values, ""), pa.scalar(None, values.type), values)
        if values.null_count == self.num_rows:
            raise ValueError(
                f"{self._everywhere(column)} has no value: all of its rows are empty. Remove it from the map."
            )
        if required:
            self.refuse(~_known(values), lambda row: f"column {column!r} is empty, want a value. Correct the row.")
        return values

    def _cast(self, column: str, values: pa.ChunkedArray, wanted: pa.DataType, words: str) -> np.ndarray:
        """Values <float64>[N] with NaN for missing ones. Rows that hold no number are refused."""
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        try:
            return values.cast(wanted).to_numpy()
        except pa.ArrowException:
            found = [_number(value) for value in values.to_pylist()]
        self._refuse_unread(column, values, found, words)
        return np.array([np.nan if value is None else value for value in found])

    def _refuse_unread(self, column: str, values: pa.ChunkedArray, found: Sequence, words: str) -> None:
        """Refuses the rows where `found` is None."""
        self.refuse(
            np.array([value is None for value in found]),
            lambda row: f"column {column!r} has {values[int(row)].as_py()!r}, want {words}. Correct the row.",
        )

    def _check_differs(self, column: str, values: np.ndarray) -> None:
        if len(values) and (values == values[0]).all():
            raise ValueError(
                f"{self._everywhere(column)} has the same value everywhere, {values[0]}, and so tells nothing. "
                "Remove it from the map."
            )

    def _everywhere(self, column: str) -> str:
        return f"{self.files[0]}, row 1, to {self.place(self.num_rows - 1)}: column {column!r}"


def _read(path: pathlib.Path, wanted: Sequence[str]) -> pa.Table:
    try:
        if path.suffix == ".parquet":
            names = pq.read_schema(path).names
            _check_columns(path, names, wanted)
            return pq.read_table(path, columns=list(wanted))
        with pa.csv.open_csv(path) as reader:
            _check_columns(path, reader.schema.names, wanted)
        # Text first: a value that is no number is then found in its row.
        text = pa.csv.ConvertOptions(include_columns=list(wanted), column_types=dict.fromkeys(wanted, pa.string()))
        return pa.csv.read_csv(path, convert_options=text)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable ({error}). Check the file.") from error


def _check_columns(path: pathlib.Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(
            f"{path}: got the columns {list(names)}, want also {missing}. {_remedy_for_columns(path, names)}"
        )


def _remedy_for_columns(path: pathlib.Path, names: Sequence[str]) -> str:
    """What to do about a file that lacks columns. One name with a separator in it was not parted."""
    separator = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
    if separator is None or path.suffix == ".parquet":
        return "Correct the column map."
    return f"Its fields are parted by {separator!r}, want commas. Write the file with commas."


def _alike(name: str, tables: Sequence[pa.Table], table: pa.Table) -> list[pa.Array]:
    """The chunks of a column, as text where the files give it different types."""
    column = table[name]
    types = {one[name].type for one in tables}
    return (column if len(types) == 1 else column.cast(pa.string())).chunks


def _known(values: pa.ChunkedArray) -> np.ndarray:
    return values.is_valid().to_numpy()


def _number(value: object) -> float | None:
    """The number of a value, NaN for a missing one, None for no number."""
    if value is None:
        return float("nan")
    with contextlib.suppress(TypeError, ValueError):
        return float(value)  # type: ignore[arg-type]
    return None


def _moment(value: object) -> int | None:
    """The integer, or the microseconds since 1970 of a text, 0 for a missing one, None for no time."""
    text = str(value or 0)
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        moment = datetime.datetime.fromisoformat(text)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)).timestamp() * 1e6)
    return None
