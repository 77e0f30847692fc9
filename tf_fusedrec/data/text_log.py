"""Text logs as columns: one interaction a line, fields parted by a delimiter, plain or gzipped.

Ids are integers or strings; strings become their 64-bit fingerprints (fingerprint.py). A line that cannot be read is
named by its file and number, with its content and what was wanted in its place.
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
from typing import NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.csv

from tf_fusedrec.data.fingerprint import fingerprint_arrow

# What a field may hold, in the words of messages.
ID, INTEGER, NUMBER = "an id", "an integer", "a number"
_INT64 = range(-(1 << 63), 1 << 63)


class Log(NamedTuple):
    """The columns of a log and what their ids were."""

    columns: dict[str, np.ndarray]  # [N] each, in the order of the file; ID and INTEGER <int64>, NUMBER <float32>
    strings: dict[str, dict[int, str]]  # column of string ids -> the string of every fingerprint


@contextlib.contextmanager
def readable_text(path: pathlib.Path) -> Iterator[None]:
    """Turns what Arrow raises on a text file that is not what it should be into a ValueError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable as the log it should be ({error}). Check the file.") from error


def open_text(path: pathlib.Path) -> TextIO:
    """The file's text, unzipped where its name ends in .gz. Bytes that are no UTF-8 are read as U+FFFD."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace", newline="")
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def header_of(path: pathlib.Path) -> list[str]:
    """The column names in the first line of a CSV file."""
    try:
        with open_text(path) as file:
            return next(csv.reader(file), [])
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise ValueError(f"{path}: not readable as a CSV file ({error}). Check the file.") from error


def read_log(
    path: pathlib.Path, kinds: Mapping[str, str], *, delimiter: str = ",", header: Sequence[str] | None = None
) -> Log:
    """The named columns of a text file.

    Args:
      path: the file; gzipped where its name ends in .gz.
      kinds: column -> ID, INTEGER or NUMBER.
      delimiter: between fields: one character, or "::".
      header: the name of every field; None reads the names from the first line.

    Raises:
      ValueError: not readable; a column missing; a line with a field too many, too few, empty or of another kind; two
        string ids with one fingerprint. The message names the file, and the line where there is one.
    """
    try:
        try:
            table = _table(path, kinds, delimiter, header, pa.int64())
        except pa.ArrowException:  # perhaps ids that are strings
            table = _table(path, kinds, delimiter, header, pa.string())
        numbers = [table[name].to_numpy() for name, kind in kinds.items() if kind == NUMBER]
        if any(table[name].null_count for name in kinds) or not all(np.isfinite(column).all() for column in numbers):
            raise pa.ArrowInvalid("it has empty values")
    except (pa.ArrowException, OSError) as error:
        told = _first_bad_line(path, kinds, delimiter, header)
        raise ValueError(told or f"{path}: not readable as the log it should be ({error}). Check the file.") from error
    log = Log({}, {})
    for name, kind in kinds.items():
        if kind == ID:
            log.columns[name], strings = ids_of(path, name, table[name])
            if strings:
                log.strings[name] = strings
        else:
            log.columns[name] = table[name].to_numpy()
    return log


def ids_of(path: pathlib.Path, name: str, column: pa.ChunkedArray) -> tuple[np.ndarray, dict[int, str]]:
    """<int64>[N] ids, and {fingerprint: string}: empty where all ids are integers, which stay what they are."""
    with contextlib.suppress(pa.ArrowException):
        return column.cast(pa.int64()).to_numpy(), {}
    distinct = column.unique()
    strings = dict(zip(fingerprint_arrow(distinct).tolist(), distinct.to_pylist()))
    if len(strings) < len(distinct):
        raise ValueError(
            f"{path}: two ids of column {name!r} have one 64-bit fingerprint. Number the ids, and keep the list."
        )
    return np.concatenate([fingerprint_arrow(chunk) for chunk in column.chunks]), strings


def _table(
    path: pathlib.Path, kinds: Mapping[str, str], delimiter: str, header: Sequence[str] | None, of_ids: pa.DataType
) -> pa.Table:
    types = {ID: of_ids, INTEGER: pa.int64(), NUMBER: pa.float32()}
    # Split at every ":", each "::" has an empty field in its middle, whose name nobody asks for.
    parts = len(delimiter)
    fields = None if header is None else [name + ":" * n for name in header for n in range(parts)][: 1 - parts or None]
    return pa.csv.read_csv(
        path,
        read_options=pa.csv.ReadOptions(column_names=fields),
        parse_options=pa.csv.ParseOptions(delimiter=delimiter[0]),
        convert_options=pa.csv.ConvertOptions(
            include_columns=list(kinds),
            column_types={name: types[kind] for name, kind in kinds.items()},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _first_bad_line(
    path: pathlib.Path, kinds: Mapping[str, str], delimiter: str, header: Sequence[str] | None
) -> str | None:
    """The message on the first line that is not as it should be; None where every line is."""
    line = 0
    try:
        with open_text(path) as file:
            for line, fields in _lines(file, delimiter):
                if header is None:
                    header = fields
                    missing = [name for name in kinds if name not in fields]
                    if missing:
                        return f"{path}, line {line}: got the columns {fields}, wanted also {missing}. Name them there."
                elif wrong := _wrong(fields, header, kinds, delimiter):
                    return f"{path}, line {line}: {wrong}. Correct the line or remove it."
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        return f"{path}: not readable as text ({error}). The file is damaged or was cut short: get it again."
    return None if line else f"{path}: got an empty file, wanted {delimiter.join(kinds)}. Check the file."


def _lines(file: TextIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Number, from 1, and fields of every line that is not blank."""
    if len(delimiter) == 1:
        reader = csv.reader(file, delimiter=delimiter)
        yield from ((reader.line_num, fields) for fields in reader if fields)
    else:
        lines = ((number, line.rstrip("\r\n")) for number, line in enumerate(file, start=1))
        yield from ((number, line.split(delimiter)) for number, line in lines if line)


def _wrong(fields: Sequence[str], header: Sequence[str], kinds: Mapping[str, str], delimiter: str) -> str:
    """What came and what was wanted; "" for a line that is right."""
    if len(fields) != len(header):
        return f"got {len(fields)} fields, {delimiter.join(fields)!r}, wanted {len(header)}: {delimiter.join(header)}"
    for name, text in zip(header, fields):
        if name in kinds and not _is(kinds[name], text):
            return f"got {name} {text!r}, wanted {kinds[name]}"
    return ""


def _is(kind: str, text: str) -> bool:
    if kind == INTEGER:
        return re.fullmatch(r"-?\d+", text) is not None and int(text) in _INT64
    if kind == NUMBER:
        with contextlib.suppress(ValueError):
            return math.isfinite(float(text))
        return False
    return text != ""
