"""Converts any folder of CSV or Parquet files with one event per row to the ranking or the retrieval layout.

A column map (ColumnMap) names the columns of the user, the item, the labels and so on:

user: customer                     names of columns in the files
item: sku
time: seen_at                      seconds (or finer) since 1970, a date, or text like 2024-05-01 12:30:00
labels: {click: clicked}           name for the model: column in the files; 0 or 1
context: {city: town}              ids of the user: integers or text
context_numbers: [age]             a list keeps the names of the files
features: [brand]                  ids of the event or its item
lists: {tag: tags}                 several ids: a list, or text with | between the ids
numbers: [price]                   numbers of the event, known before it
outcomes: [seconds_watched]        numbers of the event, known after it: only for the history
past: [brand]                      features with counts and label rates of the past
kinds: {sku: string}               columns of ids. string: an id is the fingerprint of its text. integer: other text is
                                   refused. Without a kind, 12 and 12.0 are the id 12 in every type of
                                   column, and text that is no int64 (A7, 007) is its fingerprint.
order: file                        file: a user's rows are in one file, by time; any: rows are sorted

The retrieval layout has only user, item and time.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec.data.columns import BadInput
from tf_fusedrec.data.rows import Ragged, Values
from tf_fusedrec.models.data_sets.events import Events, Window, first_of_run, write_events
from tf_fusedrec.models.data_sets.interactions import (
    Interactions,
    by_user_and_time,
    seconds_of,
    write_last_held_out,
)
from tf_fusedrec.models.data_sets.layouts import REQUEST, DatasetInfo
from tf_fusedrec.models.data_sets.table_files import TableColumns, TableFiles

_EXAMPLES = 3  # events of its history


def convert_table(
    source: str | pathlib.Path,
    output: str | pathlib.Path,
    columns: ColumnMap,
    *,
    held_out: str = "test",
    window: Window | None = None,
    bad_rows: str = "error",
    earlier: Sequence[str | pathlib.Path] = (),
    texts: int = 1_000_000,
) -> DatasetInfo:
    """Writes the ranking layout of a table of events. events.py describes the rows, the split and the columns.

    The id of a value depends on this value only; ColumnMap has the rule. A missing id is -1. A missing number is
    NaN. history_action has one bit for each label, in the order of the map.

    Args:
      source: Folder of *.parquet or of *.csv(.gz) files, or one file.
      output: Folder to make.
      columns: Roles of the columns.
      held_out: Held-out parts, one of events.HELD_OUT.
      window: Sizes of rows and parts.
      earlier: Sources of earlier days. Their events are history, and count in the past, but are in no part.
      texts: Most texts of a column of ids that strings.parquet keeps: those of the most events.
      bad_rows: "error" refuses a row without user, item, time or label, with a label other than 0 and 1, or with text
        in a column of numbers; "skip" omits and logs such rows.

    Raises:
      ValueError: a file lacks a column or is unreadable; a column has no value, or the same everywhere; a user has two
        values of a context column; with columns.order "file", the times of a user decrease, or its rows are in two
        files; write_events refuses the data. The message names file and row.
    """
    columns.check_task("ranking")
    path = pathlib.Path(source)
    sources = [*map(pathlib.Path, earlier), path]
    for missing in [each for each in sources if not each.exists()]:
        raise ValueError(f"input {str(missing)!r} does not exist, want a folder of *.parquet or *.csv(.gz) files.")
    table = TableFiles(sources, columns.columns(), BadInput(bad_rows), columns.kinds)
    user, user_strings = table.ids(columns.user, required=True)
    strings: dict[str, tuple[Values, dict[int, str]]] = {"user_id": (user, user_strings)}
    raw = table.times(columns.time)
    labels = {name: table.labels(column) for name, column in columns.labels.items()}
    item, features, of_items = items_of(table, columns)
    strings |= {name: (item if name == "item" else features[name], texts) for name, texts in of_items.items()}
    outcomes = {name: table.numbers(column) for name, column in columns.outcomes.items()}
    of_context = {name: table.ids(column) for name, column in columns.context.items()}
    strings |= of_context
    context: dict[str, np.ndarray] = {name: ids for name, (ids, _) in of_context.items()}
    context |= {name: table.numbers(column) for name, column in columns.context_numbers.items()}

    rows, seconds, unit = _sorted_rows(table, path, columns, user, raw, columns.order == "file" and not earlier)
    said = _about(table, path, columns, len(rows), unit, bool(user_strings), bool(of_items["item"]))
    said += [f"{len(earlier)} earlier source{'s' * (len(earlier) > 1)} as history"] if earlier else []
    bits = [label.astype(np.int64) << bit for bit, label in enumerate(labels.values())]
    info = write_events(
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
            shown=np.isin(table.file_of(rows), np.flatnonzero(_is_below(path, table.files))) if earlier else None,
        ),
        path=path,
        source=", ".join(said),
        held_out=held_out,
        window=window,
        strings={name: _most_frequent(*of_name, texts) for name, of_name in strings.items()},
        id_kinds=columns.kinds_by_name(),
    )
    request = example_request(table, columns, rows, user[rows], seconds[rows])
    (pathlib.Path(output) / REQUEST).write_text(json.dumps(request, indent=1) + "\n", encoding="utf-8")
    return info


def convert_table_sequences(
    source: str | pathlib.Path,
    output: str | pathlib.Path,
    columns: ColumnMap,
    *,
    held_out: str = "test",
    bad_rows: str = "error",
    texts: int = 1_000_000,
) -> DatasetInfo:
    """Writes the retrieval layout of the users, items and times of a table. Arguments and errors as for convert_table.

    `held_out` is one of interactions.LAST_HELD_OUT.
    """
    columns.check_task("retrieval")
    path = pathlib.Path(source)
    table = TableFiles([path], columns.columns(), BadInput(bad_rows), columns.kinds)
    user, user_strings = table.ids(columns.user, required=True)
    item, item_strings = table.ids(columns.item, required=True)
    raw = table.times(columns.time)
    rows, seconds, unit = _sorted_rows(table, path, columns, user, raw, columns.order == "file")
    return write_last_held_out(
        output,
        Interactions(user[rows], item[rows], seconds[rows]),
        path=path,
        source=", ".join(_about(table, path, columns, len(rows), unit, bool(user_strings), bool(item_strings))),
        strings={
            "user_id": _most_frequent(user, user_strings, texts),
            "item": _most_frequent(item, item_strings, texts),
        },
        id_kinds=columns.kinds_by_name(),
        names=(columns.item, columns.time),
        held_out=held_out,
    )


def _sorted_rows(
    table: TableFiles, path: pathlib.Path, columns: ColumnMap, user: np.ndarray, raw: np.ndarray, in_order: bool
) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the usable rows by user and time, the seconds <int64>[N] of all rows, and the unit of finer times `raw`.

    `in_order` refuses users whose rows are not in the order of time.
    """
    good = np.flatnonzero(table.good)
    if not len(good):
        raise ValueError(f"{path}: got no usable row of {table.num_rows}. The log names the faults.")
    if in_order:
        _check_order(table, columns, user, raw, good)
    seconds = np.zeros(table.num_rows, np.int64)
    seconds[good], unit = seconds_of(path, raw[good])
    return good[by_user_and_time(user[good], raw[good])], seconds, unit


