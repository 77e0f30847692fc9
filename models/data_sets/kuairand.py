"""Converter of the KuaiRand log to the ranking layout: one row per user with context, history and exposures.

The log is a CSV(.gz) with a header and one impression per line, in any order. It is sorted by (user_id, time_ms), ties
in file order. Ids are integers, or strings, which become fingerprints. The split by time uses one moment for all users,
so no model is trained on anything later than a test exposure. The split by user divides the impressions of each user,
like the notes of published extracts.
"""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa
from pyarrow import csv

from tf_fusedrec.data.rows import Ragged, Rows, Values
from tf_fusedrec.models.data_sets.events import hour_of_day, past_columns
from tf_fusedrec.models.data_sets.interactions import by_user_and_time
from tf_fusedrec.models.data_sets.layouts import DatasetInfo, write_dataset
from tf_fusedrec.models.data_sets.text_log import (
    ID,
    INTEGER,
    NUMBER,
    Log,
    header_of,
    ids_of,
    numbered,
    read_log,
    readable_text,
)

LOGS = ("log.csv", "log.csv.gz")
USER_FEATURES = ("user_features.csv", "user_features.csv.gz")
# The bit of each binary label in history_action; a label keeps its bit when others are missing from a log.
ACTION_BITS = {
    "is_click": 1,
    "is_like": 2,
    "is_follow": 4,
    "is_comment": 8,
    "is_forward": 16,
    "is_profile_enter": 32,
    "long_view": 64,
    "is_hate": 128,
}
DURATION = "duration_ms"
CONTINUOUS_LABELS = ("play_time_ms", "profile_stay_time", "comment_stay_time")
_SECONDS = range(10**8, 10**11)  # years 1973 to 5138 in seconds; in milliseconds, three years from 1970 on
WINDOW = 16  # exposures of a training row in the split by user
SPLITS = {
    "time": "By time: the moment T lies where the first {train:g} of the log's impressions end. Train sees only what "
    "came before T: a user's later half is exposed, the earlier half is history. Test: what came from T on is exposed, "
    "all before T is history. History always ends strictly before the first exposure.",
    "user": "By user: the first {train:g} of each user's impressions, rounded up, are train, the others the exposures "
    "of test, with all of train as history. Train has every {window} impressions of a user as the exposures of a row, "
    "with all before them as history. Train may hold impressions of others that are later than an exposure of test.",
}


