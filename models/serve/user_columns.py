"""Turns requests in the columns of a table of events into inputs of an export.

{"signature_name": "columns", "instances": [
  {"customer": "ann", "seen_at": "2024-05-01 12:30:00", "town": "Rome",
   "history": [{"sku": "A7", "seen_at": "2024-04-30 08:00:00", "price": 3.5, "clicked": 1}],
   "exposed": [{"sku": "B2", "price": null}, {"sku": "C3", "price": 2}]}]}
->  {"predictions": [{"click": [0.21, 0.34]}]}

An instance is a user at one moment, with the user's earlier events and the candidates of that moment. A value that is
null or left out is missing. The functions that convert the training data read the values, so a text has the id, and a
candidate the counts and rates of the past, that it would have there.

A retrieval model searches its own candidates, and takes only item and time of the earlier events:

{"signature_name": "columns", "instances": [
  {"time": 1714566600, "history": [{"item": "A7", "time": 1714464000}], "k": 2}]}
->  {"predictions": [{"ids": [12, 31], "items": ["B2", "C3"], "scores": [0.5, 0.25]}]}
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.columns import BadInput
from tf_fusedrec.data.rows import Ragged, Values, splits_of
from tf_fusedrec.models.data_sets.events import Events, columns_of_events
from tf_fusedrec.models.data_sets.interactions import seconds_of
from tf_fusedrec.models.data_sets.table import ColumnMap, column_map, items_of
from tf_fusedrec.models.data_sets.table_files import LIST_SEPARATOR, TableColumns
from tf_fusedrec.models.serve.loaded import RequestError

ROLES = ("history", "exposed")
_REQUEST = pathlib.Path("request")  # the place of all values, in messages
_ITEMS = 10  # k of a request that names none

Parts = dict[str, tuple[list[dict], list[str], list[int]]]  # rows, places and instances by role


class Read(NamedTuple):
    """The inputs of an export, and the rows of the answer."""

    inputs: dict[str, np.ndarray]
    exposed_splits: np.ndarray | None  # <int64>[instances + 1]; None: each instance has a row in every output


class UserColumns:
    """The columns of the table that a model was trained on.

    Args:
      columns: The section data.columns of the experiment.
      tasks: Name for the user of each output of a ranking model; {}: a retrieval model.

    Attributes:
      signature: Signature of the export that answers.
    """

    def __init__(self, columns: Mapping[str, Any], tasks: Mapping[str, str]):
        self.tasks = dict(tasks)
        self.signature = "serving_default" if tasks else "top_k"
        self._map = names = column_map(columns, "columns")
        if not tasks:
            self._roles: tuple[str, ...] = ("history",)
            self._known = {"user": [names.user, names.time], "history": [names.item, names.time]}
            return
        self._roles = ROLES
        of_event = [names.item, *names.features.values(), *names.lists.values(), *names.numbers.values()]
        past = [names.time, *names.labels.values(), *names.outcomes.values()]
        self._known = {
            "user": [names.user, names.time, *names.context.values(), *names.context_numbers.values()],
            "history": list(dict.fromkeys([*of_event, *past])),
            "exposed": of_event,
        }

    def read(self, instances: Any, input_names: Iterable[str]) -> Read:
        """Returns the inputs of these names of a list of instances.

        Raises:
          RequestError: The instances have another form, or a value is unusable. The message names instance, event and
            column.
        """
        try:
            return self._read(instances, input_names) if self.tasks else self._searched(instances)
        except ValueError as error:
            raise RequestError(400, str(error)) from error

    def _read(self, instances: Any, input_names: Iterable[str]) -> Read:
        names = self._map
        parts = self._parts(instances)
        user, history, exposed = (self._table(rows, places) for rows, places, _ in parts.values())
        owner = {role: np.array(parts[role][2], np.int64) for role in ROLES}
        moment, earlier, order = self._moments(parts, user, history)
        columns: dict[str, Values] = {"user_id": user.ids(names.user, required=True)[0]}
        columns |= {name: user.ids(column)[0] for name, column in names.context.items()}
        columns |= {name: user.numbers(column) for name, column in names.context_numbers.items()}
        # Exposures of an instance share its moment, so they do not see each other.
        instance = np.concatenate([owner["history"][order], owner["exposed"]])
        of_history = np.arange(len(instance)) < len(order)
        rows = np.lexsort((~of_history, instance))
        events = _events(history, order, exposed, names)
        events["user"], events["time"] = instance, np.concatenate([earlier[order], moment[owner["exposed"]]])
        sorted_events = Events(**_taken(events, rows), crossed=names.past)
        at = {"history": np.flatnonzero(of_history[rows]), "exposed": np.flatnonzero(~of_history[rows])}
        for name, values in columns_of_events(sorted_events).items():
            role = name.partition("_")[0]
            kept = _taken(values, at[role])
            if isinstance(kept, Ragged):
                columns |= {name: kept.values, f"{name}_count": kept.lengths()}
            else:
                columns[name] = kept
        splits = {role: splits_of(np.bincount(owner[role], minlength=user.num_rows)) for role in ROLES}
        columns |= {f"{role}_row_splits": splits[role] for role in ROLES}
        return Read({name: np.asarray(columns[name]) for name in input_names}, splits["exposed"])

    def _searched(self, instances: Any) -> Read:
        """Returns the inputs of the signature "top_k"."""
        instances, k = _without_k(instances)
        parts = self._parts(instances)
        user, history = (self._table(rows, places) for rows, places, _ in parts.values())
        moment, earlier, order = self._moments(parts, user, history)
        lengths = np.bincount(np.array(parts["history"][2], np.int64), minlength=user.num_rows)
        columns = {"item_id": history.ids(self._map.item, required=True)[0][order], "timestamp": earlier[order]}
        return Read(
            {**columns, "row_splits": splits_of(lengths), "query_time": moment, "k": np.array(k, np.int32)}, None
        )

    def _moments(
        self, parts: Parts, user: TableColumns, history: TableColumns
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the seconds of instances <int64>[B] and of events <int64>[H], and the order <int64>[H] of events."""
        name, (rows, _, owners) = self._map.time, parts["history"]
        seconds, _ = seconds_of(_REQUEST, np.concatenate([user.times(name), history.times(name)]))
        moment, earlier = np.split(seconds, [user.num_rows])
        owner = np.array(owners, np.int64)
        history.refuse(
            earlier >= moment[owner],
            lambda row: (
                f"column {name!r} has {rows[row][name]!r}, which is not before the instance's. Send events that ended "
                "before the request."
            ),
        )
        return moment, earlier, np.lexsort((earlier, owner))

    def _parts(self, instances: Any) -> Parts:
        """Returns the rows of users, history and exposures, with the place and the instance of each."""
        parts: Parts = {role: ([], [], []) for role in ("user", *self._roles)}

        def add(role: str, row: Any, place: str, instance: int) -> None:
            if not isinstance(row, dict):
                raise ValueError(f"{place} is {json.dumps(row)[:80]}, want an object of {self._known[role]}.")
            unknown = sorted(set(row) - set(self._known[role]))
            if unknown:
                raise ValueError(f"{place} has the key {unknown[0]!r}, want only keys of {self._known[role]}.")
            rows, places, owners = parts[role]
            rows.append(row)
            places.append(place)
            owners.append(instance)

        if not isinstance(instances, list) or not instances:
            raise ValueError("'instances' must be a list of at least one object.")
        for number, instance in enumerate(instances):
            place = f"instances[{number}]"
            if not isinstance(instance, dict):
                raise ValueError(f"{place} is {json.dumps(instance)[:80]}, want an object with {self._known['user']}.")
            add("user", {key: value for key, value in instance.items() if key not in self._roles}, place, number)
            for role in self._roles:
                events = instance.get(role) or []
                if not isinstance(events, list) or (role == "exposed" and not events):
                    least = " of at least one event" if role == "exposed" else ""
                    raise ValueError(f"{place}.{role} is {json.dumps(events)[:80]}, want a list{least}.")
                for at, event in enumerate(events):
                    add(role, event, f"{place}.{role}[{at}]", number)
        return parts

    def _table(self, rows: Sequence[dict], places: Sequence[str]) -> TableColumns:
        names = dict.fromkeys(column for known in self._known.values() for column in known)
        columns = {
            name: _texts([_text(place, name, row.get(name)) for row, place in zip(rows, places)]) for name in names
        }
        return TableColumns(_REQUEST, columns, len(rows), places.__getitem__, BadInput("error"), self._map.kinds)