def _about(
    table: TableFiles, path: pathlib.Path, columns: ColumnMap, rows: int, unit: str, user_texts: bool, item_texts: bool
) -> list[str]:
    """Returns words about the source for dataset.json."""
    files = "1 file" if len(table.files) == 1 else f"{len(table.files)} files"
    said = [f"table, {path.name}, {files}, {rows} of {table.num_rows} rows"]
    said += [f"{columns.user} strings as fingerprints"] if user_texts else []
    said += [f"{columns.item} strings as fingerprints"] if item_texts else []
    return said + ([f"{columns.time} in {unit} cut to seconds"] if unit else [])


def example_request(
    table: TableColumns, columns: ColumnMap, rows: np.ndarray, user: np.ndarray, seconds: np.ndarray
) -> dict[str, Any]:
    """A request in the table's own columns (serve/user_columns.py): a user's last event, after the events before it.

    Args:
      table, columns: The table.
      rows: <int64>[N], rows of the events in the order of user and time.
      user, seconds: <int64>[N], user and time of each event.
    """
    begins = first_of_run(user)
    events = np.flatnonzero(begins == np.bincount(begins).argmax())  # of the user with the most events
    last = int(events[-1])
    earlier = events[seconds[events] < seconds[last]][-_EXAMPLES:]
    candidates = [last, *np.flatnonzero(user != user[last])[-1:].tolist()]

    def row(at: int, *names: str) -> dict[str, Any]:
        values = {name: table.value(name, int(rows[at])) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    of_event = [columns.item, *columns.features.values(), *columns.lists.values(), *columns.numbers.values()]
    past = [*of_event, columns.time, *columns.labels.values(), *columns.outcomes.values()]
    instance = row(last, columns.user, columns.time, *columns.context.values(), *columns.context_numbers.values())
    instance["history"] = [row(at, *dict.fromkeys(past)) for at in earlier.tolist()]
    instance["exposed"] = [row(at, *of_event) for at in candidates]
    return {"signature_name": "columns", "instances": [instance]}


def _is_below(path: pathlib.Path, files: Sequence[pathlib.Path]) -> np.ndarray:
    """Mask <bool>[files] of the files of a source."""
    return np.array([path in (file, file.parent) for file in files])


def _most_frequent(ids: Values, texts: dict[int, str], most: int) -> dict[int, str]:
    """At most `most` of the texts, those of the most frequent ids."""
    if len(texts) <= most:
        return texts
    distinct, counts = np.unique(ids.values if isinstance(ids, Ragged) else ids, return_counts=True)
    is_text = np.isin(distinct, np.fromiter(texts, np.int64, len(texts)))
    kept = distinct[is_text][np.argsort(-counts[is_text], kind="stable")[:most]]
    return {each: texts[each] for each in kept.tolist()}


def items_of(
    table: TableColumns, columns: ColumnMap
) -> tuple[np.ndarray, dict[str, Values], dict[str, dict[int, str]]]:
    """The item <int64>[N] and the features of each event, and by name the strings of fingerprints."""
    strings: dict[str, dict[int, str]] = {}
    features: dict[str, Values] = {}
    item, strings["item"] = table.ids(columns.item, required=True)
    for name, column in columns.features.items():
        features[name], strings[name] = table.ids(column)
    for name, column in columns.lists.items():
        features[name], strings[name] = table.lists(column)
    features |= {name: table.numbers(column) for name, column in columns.numbers.items()}
    return item, features, strings


def _check_order(table: TableFiles, columns: ColumnMap, user: np.ndarray, time: np.ndarray, rows: np.ndarray) -> None:
    """Refuses users with rows in two files, or with times that decrease in the order of the file."""
    ordered = rows[np.argsort(user[rows], kind="stable")]
    same = user[ordered[1:]] == user[ordered[:-1]]
    file = table.file_of(ordered)
    remedy = "Correct the files, or set columns.order to any, which gathers and sorts the rows of each user."
    for bad, fault in (
        (same & (file[1:] != file[:-1]), f"its column {columns.user!r} has a user of"),
        (same & (time[ordered[1:]] < time[ordered[:-1]]), f"its column {columns.time!r} has an earlier time than"),
    ):
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            here, before = table.place(int(ordered[at + 1])), table.place(int(ordered[at]))
            raise ValueError(f"{here}: {fault} {before}, {int(bad.sum())} such rows in all. {remedy}")


def _of_users(
    table: TableFiles, columns: ColumnMap, context: dict[str, np.ndarray], user: np.ndarray, rows: np.ndarray
) -> dict[str, Values]:
    """The value of each user, ascending, of columns of the table. `rows` are sorted by user."""
    first = first_of_run(user[rows])
    by_user: dict[str, Values] = {}
    for name, values in context.items():
        row_values = values[rows]
        expected = row_values[first]
        bad = np.flatnonzero((row_values != expected) & ~(np.isnan(row_values * 1.0) & np.isnan(expected * 1.0)))
        if len(bad):
            here, there = table.place(int(rows[bad[0]])), table.place(int(rows[first[bad[0]]]))
            column = {**columns.context, **columns.context_numbers}[name]
            raise ValueError(
                f"{here}: column {column!r} is context and differs from {there}, of the same user. Make it a feature "
                "or a number of the event."
            )
        by_user[name] = row_values[np.unique(first)]
    return by_user


ORDERS = ("file", "any")
UNKNOWN = "???"  # stands where `fusedrec new` knows no column
KINDS = ("integer", "string")
_OF_RETRIEVAL = ("user", "item", "time", "kinds", "order")
_RESERVED = ("item", "time", "action", "user_id", "hour")


@dataclasses.dataclass(frozen=True)
class ColumnMap:
    """Columns of a table of events; see the head of this file.

    Raises:
      ValueError: a name is given twice or reserved; a column is UNKNOWN; `past` names no feature, or `kinds` no column
        of ids; a kind or order is unknown.
    """

    user: str
    item: str
    time: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    context_numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lists: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    outcomes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    past: tuple[str, ...] = ()
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    order: str = "file"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"columns.order must be one of {list(ORDERS)}, got {self.order!r}.")
        for group in (("context", "context_numbers"), ("features", "lists", "numbers", "outcomes", "labels")):
            names = [name for field in group for name in getattr(self, field)]
            for name in names:
                if names.count(name) > 1 or is_reserved(name):
                    raise ValueError(
                        f"columns has the name {name!r} twice in {list(group)}, or it is one of {list(_RESERVED)} or "
                        "begins with past_. Choose another name for the model."
                    )
        if role := self.columns().get(UNKNOWN):
            raise ValueError(f"columns has {UNKNOWN} for the {role}. Name a column of the files.")
        for name in self.past:
            if name not in (*self.features, *self.lists):
                raise ValueError(
                    f"columns.past names {name!r}, want one of the features {[*self.features, *self.lists]}."
                )

        ids = self.ids()
        for column, type_ in self.kinds.items():
            if column not in ids.values() or type_ not in KINDS:
                raise ValueError(
                    f"columns.kinds has {column}: {type_}, want a column of ids, one of {sorted(set(ids.values()))}, "
                    f"and one of {list(KINDS)}."
                )

    def check_task(self, task: str) -> None:
        """Raises ValueError unless a table of a task has these roles."""
        if task == "ranking" and not self.labels:
            raise ValueError("data.columns.labels names no label, want at least one, such as {click: clicked}.")
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        unread = [name for name, value in fields.items() if value and name not in _OF_RETRIEVAL]
        if task == "retrieval" and unread:
            raise ValueError(f"data.columns.{unread[0]} is for the task 'ranking', but task is 'retrieval'. Remove it.")

    def kinds_by_name(self) -> dict[str, str]:
        """Returns the kind of each name of ids that has one."""
        return {name: self.kinds[column] for name, column in self.ids().items() if column in self.kinds}

    def ids(self) -> dict[str, str]:
        """Returns the column of the files for each name of ids of the model."""
        return {"user_id": self.user, "item": self.item, **self.context, **self.features, **self.lists}

    def columns(self) -> dict[str, str]:
        """Returns the role of each column of the files, in the words of messages."""
        roles = {self.user: "user", self.item: "item", self.time: "time"}
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if isinstance(values, Mapping) and field.name != "kinds":
                roles |= {column: f"{field.name} {name!r}" for name, column in values.items() if column not in roles}
        return roles