def convert_kuairand(
    source: str | pathlib.Path, output: str | pathlib.Path, *, test_fraction: float = 0.2, split: str = "time"
) -> DatasetInfo:
    """Writes the ranking layout of a KuaiRand log.

    Every binary and continuous label of the log becomes exposed_<label>, without the "is_". user_features.csv(.gz)
    beside the log adds its columns as contextual codes. Code 0 means missing; values are numbered from 1 in sorted
    order. A column of numbers also becomes <name>_number, with NaN for a missing number. duration_ms, if present,
    becomes history_duration and exposed_duration, with four codes per doubling, and <role>_duration_seconds. events.py
    defines counts and rates of the past.

    Args:
      source: Path of the log, or of a folder with it.
      output: Folder to make.
      test_fraction: Fraction of the impressions, the latest ones, that become test exposures, in (0, 1).
      split: Rule that separates train from test, one of SPLITS.

    Raises:
      ValueError: the log is missing; a line is unreadable; times are in seconds; train or test would be empty.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {list(SPLITS)}, got {split!r}.")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, got {test_fraction}.")
    path = _log_file(pathlib.Path(source))
    (log, strings), binary, labels = _read_log_sorted(path)
    users, begin, counts = np.unique(log["user_id"], return_index=True, return_counts=True)
    end = begin + counts
    if split == "time":
        middle, late = _cut_by_time(log["time_ms"], begin, end, test_fraction)
        train = np.arange(len(users)), begin, middle, late
    else:
        late = begin + np.ceil(counts * (1 - test_fraction)).astype(np.int64)
        train = _windows(begin, late)
    in_train = np.arange(end[-1]) < np.repeat(late, counts)

    contextual, codes = _user_features(path.parent, users)
    context = {"user_id": users, **contextual}
    columns = _columns(log, binary, labels)
    parts = {
        "train": _rows(columns, context, *train),
        "test": _rows(columns, context, np.arange(len(users)), begin, late, end),
    }
    for name, rows in parts.items():
        if not rows.num_rows:
            raise ValueError(
                f"{path}: got no user for {name}, of {len(users)} users with {len(in_train)} impressions, by split "
                f"{split!r} with test_fraction {test_fraction}. Choose the other split or another fraction, or check "
                "the columns user_id and time_ms."
            )
    return write_dataset(
        output,
        task="ranking",
        source=", ".join(
            [f"KuaiRand, {path.name}, {len(in_train)} impressions"]
            + [f"{name} strings as fingerprints" for name in strings]
        ),
        split=SPLITS[split].format(train=1 - test_fraction, window=WINDOW),
        users=len(users),
        train=parts["train"],
        test=parts["test"],
        item_ids=np.unique(log["video_id"]),
        train_items=log["video_id"][in_train],
        strings={"user_id": strings.get("user_id", {}), "item": strings.get("video_id", {})},
        codes=codes,
    )


def _log_file(source: pathlib.Path) -> pathlib.Path:
    if source.is_file():
        return source
    for name in LOGS:
        if (source / name).is_file():
            return source / name
    raise ValueError(f"input {str(source)!r} must be a KuaiRand log or a folder with one of {', '.join(LOGS)}.")


def _read_log_sorted(path: pathlib.Path) -> tuple[Log, list[str], list[str]]:
    """Reads the log sorted by (user, time). Returns it with its binary labels and all its labels."""
    header = header_of(path)
    binary = [name for name in ACTION_BITS if name in header]
    if not binary:
        raise ValueError(
            f"{path}: has the columns {header}, want one of the labels {list(ACTION_BITS)}. Check that it is the log."
        )
    labels = binary + [name for name in CONTINUOUS_LABELS if name in header]
    integers = ["time_ms", *([DURATION] if DURATION in header else [])]
    kinds = {"user_id": ID, "video_id": ID, **dict.fromkeys(integers, INTEGER), **dict.fromkeys(labels, NUMBER)}
    columns, strings = read_log(path, kinds)
    if not len(columns["user_id"]):
        raise ValueError(f"{path}: has no impressions. Check the file.")
    if (latest := int(columns["time_ms"].max())) in _SECONDS:
        raise ValueError(
            f"{path}: the latest time_ms is {latest}, which looks like seconds; want milliseconds since 1970. "
            "Multiply the column by 1000."
        )
    order = by_user_and_time(columns["user_id"], columns["time_ms"])
    return Log({name: column[order] for name, column in columns.items()}, strings), binary, labels


def _cut_by_time(
    time_ms: np.ndarray, begin: np.ndarray, end: np.ndarray, test_fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Begins of each user's train and test exposures, <int64>[U] each, in a log sorted by user and time."""
    moment = np.sort(time_ms)[int(len(time_ms) * (1 - test_fraction))]
    user = np.repeat(np.arange(len(begin)), end - begin)
    late = begin + np.bincount(user[time_ms < moment], minlength=len(begin))
    # The later half of a user's training impressions is exposed. It includes all impressions of its first millisecond,
    # so that history is strictly older.
    exposed_from = time_ms[np.minimum(begin + (late - begin) // 2, len(time_ms) - 1)]
    older = (time_ms < moment) & (time_ms < exposed_from[user])
    return begin + np.bincount(user[older], minlength=len(begin)), late


def _windows(begin: np.ndarray, late: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Windows of WINDOW impressions before `late`: user, begin of history, begin and end of exposures of each."""
    windows = -(-(late - begin) // WINDOW)
    user = np.repeat(np.arange(len(begin)), windows)
    number = np.arange(len(user)) - np.repeat(np.cumsum(windows) - windows, windows)
    middle = begin[user] + number * WINDOW
    return user, begin[user], middle, np.minimum(middle + WINDOW, late[user])


def _columns(log: dict[str, np.ndarray], binary: list[str], labels: list[str]) -> dict[str, np.ndarray]:
    """Values of each impression for the columns history_* and exposed_*, by column.

    Counts and rates of the past cover clicks and long views, by user, item, hour and code of duration.
    """
    seconds = log["time_ms"] // 1000
    action = np.zeros(len(seconds), np.int64)
    for name in binary:
        action += log[name].astype(np.int64) * ACTION_BITS[name]
    columns = {
        "history_item": log["video_id"], "history_action": action, "history_time": seconds,
        "exposed_item": log["video_id"], "exposed_time": seconds,
    }  # fmt: skip
    keys: dict[str, Values] = {"item": log["video_id"], "hour": hour_of_day(seconds)}
    numbers = {}
    if DURATION in log:
        # Four codes per doubling of the seconds. Code 0 is a video without a duration.
        longer = np.log2(1 + np.maximum(log[DURATION], 0) / 1000)
        code = np.where(log[DURATION] > 0, 1 + np.floor(4 * longer), 0).astype(np.int64)
        columns["history_duration"] = columns["exposed_duration"] = keys["duration"] = code
        numbers["duration_seconds"] = np.where(log[DURATION] > 0, log[DURATION] / 1000, np.nan).astype(np.float32)
    rated = {name.removeprefix("is_"): log[name] for name in ("is_click", "long_view") if name in log}
    numbers |= past_columns(log["user_id"], log["time_ms"], keys, rated)
    columns |= {f"{role}_{name}": values for role in ("history", "exposed") for name, values in numbers.items()}
    columns |= {f"history_{name}": log[name] for name in CONTINUOUS_LABELS if name in log}
    return {**columns, **{f"exposed_{name.removeprefix('is_')}": log[name] for name in labels}}


def _rows(
    columns: dict[str, np.ndarray],
    context: dict[str, np.ndarray],
    user: np.ndarray,
    begin: np.ndarray,
    middle: np.ndarray,
    end: np.ndarray,
) -> Rows:
    """Rows of users <int64>[B] with history begin .. middle and exposures middle .. end. Skips empty exposures."""
    some = end > middle
    user, begin, middle, end = (bounds[some] for bounds in (user, begin, middle, end))
    rows: dict[str, Values] = {name: values[user] for name, values in context.items()}
    for name, values in columns.items():
        first, last = (begin, middle) if name.startswith("history_") else (middle, end)
        rows[name] = Ragged(values, np.zeros(1, np.int64)).gather(first, last - first)
    return Rows(rows, len(user))


def _user_features(folder: pathlib.Path, users: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, list]]:
    """Contextual columns <int64>[U], and <float32>[U] of numbers, of these users, and the values of the codes."""
    paths = [folder / name for name in USER_FEATURES if (folder / name).is_file()]
    if not paths:
        return {}, {}
    with readable_text(paths[0]):
        ids_as_text = csv.ConvertOptions(column_types={"user_id": pa.string()})
        table = csv.read_csv(paths[0], convert_options=ids_as_text)
    if "user_id" not in table.column_names:
        raise ValueError(
            f"{paths[0]}: column 'user_id' is missing; its columns are {table.column_names}. Name one of them user_id."
        )
    listed, _ = ids_of(paths[0], "user_id", table["user_id"])
    row = {user: number for number, user in enumerate(listed.tolist())}
    rows = np.array([row.get(user, -1) for user in users.tolist()])
    contextual, numbers, codes = {}, {}, {}
    for name in table.column_names:
        if name == "user_id":
            continue
        of_row, codes[name] = numbered([None if value == "" else value for value in table[name].to_pylist()])
        contextual[name] = np.append(of_row, 0)[rows]  # row -1: unknown user
        if pa.types.is_integer(table[name].type) or pa.types.is_floating(table[name].type):
            numbers[f"{name}_number"] = np.append(table[name].cast(pa.float32()).to_numpy(), np.float32(np.nan))[rows]
    return {**contextual, **numbers}, codes