def _without_k(instances: Any) -> tuple[Any, int]:
    """Returns the instances without their key "k", and its value. Other forms of instances stay as they are."""
    if not isinstance(instances, list) or not all(isinstance(instance, dict) for instance in instances):
        return instances, _ITEMS
    asked = [instance.get("k", _ITEMS) for instance in instances] or [_ITEMS]
    if type(asked[0]) is not int or asked[0] < 1 or asked != asked[:1] * len(asked):
        raise ValueError(f"instances have the k {json.dumps(asked)[:80]}, want one integer >= 1. Use the same in all.")
    return [{name: value for name, value in instance.items() if name != "k"} for instance in instances], asked[0]


def _events(history: TableColumns, order: np.ndarray, exposed: TableColumns, names: ColumnMap) -> dict[str, Any]:
    """Fields of Events: the history's in this order, then those of the exposures, whose labels are not known yet."""
    item, features, _ = items_of(history, names)
    shown_item, shown_features, _ = items_of(exposed, names)
    labels = {name: history.labels(column) for name, column in names.labels.items()}
    bits = [label.astype(np.int64) << bit for bit, label in enumerate(labels.values())]
    outcomes = {name: history.numbers(column) for name, column in names.outcomes.items()}
    none = np.zeros(exposed.num_rows)

    def joined(first: Values, second: Values) -> Values:
        first = _taken(first, order)
        if isinstance(first, Ragged) and isinstance(second, Ragged):
            lengths = np.concatenate([first.lengths(), second.lengths()])
            return Ragged(np.concatenate([first.values, second.values]), splits_of(lengths))
        values = np.asarray(first)
        return np.concatenate([values, np.asarray(second).astype(values.dtype)])

    return {
        "item": joined(item, shown_item),
        "action": joined(np.sum(bits, axis=0), none),
        "labels": {name: joined(label, none) for name, label in labels.items()},
        "features": {name: joined(values, shown_features[name]) for name, values in features.items()},
        "outcomes": {name: joined(outcome, none) for name, outcome in outcomes.items()},
    }


