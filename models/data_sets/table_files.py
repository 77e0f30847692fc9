"""Reads named columns of a folder of CSV or Parquet files, and knows the file and the row of each value.

Columns become ids, numbers, labels, times or lists of ids. Rows with unusable values are refused, or skipped and
logged (BadInput). The id of a value depends on this value only, not on other rows, files and folders.
"""

from __future__ import annotations

import bisect
import contextlib
import datetime
import difflib
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from tf_fusedrec.data.columns import FLOAT_TEXT, INT64_TEXT, BadInput
from tf_fusedrec.data.rows import Ragged, splits_of
from tf_fusedrec.models.data_sets.text_log import ids_of, integers_of

ENDINGS = (".csv", ".csv.gz", ".parquet")
MISSING = -1  # id of a missing value
LIST_SEPARATOR = "|"
# Texts that a program writes for a number: an integer of any size, or a float64 beyond 10^16.
_NUMBER = r"^-?([1-9][0-9]*|[1-9](\.[0-9]+)?e\+[0-9]+|inf)$"
_EXACT = 2**53  # the last float64 up to which all integers are exact
_SECONDS = 1e11  # Greater times since 1970 are in a finer unit.
# Spellings by which programs write a missing number and a bool.
_NUMBERS = {**dict.fromkeys(pa.csv.ConvertOptions().null_values, "nan"), "true": "1", "false": "0"}
_TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


