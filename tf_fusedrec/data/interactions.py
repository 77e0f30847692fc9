"""Logs as interactions: one row per (user, item, time), in order, before they become one row per user.

Shared by the converters: reading a text log, the stable order, and cutting each user's sequence.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import csv


@contextlib.contextmanager
def readable_text(path: pathlib.Path) -> Iterator[None]:
    """Turns what Arrow raises on a text file that is not what it should be into a ValueError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable as the log it should be ({error}). Check the file.") from error


def read_log(path: pathlib.Path, types: Mapping[str, pa.DataType]) -> dict[str, np.ndarray]:
    """The named columns of a CSV file (or .csv.gz) with a header, as arrays [N] in the order of the file.

    Raises:
      ValueError: not readable, a column missing, or a value that is missing or not of its type; names the file.
    """
    options = csv.ConvertOptions(include_columns=list(types), column_types=dict(types))
    with readable_text(path):
        return _arrays(path, csv.read_csv(path, convert_options=options))


def read_double_colon(path: pathlib.Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The int64 columns of a `1::2::3` file without header (MovieLens), as arrays [N] in the order of the file."""
    # Split at every ":", each "::" has an empty field in its middle; those have no name that is asked for.
    fields = [name for column in names for name in (column, f"{column}::")][:-1]
    with readable_text(path):
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(column_names=fields),
            parse_options=csv.ParseOptions(delimiter=":"),
            convert_options=csv.ConvertOptions(
                include_columns=list(names), column_types={name: pa.int64() for name in names}
            ),
        )
        return _arrays(path, table)


def by_user_and_time(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """<int64>[N] stable order by (user, time): equal times keep the order of the file."""
    return np.lexsort((time, user))


def _arrays(path: pathlib.Path, table: pa.Table) -> dict[str, np.ndarray]:
    for name in table.column_names:
        if table[name].null_count:
            raise ValueError(
                f"{path}: column {name!r} has {table[name].null_count} empty values. Fill them or drop those rows."
            )
    return {name: table[name].to_numpy() for name in table.column_names}