def _taken(values: Any, rows: np.ndarray) -> Any:
    """Rows of an array, of lists of ids, or of each value of a dict."""
    if isinstance(values, dict):
        return {name: _taken(value, rows) for name, value in values.items()}
    return values.take(rows) if isinstance(values, Ragged) else values[rows]


def _text(place: str, column: str, value: Any) -> Any:
    """A value as a CSV file has it, None if it is missing, or a list of such values."""
    if isinstance(value, list):
        return [_text(place, column, each) for each in value]
    if isinstance(value, bool):
        return str(int(value))
    if value is None or value != value:  # NaN
        return None
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{place}: column {column!r} has {json.dumps(value)[:80]}, want text, a number or null.")
    return str(value)


def _texts(values: list[Any]) -> pa.ChunkedArray:
    if any(isinstance(value, list) for value in values):
        lists = [value.split(LIST_SEPARATOR) if isinstance(value, str) else value for value in values]
        return pa.chunked_array([pa.array(lists, pa.list_(pa.string()))])
    return pa.chunked_array([pa.array(values, pa.string())])


def read_file(path: pathlib.Path) -> UserColumns:
    """The columns that a file of an export describes. Raises ValueError, which names the file, if it is damaged."""
    try:
        return UserColumns(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"file {str(path)!r} is damaged: {error}. Remedy: copy it again.") from error
