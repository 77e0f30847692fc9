"""Reads text logs as columns: one interaction per line, fields separated by a delimiter, plain or gzipped.

The text of an int64 is that id; any other text becomes its 64-bit fingerprint (fingerprint.py). The error for an
unreadable line gives its file, number, contents and the wanted form.

`numbered` makes codes of a column's values: code 0 means missing, the sorted values count from 1.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import math
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from tf_fusedrec.data.columns import FLOAT_TEXT, INT64_TEXT
from tf_fusedrec.data.rows import Ragged, splits_of

# Kinds of fields, in the words of messages.
ID, INTEGER, NUMBER = "an id", "an integer", "a number"
_INT64 = range(-(1 << 63), 1 << 63)


class Log(NamedTuple):
    """The columns of a log and its original string ids."""

    columns: dict[str, np.ndarray]  # [N] each, in file order; <int64> for ID and INTEGER, <float32> for NUMBER
    strings: dict[str, dict[int, str]]  # for each column with fingerprints, the string of each of them


@contextlib.contextmanager
def readable_text(path: pathlib.Path) -> Iterator[None]:
    """Turns Arrow's errors for a text file into a ValueError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable as a log ({error}). Check the file.") from error


def open_text(path: pathlib.Path) -> TextIO:
    """Opens a text file, and unzips it if its name ends in .gz. Bytes that are not UTF-8 are read as U+FFFD."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace", newline="")
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def header_of(path: pathlib.Path) -> list[str]:
    """Column names from the first line of a CSV file."""
    try:
        with open_text(path) as file:
            return next(csv.reader(file), [])
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise ValueError(f"{path}: not readable as a CSV file ({error}). Check the file.") from error


def read_log(
    path: pathlib.Path, kinds: Mapping[str, str], *, delimiter: str = ",", header: Sequence[str] | None = None
) -> Log:
    """Reads named columns of a text file.

    Args:
      path: Path of the file, gzipped if it ends in .gz.
      kinds: By column, its kind: ID, INTEGER or NUMBER.
      delimiter: Delimiter between fields, one character or "::".
      header: Names of all fields; None reads them from the first line.

    A refusal names the file and, if known, the line.
    """
    try:
        table = _table(path, kinds, delimiter, header)
        numbers = [table[name].to_numpy() for name, type_ in kinds.items() if type_ == NUMBER]
        if any(table[name].null_count for name in kinds) or not all(np.isfinite(column).all() for column in numbers):
            raise pa.ArrowInvalid("it has empty values")
    except (pa.ArrowException, OSError) as error:
        message = _first_bad_line(path, kinds, delimiter, header)
        raise ValueError(message or f"{path}: not readable as a log ({error}). Check the file.") from error
    log = Log({}, {})
    for name, type_ in kinds.items():
        if type_ == ID:
            ids = table[name]
            if integers_of(ids) is None:  # Blanks around an integer do not count, as for INTEGER.
                plain = pc.utf8_trim_whitespace(ids)
                ids = pc.if_else(pc.match_substring_regex(plain, INT64_TEXT), plain, ids)
            log.columns[name], strings = ids_of(path, name, ids)
            if strings:
                log.strings[name] = strings
        else:
            log.columns[name] = table[name].to_numpy()
    return log


def ids_of(
    path: pathlib.Path, name: str, column: pa.ChunkedArray, *, integers: bool = True
) -> tuple[np.ndarray, dict[int, str]]:
    """Ids <int64>[N] of a column of integers or strings without nulls, and {fingerprint: string}.

    An id depends on its own text only, so one text in a column changes no other id.

    integers=False makes fingerprints of all strings, as for hash_strings. Two texts with the same id are refused.
    """
    from tf_fusedrec.data.fingerprint import fingerprint_arrow  # loads TensorFlow

    if integers and (numbers := integers_of(column)) is not None:
        return numbers, {}
    column = column.cast(pa.string())
    is_int64, ids = np.zeros(len(column), bool), np.empty(len(column), np.int64)
    if integers:
        plain = pc.replace_substring_regex(column, FLOAT_TEXT, r"\1", max_replacements=1)
        is_int64 = pc.match_substring_regex(plain, INT64_TEXT).to_numpy()
        ids[is_int64] = plain.filter(pa.array(is_int64)).cast(pa.int64()).to_numpy()
    texts = column.filter(pa.array(~is_int64))
    distinct = texts.unique()
    strings = dict(zip(fingerprint_arrow(distinct).tolist(), distinct.to_pylist()))
    if len(strings) < len(distinct) or np.isin(ids[is_int64], [*strings]).any():
        raise ValueError(
            f"{path}: two ids of column {name!r} share a 64-bit fingerprint. Number the ids, and keep the list."
        )
    ids[~is_int64] = np.concatenate([fingerprint_arrow(chunk) for chunk in texts.chunks] or [np.empty(0, np.int64)])
    return ids, strings


def integers_of(column: pa.ChunkedArray) -> np.ndarray | None:
    """The column <int64>[N] if every value is an integer, or the text of one as str() writes it; else None."""
    try:  # A cast is ten times as fast as a regular expression.
        numbers = column.cast(pa.int64())
        same = pa.types.is_integer(column.type) or numbers.cast(pa.string()).equals(column)
    except pa.ArrowException:
        return None
    return numbers.to_numpy() if same else None


def _table(path: pathlib.Path, kinds: Mapping[str, str], delimiter: str, header: Sequence[str] | None) -> pa.Table:
    types = {ID: pa.string(), INTEGER: pa.int64(), NUMBER: pa.float32()}
    # Arrow splits at every ":", so each "::" has an empty field in its middle. Its column is not read.
    parts = len(delimiter)
    fields = None if header is None else [name + ":" * n for name in header for n in range(parts)][: 1 - parts or None]
    return pa.csv.read_csv(
        path,
        read_options=pa.csv.ReadOptions(column_names=fields),
        parse_options=pa.csv.ParseOptions(delimiter=delimiter[0]),
        convert_options=pa.csv.ConvertOptions(
            include_columns=list(kinds),
            column_types={name: types[type_] for name, type_ in kinds.items()},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _first_bad_line(
    path: pathlib.Path, kinds: Mapping[str, str], delimiter: str, header: Sequence[str] | None
) -> str | None:
    """Error message for the first bad line; None if all lines are good."""
    line = 0
    try:
        with open_text(path) as file:
            for line, fields in _lines(file, delimiter):
                if header is None:
                    header = fields
                    missing = [name for name in kinds if name not in fields]
                    if missing:
                        return f"{path}, line {line}: got the columns {fields}, want also {missing}. Add their names."
                elif wrong := _wrong(fields, header, kinds, delimiter):
                    return f"{path}, line {line}: {wrong}. Correct the line or remove it."
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        return f"{path}: not readable as text ({error}). The file is damaged or was cut short: get it again."
    return None if line else f"{path}: got an empty file, want {delimiter.join(kinds)}. Check the file."


def _lines(file: TextIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the number, from 1, and the fields of every line that is not blank."""
    if len(delimiter) == 1:
        reader = csv.reader(file, delimiter=delimiter)
        yield from ((reader.line_num, fields) for fields in reader if fields)
    else:
        lines = ((number, line.rstrip("\r\n")) for number, line in enumerate(file, start=1))
        yield from ((number, line.split(delimiter)) for number, line in lines if line)