def is_reserved(name: str) -> bool:
    """Whether columns of our layout have this name, so that no feature or label can."""
    return name in _RESERVED or name.startswith("past_")


def column_map(section: Mapping[str, Any], where: str = "data.columns") -> ColumnMap:
    """The record of a section of YAML, which messages call `where`."""
    fields = [field.name for field in dataclasses.fields(ColumnMap)]
    unknown = sorted(set(section) - set(fields))
    if unknown:
        raise ValueError(f"{where} names {unknown}, and a column map takes {fields}. Remove the others.")
    missing = [name for name in ("user", "item", "time") if name not in section]
    if missing:
        raise ValueError(f"{where} lacks {missing}. Name these columns of the files, such as user: customer.")
    values: dict[str, Any] = {}
    for name, value in section.items():
        if name in ("user", "item", "time", "order"):
            expected, is_good = "a name", isinstance(value, str)
        else:
            if isinstance(value, (list, tuple)) and all(isinstance(column, str) for column in value):
                value = {column: column for column in value}
            expected, value = "a list of names, or {name: column}", {} if value is None else value
            is_good = isinstance(value, Mapping) and all(isinstance(x, str) for pair in value.items() for x in pair)
        if not is_good:
            raise ValueError(f"{where}.{name} must be {expected}, got {section[name]!r}.")
        values[name] = tuple(value) if name == "past" else value
    try:
        return ColumnMap(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