class TableColumns:
    """Columns of rows, as ids, numbers, labels, times or lists of ids.

    Args:
      path: Origin of the rows.
      columns: Values by name, as a CSV or Parquet file gives them.
      rows: Number of the rows N.
      place: Function from the number of a row to its place in the words of messages.
      bad: Handler of unusable rows.
      kinds: Kind of ids by column, one of table.KINDS; see there.
      is_data_set: Whether the rows are a data set, of which a column without values or of one value teaches nothing.
    """

    def __init__(
        self,
        path: pathlib.Path,
        columns: Mapping[str, pa.ChunkedArray],
        rows: int,
        place: Callable[[int], str],
        bad: BadInput,
        kinds: Mapping[str, str] | None = None,
        *,
        is_data_set: bool = False,
    ) -> None:
        self.path, self.place = path, place
        self._columns, self._bad, self._kinds, self._is_data_set = columns, bad, kinds or {}, is_data_set
        self.good = np.ones(rows, bool)

    @property
    def num_rows(self) -> int:
        return len(self.good)

    def value(self, column: str, row: int) -> Any:
        """A value as JSON can have it: a number, text or a list; None where it is missing."""
        value = self._columns[column][row].as_py()
        if value is None or value != value or value == "":
            return None
        return value if isinstance(value, (int, float, str, list)) else str(value)

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
        known = _known(values)
        if _is_list(values.type):
            place = self.place(int(np.flatnonzero(known)[0]))
            raise ValueError(f"{place}: column {column!r} has a list, want one id. Name it under columns.lists.")
        ids = np.full(self.num_rows, MISSING, np.int64)
        ids[known], strings = self._ids_of(column, values.filter(pa.array(known)), np.flatnonzero(known))
        self._check_differs(column, ids)
        return ids, strings

    def _ids_of(self, column: str, values: pa.ChunkedArray, rows: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """Ids <int64>[n] of values without nulls, which stand in these rows <int64>[n], and their strings."""
        id_kind = self._kinds.get(column)
        if id_kind != "string" and (integers := integers_of(values)) is not None:
            return integers, {}
        texts = _texts(values)
        if id_kind != "string":
            exact = pc.match_substring_regex(texts, INT64_TEXT).to_numpy()
            rounded = pc.match_substring_regex(texts, FLOAT_TEXT).to_numpy()
            exact[rounded] = [abs(float(text)) <= _EXACT for text in texts.filter(pa.array(rounded)).to_pylist()]
            number = rounded | pc.match_substring_regex(texts, _NUMBER).to_numpy()
            usable = exact if id_kind == "integer" else exact | ~number
            bad = np.zeros(self.num_rows, bool)
            bad[rows[~usable]] = True
            want = "an integer" if id_kind else "an int64 without rounding, or text that is no number"
            self.refuse(
                bad,
                lambda row: (
                    f"column {column!r} has the id {texts[int(np.flatnonzero((rows == row) & ~usable)[0])].as_py()!r}, "
                    f"want {want}. Correct the row, or set columns.kinds to {{{column}: string}}."
                ),
            )
            if not usable.all():
                texts = pc.if_else(pa.array(usable), texts, "0")  # in skipped rows
        return ids_of(self.path, column, texts, integers=id_kind != "string")

    def numbers(self, column: str) -> np.ndarray:
        """Numbers <float32>[N], NaN where a value is missing."""
        values = self._values(column, required=False)
        with np.errstate(over="ignore"):  # A number beyond float32 becomes infinite, which is refused below.
            numbers = self._cast(column, values, "a number").astype(np.float32)
        self.refuse(
            np.isinf(numbers),
            lambda row: (
                f"column {column!r} has {values[int(row)].as_py()!r}, want a finite float32, or nothing where the "
                "number is missing. Correct the row."
            ),
        )
        self._check_differs(column, numbers[~np.isnan(numbers)])
        return numbers

    def labels(self, column: str) -> np.ndarray:
        """Labels <float32>[N], 0 or 1."""
        values = self._values(column, required=True)
        labels = self._cast(column, values, "0 or 1")
        self.refuse(
            (labels != 0) & (labels != 1),
            lambda row: f"column {column!r} is a label and has {labels[row]:g}, want 0 or 1. Correct the row.",
        )
        self._check_differs(column, labels[self.good])
        return np.where(self.good, labels, 0).astype(np.float32)

    def times(self, column: str) -> np.ndarray:
        """Times <int64>[N]: integers as they are, seconds with a point, dates and text in microseconds since 1970.

        Raises:
          ValueError: all integers are dates, such as 20231114 or 20231114221320, which no epoch means.
        """
        values = self._values(column, required=True)
        for type_ in (pa.int64(), pa.timestamp("us")):
            if pa.types.is_temporal(values.type) and type_ == pa.int64():
                continue
            with contextlib.suppress(pa.ArrowException):
                times = values.cast(type_).cast(pa.int64()).fill_null(0).to_numpy()
                if type_ == pa.int64() and _are_dates(times[self.good]):
                    row = int(np.flatnonzero(self.good)[0])
                    raise ValueError(
                        f"{self.place(row)}: column {column!r} has {times[row]}, a date written as a number, want "
                        "seconds since 1970, or text like 2024-05-01 12:30:00. Correct the column."
                    )
                return times
        with contextlib.suppress(pa.ArrowException):
            numbers = values.cast(pa.float64()).fill_null(0).to_numpy()
            if (np.abs(numbers) < _SECONDS).all() and not _are_dates(numbers[self.good].astype(np.int64)):
                return np.round(numbers * 1e6).astype(np.int64)
        moments = [_moment(value) for value in values.to_pylist()]
        self._refuse_unread(column, values, moments, "a time: seconds since 1970, or text like 2024-05-01 12:30:00")
        return np.array([value or 0 for value in moments], np.int64)

    def lists(self, column: str) -> tuple[Ragged, dict[int, str]]:
        """Several ids of each row, from lists or from text with LIST_SEPARATOR; missing is an empty list."""
        values = self._values(column, required=False)
        if not _is_list(values.type):
            values = pc.split_pattern(_texts(values).fill_null(""), LIST_SEPARATOR)
        lengths = pc.list_value_length(values).fill_null(0).to_numpy()
        row = np.repeat(np.arange(self.num_rows), lengths)
        flat = plain(column, pc.list_flatten(values), lambda at: self.place(int(row[at])))
        if pa.types.is_nested(flat.type):
            place = self.place(int(row[0]) if len(row) else 0)
            raise ValueError(
                f"{place}: column {column!r} has a list of {flat.type}, want a list of ids. Write lists of integers or "
                "of text."
            )
        flat = _without_empty(flat)
        full = _known(flat)
        ids, strings = self._ids_of(column, flat.filter(pa.array(full)), row[full])
        if self._is_data_set and not len(ids):
            raise ValueError(
                f"{self._everywhere(column)} has no value: all of its rows are empty. Remove it from the map."
            )
        return Ragged(ids, splits_of(np.bincount(row[full], minlength=self.num_rows))), strings

    def _values(self, column: str, required: bool) -> pa.ChunkedArray:
        values = _without_empty(self._columns[column])
        if self._is_data_set and values.null_count == self.num_rows:
            raise ValueError(
                f"{self._everywhere(column)} has no value: all of its rows are empty. Remove it from the map."
            )
        if required:
            self.refuse(~_known(values), lambda row: f"column {column!r} is empty, want a value. Correct the row.")
        return values

    def _cast(self, column: str, values: pa.ChunkedArray, words: str) -> np.ndarray:
        """Values <float64>[N] with NaN for missing ones. Rows without a number are refused."""
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        try:
            return values.cast(pa.float64()).to_numpy()
        except pa.ArrowException:
            numbers = [_number(value) for value in values.to_pylist()]
        self._refuse_unread(column, values, numbers, words)
        return np.array([np.nan if value is None else value for value in numbers])

    def _refuse_unread(self, column: str, values: pa.ChunkedArray, parsed: Sequence, words: str) -> None:
        """Refuses the rows where `parsed` is None."""
        self.refuse(
            np.array([value is None for value in parsed]),
            lambda row: f"column {column!r} has {values[int(row)].as_py()!r}, want {words}. Correct the row.",
        )

    def _check_differs(self, column: str, values: np.ndarray) -> None:
        if self._is_data_set and len(values) and (values == values[0]).all():
            every = (self.value(column, row) for row in np.flatnonzero(self.good).tolist())
            value = next(value for value in every if value is not None)
            raise ValueError(
                f"{self._everywhere(column)} has the same value everywhere, {value}, and so tells nothing. Remove it "
                "from the map."
            )

    def _everywhere(self, column: str) -> str:
        return f"{self.place(0)}, to {self.place(self.num_rows - 1)}: column {column!r}"


class TableFiles(TableColumns):
    """The rows of all files of folders, those of each in the order of the files' names.

    Args:
      sources: Folders, or files.
      columns: Names of the columns to read.
      bad, kinds: See TableColumns.

    Raises:
      ValueError: there is no file, there are files of both kinds, or a file is unreadable or lacks a column.
    """

    def __init__(
        self,
        sources: Sequence[pathlib.Path],
        columns: Iterable[str],
        bad: BadInput,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        self.files: list[pathlib.Path] = []
        for source in sources:
            paths = sorted(source.iterdir()) if source.is_dir() else [source]
            files = [path for path in paths if path.name.endswith(ENDINGS)]
            if len({path.suffix == ".parquet" for path in files}) != 1:
                raise ValueError(
                    f"input {str(source)!r} has {[path.name for path in files]}, want files of one kind, "
                    "*.parquet or *.csv(.gz). Name a folder with these files alone."
                )
            self.files += files
        tables = [_read(path, list(dict.fromkeys(columns))) for path in self.files]
        self._ends = np.cumsum([table.num_rows for table in tables]).tolist()
        alike = {name: _alike(name, self.files, [table[name] for table in tables]) for name in tables[0].column_names}
        super().__init__(sources[-1], alike, self._ends[-1], self._place, bad, kinds, is_data_set=True)
        if not self.num_rows:
            raise ValueError(f"{self.path}: {len(self.files)} files have no rows. Check the files.")

    def file_of(self, rows: np.ndarray) -> np.ndarray:
        """Number of the file of each row <int64>[n]."""
        return np.searchsorted(self._ends, rows, side="right")

    def _place(self, row: int) -> str:
        """File and row, counted from 1 after a header, of a row of the table."""
        file = bisect.bisect_right(self._ends, row)
        return f"{self.files[file]}, row {row - ([0, *self._ends][file]) + 1}"


def _read(path: pathlib.Path, columns: Sequence[str]) -> pa.Table:
    try:
        if path.suffix == ".parquet":
            names = pq.read_schema(path).names
            check_columns(path, names, columns)
            table = pq.read_table(path, columns=list(columns))
        else:
            lines = pa.csv.ParseOptions(newlines_in_values=True)
            with pa.csv.open_csv(path, parse_options=lines) as reader:
                check_columns(path, reader.schema.names, columns)
            # Text first: a value that is no number is then found in its row.
            text = pa.csv.ConvertOptions(
                include_columns=list(columns), column_types=dict.fromkeys(columns, pa.string())
            )
            table = pa.csv.read_csv(path, parse_options=lines, convert_options=text)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable ({error}). Check the file.") from error
    columns_of_file = [plain(name, table[name], lambda row: f"{path}, row {row + 1}") for name in table.column_names]
    return pa.table(columns_of_file, names=table.column_names)


def plain(name: str, column: pa.ChunkedArray, place: Callable[[int], str]) -> pa.ChunkedArray:
    """A column as numbers, times, strings or lists, for any encoding. `place` names the file and row of a value."""
    if isinstance(column, pa.Array):
        column = pa.chunked_array([column])
    if pa.types.is_run_end_encoded(column.type):
        column = pa.chunked_array([pc.run_end_decode(chunk) for chunk in column.chunks], column.type.value_type)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_nested(column.type) and not _is_list(column.type):
        row = int(np.flatnonzero([*_known(column), True])[0])
        raise ValueError(
            f"{place(row)}: column {name!r} has a {column.type}, want one value, or a list of ids. Write the "
            "fields as columns of their own."
        )
    if str(column.type) in _TEXTS or pa.types.is_fixed_size_binary(column.type):
        try:
            return column.cast(pa.string())
        except pa.ArrowException:
            bad = next(row for row, value in enumerate(column.to_pylist()) if not _is_utf8(value))
        raise ValueError(
            f"{place(bad)}: column {name!r} has {column[bad].as_py()!r}, want text in UTF-8. Write the bytes "
            "as text, such as hexadecimal digits."
        )
    return column


def _is_utf8(value: bytes | str | None) -> bool:
    try:
        return not isinstance(value, bytes) or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _is_list(type_: pa.DataType) -> bool:
    names = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    return any(getattr(pa.types, f"is_{name}")(type_) for name in names)


def _without_empty(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values with nulls in place of empty text and of NaN."""
    if pa.types.is_string(values.type):
        return pc.if_else(pc.equal(values, ""), pa.scalar(None, values.type), values)
    if pa.types.is_floating(values.type):
        return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    return values


def _texts(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values as text, as a CSV file has them; integers in a float or decimal type as integers."""
    if pa.types.is_decimal(values.type):
        return pc.replace_substring_regex(values.cast(pa.string()), r"\.0+$", "")
    if not pa.types.is_floating(values.type):
        return values.cast(pa.string())
    numbers = values.cast(pa.float64())
    exact = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less_equal(pc.abs(numbers), float(_EXACT)))
    integers = pc.if_else(exact, numbers, 0.0).cast(pa.int64())
    return pc.if_else(exact, integers.cast(pa.string()), numbers.cast(pa.string()))


def check_columns(path: pathlib.Path, names: Sequence[str], columns: Iterable[str]) -> None:
    """Raises ValueError: a file with columns of these names lacks one, has it twice, or is not parted by commas."""
    separator = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
    if separator is not None and path.suffix != ".parquet":
        raise ValueError(f"{path}: its fields are parted by {separator!r}, want commas. Write the file with commas.")
    for name in columns:
        if (count := names.count(name)) > 1:
            raise ValueError(f"{path}: {count} columns have the name {name!r}, want one. Rename the others.")
    missing = [name for name in columns if name not in names]
    if missing:
        close = [near[0] for name in missing if (near := difflib.get_close_matches(name, names, 1))]
        meant = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"{path}: got the columns {list(names)}, want also {missing}.{meant} Correct the column map.")


def _alike(name: str, files: Sequence[pathlib.Path], columns: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """The columns of all files as one, as text where the files give them different types."""
    if len({column.type for column in columns}) > 1:
        for path, column in zip(files, columns):
            if _is_list(column.type):
                different = next(c.type for c in columns if c.type != column.type)
                raise ValueError(
                    f"{path}, row 1: column {name!r} has the type {column.type}, and {different} in another file. "
                    "Write all files with one type."
                )
        columns = [_texts(column) for column in columns]
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)


def _are_dates(numbers: np.ndarray) -> bool:
    """Whether all numbers are dates such as 20231114, also with hours, minutes, seconds and milliseconds."""
    for below_day, parts in ((0, ()), (2, (24,)), (4, (60, 24)), (6, (60, 60, 24)), (9, (1000, 60, 60, 24))):
        day, rest = np.divmod(numbers, 10**below_day)
        year, month = day // 10000, day // 100 % 100
        fits = (year >= 1900) & (year < 2200) & (month >= 1) & (month <= 12) & (day % 100 >= 1) & (day % 100 <= 31)
        for limit in parts:
            rest, value = np.divmod(rest, 1000 if limit == 1000 else 100)
            fits &= value < limit
        if len(numbers) and fits.all():
            return True
    return False


def _known(values: pa.ChunkedArray) -> np.ndarray:
    return values.is_valid().to_numpy()


def _number(value: object) -> float | None:
    """The number of a value, NaN for a missing one, None for no number."""
    if value is None:
        return float("nan")
    with contextlib.suppress(TypeError, ValueError):
        text = str(value)
        return float(_NUMBERS.get(text.lower(), _NUMBERS.get(text, text)))
    return None


def _moment(value: object) -> int | None:
    """The integer, or the microseconds since 1970 of a text, 0 for a missing one, None for no time."""
    text = str(value or 0)
    with contextlib.suppress(ValueError):
        return None if _are_dates(np.array([int(text)])) else int(text)
    with contextlib.suppress(ValueError):
        moment = datetime.datetime.fromisoformat(text)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)).timestamp() * 1e6)
    return None