def _wrong(fields: Sequence[str], header: Sequence[str], kinds: Mapping[str, str], delimiter: str) -> str:
    """Error message with the actual and wanted contents of a line; "" for a good line."""
    if len(fields) != len(header):
        return f"got {len(fields)} fields, {delimiter.join(fields)!r}, want {len(header)}: {delimiter.join(header)}"
    for name, text in zip(header, fields):
        if name in kinds and not _is(kinds[name], text):
            return f"got {name} {text!r}, want {kinds[name]}"
    return ""


def _is(type_: str, text: str) -> bool:
    if type_ == INTEGER:
        return re.fullmatch(r"-?\d+", text) is not None and int(text) in _INT64
    if type_ == NUMBER:
        with contextlib.suppress(ValueError):
            return math.isfinite(float(text))
        return False
    return text != ""


def numbered(values: Sequence[Any]) -> tuple[np.ndarray, list]:
    """Codes <int64>[N] of values, None being missing, and the sorted values of the codes 1, 2, ..."""
    distinct = sorted({value for value in values if value is not None})
    code_of = {value: code for code, value in enumerate(distinct, start=1)}
    return np.array([code_of.get(value, 0) for value in values], np.int64), distinct


def numbered_lists(values: Sequence[Sequence[str]]) -> tuple[Ragged, list[str]]:
    """Codes of lists of values, one row for each list, and the sorted values of the codes 1, 2, ..."""
    flat, distinct = numbered([value for row in values for value in row])
    return Ragged(flat, splits_of(np.array([len(row) for row in values], np.int64))), distinct
