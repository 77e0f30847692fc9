"""Writes a log of events as a ranking data set: one row for each window of a user's events, with the history before it.

    user's events   e0 e1 e2 | e3 e4 e5 | e6 e7      windows of 3 exposures
    row 0           exposures e0 e1 e2, no history
    row 1           exposures e3 e4 e5, history e0 e1 e2 ...

The split is by time, with the same moments for all users. Each event is an exposure of one row. The history of a row
ends strictly before its first exposure.

Crossed features count a user's earlier events with the same key, and the rates of their labels. An event sees strictly
earlier events of its user only, never itself nor events of the same time. A feature of an exposure therefore contains
no label that was unknown when the exposure was shown.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec.data.rows import Ragged, Rows, Values
from tf_fusedrec.models.data_sets.layouts import DatasetInfo, write_dataset

HELD_OUT = ("both", "test", "validation", "all", "none")
SPLIT = (
    "By time: the first {train:g} of the events in time are train, the next {validation:g} are validation, the rest "
    "are test. Events of one time are not divided. {use} Rows have windows of {window} exposures of a user, and as "
    "history the newest {history} events strictly before the first of them. Counts and rates of the past see all "
    "strictly earlier events of the user."
)
_USE = {
    "both": "The folders train, validation and test hold these parts.",
    "test": "The folder train holds train and validation, the folder test holds test.",
    "none": "The folder train holds all of them, and test is empty.",
    "all": "The folder test holds all of them, and train those of earlier days.",
    "validation": "The folder train holds train, the folder test holds validation; test is left out.",
}


@dataclasses.dataclass(frozen=True)
class Events:
    """N events sorted by (user, time), of U users."""

    user: np.ndarray  # <int64>[N], ascending
    time: np.ndarray  # <int64>[N], seconds, ascending for each user
    item: np.ndarray  # <int64>[N]
    action: np.ndarray  # <int64>[N], what the user did, as one code
    labels: Mapping[str, np.ndarray]  # <float32>[N] of 0 and 1, by name
    context: Mapping[str, Values] = dataclasses.field(default_factory=dict)  # of U users ascending: ids or numbers
    features: Mapping[str, Values] = dataclasses.field(default_factory=dict)  # of history and exposures: ids or numbers
    outcomes: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # numbers of history only
    crossed: tuple[str, ...] = ()  # features of ids with counts and rates of the past
    shown: np.ndarray | None = None  # <bool>[N], events that may be exposures; None: all. The others are history.


class Window(NamedTuple):
    """Size of the rows, and share of the events in each part."""

    exposures: int = 32
    history: int = 200
    validation: float = 0.1
    test: float = 0.1


def write_events(
    output: str | pathlib.Path,
    events: Events,
    *,
    path: pathlib.Path,
    source: str,
    held_out: str = "test",
    window: Window | None = None,
    catalogue: np.ndarray | None = None,
    strings: Mapping[str, Mapping[int, str]] | None = None,
    codes: Mapping[str, list] | None = None,
    id_kinds: Mapping[str, str] | None = None,
) -> DatasetInfo:
    """Writes the ranking layout of events into `output`.

    Columns: user_id and context; for history and exposed: item, time, features and the columns of past_columns by
    user, item, hour and `crossed`; history_action, history_<outcome>; exposed_<label>.

    Args:
      output: Folder to make.
      events: Events of all users.
      path: Source file, for messages.
      source: Description of the source for dataset.json.
      held_out: Held-out parts, one of HELD_OUT. "both" writes folders for validation and test. "test" trains on the
        validation part, too. "validation" puts it into the folder test and leaves the test part out, so that settings
        can be chosen without it. "all" puts all events into the folder test, to evaluate a trained model, and
        "none" into the folder train.
      window: Sizes of rows and parts.
      catalogue: <int64>[I], all items without duplicates; None: the items of the events.
      strings, codes, id_kinds: See write_dataset.

    Raises:
      ValueError: held_out is unknown; train or a held-out part has no event.
    """
    if held_out not in HELD_OUT:
        raise ValueError(f"held_out must be one of {HELD_OUT}, got {held_out!r}.")
    sizes = window or Window()
    shown = np.ones(len(events.time), bool) if events.shown is None else events.shown
    parts = _parts(events.time, shown, held_out, sizes)
    for name, part in parts.items():
        if not part.any() and (held_out, name) not in (("all", "train"), ("none", "test")):
            raise ValueError(
                f"{path}: got no event for {name}, of {len(part)} events with {len(np.unique(events.time))} distinct "
                "times. Want events at four times or more. Check the column of the time, or set held_out to 'test'."
            )
    columns = columns_of_events(events)
    users, row_of = np.unique(events.user, return_inverse=True)
    rows = {
        name: _rows(columns, events.context, users, row_of, events.time, part, sizes)
        for name, part in parts.items()
        if part.any()
    }
    for name in parts.keys() - rows.keys():
        rows[name] = next(iter(rows.values())).slice(0, 0)
    return write_dataset(
        output,
        task="ranking",
        source=source,
        split=SPLIT.format(
            train=round(1 - sizes.validation - sizes.test, 6), validation=sizes.validation, use=_USE[held_out],
            window=sizes.exposures, history=sizes.history,
        ),
        users=len(np.unique(events.user[np.any([*parts.values()], axis=0)])),
        train=rows["train"],
        test=rows["validation" if held_out == "validation" else "test"],
        validation=rows["validation"] if held_out == "both" else None,
        item_ids=np.unique(events.item) if catalogue is None else catalogue,
        train_items=events.item[parts["train"]],
        strings=strings,
        codes=codes,
        id_kinds=id_kinds,
    )  # fmt: skip


def _parts(time: np.ndarray, shown: np.ndarray, held_out: str, sizes: Window) -> dict[str, np.ndarray]:
    """Masks <bool>[N] of the events of each part by name. All are part of `shown` <bool>[N]."""
    if held_out == "all":
        return {"train": ~shown, "test": shown}
    if held_out == "none":
        return {"train": shown, "test": np.zeros(len(time), bool)}
    ordered = np.sort(time[shown])

    def since(share: float) -> np.ndarray:
        """The events from the moment on at which a share of all events has passed."""
        if not len(ordered):
            return shown
        return shown & (time >= ordered[min(int(round(len(ordered) * share, 6)), len(ordered) - 1)])

    test, held = since(1 - sizes.test), since(1 - sizes.test - sizes.validation)
    if held_out == "test":
        return {"train": shown & ~test, "test": test}
    parts = {"train": shown & ~held, "validation": held & ~test}
    return {**parts, "test": test} if held_out == "both" else parts


def columns_of_events(events: Events) -> dict[str, Values]:
    """Values of each event by column, with history_ or exposed_ before the name; Ragged for several ids."""
    keys: dict[str, Values] = {"item": events.item, "hour": hour_of_day(events.time)}
    keys |= {name: events.features[name] for name in events.crossed}
    past = past_columns(events.user, events.time, keys, events.labels)
    shared: dict[str, Values] = {"item": events.item, "time": events.time, **events.features, **past}
    return {
        **{f"{role}_{name}": values for role in ("history", "exposed") for name, values in shared.items()},
        "history_action": events.action,
        **{f"history_{name}": values for name, values in events.outcomes.items()},
        **{f"exposed_{name}": values for name, values in events.labels.items()},
    }


def _rows(
    columns: Mapping[str, Values],
    context: Mapping[str, Values],
    users: np.ndarray,
    row_of: np.ndarray,
    time: np.ndarray,
    part: np.ndarray,
    sizes: Window,
) -> Rows:
    """Rows with the events of `part` <bool>[N] as exposures, a run of each user's events."""
    at = np.flatnonzero(part)
    place = at - at[first_of_run(row_of[at])]
    starts = np.flatnonzero(place % sizes.exposures == 0)
    first, end = at[starts], at[np.append(starts[1:], len(at)) - 1] + 1
    # History ends before the events of the first exposure's time, and begins with the user or the newest events.
    begin_of_user = first_of_run(row_of)
    history_end = first_of_run(time, begin_of_user)[first]
    history_begin = np.maximum(begin_of_user[first], history_end - sizes.history)
    user = row_of[first]
    columns_of_rows: dict[str, Values] = {"user_id": users[user]}
    for name, values in context.items():
        columns_of_rows[name] = values.take(user) if isinstance(values, Ragged) else values[user]
    for name, values in columns.items():
        bounds = (history_begin, history_end) if name.startswith("history_") else (first, end)
        columns_of_rows.update(_gathered(name, values, *bounds))
    return Rows(columns_of_rows, len(first))


