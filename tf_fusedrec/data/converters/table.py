"""Converter of any folder of CSV or Parquet files with one event per row to the ranking layout, by a column map."""

from __future__ import annotations

import pathlib

import numpy as np

from tf_fusedrec.data.bad_input import BadInput
from tf_fusedrec.data.converters.events import Events, Window, write_events
from tf_fusedrec.data.converters.interactions import by_user_and_time, seconds_of
from tf_fusedrec.data.converters.past import first_of_run
from tf_fusedrec.data.converters.table_files import TableFiles
from tf_fusedrec.data.converters.table_map import ColumnMap
from tf_fusedrec.data.layouts import DatasetInfo
from tf_fusedrec.data.rows import Ragged, Values


def convert_table(
    source: str | pathlib.Path,
    output: str | pathlib.Path,
    columns: ColumnMap,
    *,
    held_out: str = "test",
    window: Window | None = None,
    bad_rows: str = "error",
) -> DatasetInfo:
    """Writes the ranking layout of a table of events. events.py describes the rows, the split and the columns.

    The id of a value depends on this value alone; table_map.py has the rule. A missing id is -1. A missing number is
    NaN. history_action has one bit for each label, in the order of the map.

    Args:
      source: Folder of *.parquet or of *.csv(.gz) files, or one file.
      output: Folder to make.
      columns: Roles of the columns.
      held_out: Part in the folder test, one of events.HELD_OUT.
      window: Sizes of rows and parts.
      bad_rows: "error" refuses a row without user, item, time or label, with a label other than 0 and 1, or with text
        in a column of numbers; "skip" omits and logs such rows.

    Raises:
      ValueError: a file lacks a column or is unreadable; a column has no value, or the same everywhere; a user has two
        values of a context column; with columns.order "file", the times of a user decrease, or its rows lie in two
        files; write_events refuses the data. The message names file and row.
    """
    path = pathlib.Path(source)
    if not path.exists():
        raise ValueError(f"input {str(source)!r} does not exist, want a folder of *.parquet or *.csv(.gz) files.")
    table = TableFiles(path, columns.columns(), BadInput(bad_rows), columns.kinds)
    user, user_strings = table.ids(columns.user, required=True)
    item, item_strings = table.ids(columns.item, required=True)
    raw = table.times(columns.time)
    labels = {name: table.labels(column) for name, column in columns.labels.items()}
    features: dict[str, Values] = {name: table.ids(column)[0] for name, column in columns.features.items()}
    features |= {name: table.lists(column)[0] for name, column in columns.lists.items()}
    features |= {name: table.numbers(column) for name, column in columns.numbers.items()}
    outcomes = {name: table.numbers(column) for name, column in columns.outcomes.items()}
    context: dict[str, np.ndarray] = {name: table.ids(column)[0] for name, column in columns.context.items()}
    context |= {name: table.numbers(column) for name, column in columns.context_numbers.items()}

    rows = np.flatnonzero(table.good)
    if not len(rows):
        raise ValueError(f"{path}: got no usable row of {table.num_rows}. The log names the faults.")
    if columns.order == "file":
        _check_order(table, columns, user, raw, rows)
    time, unit = seconds_of(path, raw[rows])
    rows = rows[by_user_and_time(user[rows], raw[rows])]
    seconds = np.zeros(table.num_rows, np.int64)
    seconds[np.flatnonzero(table.good)] = time
    said = [f"table, {path.name}, {len(table.files)} files, {len(rows)} of {table.num_rows} rows"]
    said += [f"{columns.user} strings as fingerprints"] if user_strings else []
    said += [f"{columns.item} strings as fingerprints"] if item_strings else []
    said += [f"{columns.time} in {unit} cut to seconds"] if unit else []
    bits = [label.astype(np.int64) << bit for bit, label in enumerate(labels.values())]
    return write_events(
        output,
        Events(
            user=user[rows],
            time=seconds[rows],
            item=item[rows],
            action=np.sum(bits, axis=0)[rows],
            labels={name: label[rows] for name, label in labels.items()},
            context=_of_users(table, columns, context, user, rows),
            features={name: x.take(rows) if isinstance(x, Ragged) else x[rows] for name, x in features.items()},
            outcomes={name: numbers[rows] for name, numbers in outcomes.items()},
            crossed=columns.past,
        ),
        path=path,
        source=", ".join(said),
        held_out=held_out,
        window=window,
        item_strings=item_strings or None,
        id_kinds={name: columns.kinds[column] for name, column in columns.ids().items() if column in columns.kinds},
    )


def _check_order(table: TableFiles, columns: ColumnMap, user: np.ndarray, time: np.ndarray, rows: np.ndarray) -> None:
    """Refuses users with rows in two files, or with times that decrease in the order of the file."""
    ordered = rows[np.argsort(user[rows], kind="stable")]
    same = user[ordered[1:]] == user[ordered[:-1]]
    file = table.file_of(ordered)
    remedy = "Correct the files, or set columns.order to any, which gathers and sorts the rows of each user."
    for bad, what in (
        (same & (file[1:] != file[:-1]), f"its column {columns.user!r} has a user of"),
        (same & (time[ordered[1:]] < time[ordered[:-1]]), f"its column {columns.time!r} has an earlier time than"),
    ):
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            here, before = table.place(int(ordered[at + 1])), table.place(int(ordered[at]))
            raise ValueError(f"{here}: {what} {before}, {int(bad.sum())} such rows in all. {remedy}")


def _of_users(
    table: TableFiles, columns: ColumnMap, context: dict[str, np.ndarray], user: np.ndarray, rows: np.ndarray
) -> dict[str, Values]:
    """The value of each user, ascending, of columns of the table. `rows` are sorted by user."""
    first = first_of_run(user[rows])
    found: dict[str, Values] = {}
    for name, values in context.items():
        own, of_first = values[rows], values[rows][first]
        bad = np.flatnonzero((own != of_first) & ~(np.isnan(own * 1.0) & np.isnan(of_first * 1.0)))
        if len(bad):
            here, there = table.place(int(rows[bad[0]])), table.place(int(rows[first[bad[0]]]))
            column = {**columns.context, **columns.context_numbers}[name]
            raise ValueError(
                f"{here}: column {column!r} is context and differs from {there}, of the same user. Make it a feature "
                "or a number of the event."
            )
        found[name] = own[np.unique(first)]
    return found