def _gathered(name: str, values: Values, begin: np.ndarray, end: np.ndarray) -> dict[str, Ragged]:
    """The column of the events begin .. end of each row. Several ids of an event follow each other, beside counts."""
    if not isinstance(values, Ragged):
        return {name: Ragged(values, np.zeros(1, np.int64)).gather(begin, end - begin)}
    splits = values.row_splits
    counts = Ragged(values.lengths(), np.zeros(1, np.int64)).gather(begin, end - begin)
    return {name: values.gather(splits[begin], splits[end] - splits[begin]), f"{name}_count": counts}


HOUR, DAY = 3600, 24  # seconds of an hour, hours of a day


def past_columns(
    user: np.ndarray, time: np.ndarray, keys: Mapping[str, Values], labels: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Counts and label rates of every event's past, <float32>[N] by column.

    Args:
      user: <int64>[N], user of each event.
      time: <int64>[N], any unit. Events of one user and time do not see each other.
      keys: By name, the key of each event, <int64>[N], or several in a Ragged of N rows. An earlier event counts once
        for each key that it shares.
      labels: By name, 0 or 1 of each event, <float32>[N].

    Returns:
      past_<key>_count, and past_<key>_<label>_rate, which is NaN after a count of 0. The key "user" counts all events.
    """
    columns: dict[str, np.ndarray] = {}
    everything = {"user": np.zeros(len(user), np.int64), **keys}
    for key, values in everything.items():
        count, positives = earlier(user, values, time, labels)
        columns[f"past_{key}_count"] = count.astype(np.float32)
        for label, positive in positives.items():
            rate = np.full(len(count), np.nan)
            np.divide(positive, count, out=rate, where=count > 0)
            columns[f"past_{key}_{label}_rate"] = rate.astype(np.float32)
    return columns


def hour_of_day(seconds: Any) -> Any:
    """Hour 0..23 (UTC) of times in seconds since 1970, <int64>[N], an array or a tensor."""
    return seconds // HOUR % DAY


def earlier(
    user: np.ndarray, key: Values, time: np.ndarray, labels: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Number of strictly earlier events of the same user and key <int64>[N], and the sums of their labels <float64>[N].

    Arguments as in past_columns, for one key.
    """
    if not isinstance(key, Ragged):
        return _earlier(user, key, time, labels)
    # One entry for each key of an event. Their answers are added.
    event = np.repeat(np.arange(len(user)), key.lengths())
    count, positives = _earlier(
        user[event], key.values, time[event], {name: label[event] for name, label in labels.items()}
    )

    def of_event(values: np.ndarray) -> np.ndarray:
        return np.bincount(event, weights=values, minlength=len(user))

    return of_event(count).astype(np.int64), {name: of_event(values) for name, values in positives.items()}


def _earlier(
    user: np.ndarray, key: np.ndarray, time: np.ndarray, labels: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    order = np.lexsort((time, key, user))
    group = first_of_run(user[order], key[order])
    moment = first_of_run(user[order], key[order], time[order])
    count = np.empty(len(order), np.int64)
    count[order] = moment - group
    sums = {}
    for name, label in labels.items():
        before = np.concatenate([[0.0], np.cumsum(label[order], dtype=np.float64)])
        sums[name] = np.empty(len(order))
        sums[name][order] = before[moment] - before[group]
    return count, sums


def first_of_run(*values: np.ndarray) -> np.ndarray:
    """Place of the first entry of each entry's run of equal values, <int64>[N]. Each array is <int64>[N]."""
    changes = np.zeros(len(values[0]), bool)
    changes[:1] = True
    for array in values:
        changes[1:] |= array[1:] != array[:-1]
    return np.maximum.accumulate(np.where(changes, np.arange(len(changes)), 0))
