"""KuaiRand log -> the ranking layout: one row per user with contextual features, history and exposures.

The log is a CSV(.gz) with a header, one impression a line, in any order; it is sorted by (user_id, time_ms), ties in
file order. The split is by one moment for all users, so no model is trained on anything later than any test exposure.
"""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa
from pyarrow import csv

from tf_fusedrec.data.interactions import by_user_and_time, read_log, readable_text
from tf_fusedrec.data.layouts import DatasetInfo, write_dataset
from tf_fusedrec.data.rows import Ragged, Rows, Values, ragged_from_groups

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
CONTINUOUS_LABELS = ("play_time_ms", "profile_stay_time", "comment_stay_time")
SPLIT = (
    "By time: the moment T lies where the first {train:g} of the log's impressions end. Train sees only what came "
    "before T: a user's later half is exposed, the earlier half is history. Test: what came from T on is exposed, all "
    "before T is history. History always ends strictly before the first exposure."
)


def convert_kuairand(
    source: str | pathlib.Path, output: str | pathlib.Path, *, test_fraction: float = 0.2
) -> DatasetInfo:
    """Writes the ranking layout of the log in `source` (a folder, or the log itself) into `output`.

    Every binary and continuous label of the log becomes exposed_<label>, without the "is_". user_features.csv(.gz)
    beside the log adds its columns as contextual codes: 0 is missing, values are numbered from 1 in sorted order.

    Args:
      test_fraction: share of the impressions, the latest ones, that become test exposures; in (0, 1).
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, got {test_fraction}.")
    path = _log_file(pathlib.Path(source))
    log, binary, labels = _read_log_sorted(path)
    user, time_ms = log["user_id"], log["time_ms"]
    users, row_of = np.unique(user, return_inverse=True)

    moment = np.sort(time_ms)[int(len(time_ms) * (1 - test_fraction))]
    late = time_ms >= moment
    # Where the later half of a user's training impressions begins; impressions of that same millisecond belong to it,
    # so that history is strictly older.
    counts = np.bincount(row_of[~late], minlength=len(users))
    middle = np.searchsorted(row_of, np.arange(len(users))) + counts // 2
    exposed_from = time_ms[np.minimum(middle, len(time_ms) - 1)]
    exposed_in_train = ~late & (time_ms >= exposed_from[row_of])

    contextual, codes = _user_features(path.parent, users)
    context = {"user_id": users, **contextual}
    parts = {
        "train": _split(log, binary, labels, row_of, context, ~late & ~exposed_in_train, exposed_in_train),
        "test": _split(log, binary, labels, row_of, context, ~late, late),
    }
    return write_dataset(
        output,
        task="ranking",
        source=f"KuaiRand, {path.name}, {len(user)} impressions",
        split=SPLIT.format(train=1 - test_fraction),
        users=len(users),
        train=parts["train"],
        test=parts["test"],
        item_ids=np.unique(log["video_id"]),
        train_items=log["video_id"][~late],
        codes=codes,
    )


def _log_file(source: pathlib.Path) -> pathlib.Path:
    if source.is_file():
        return source
    for name in LOGS:
        if (source / name).is_file():
            return source / name
    raise ValueError(f"input {str(source)!r} must be a KuaiRand log or a folder with one of {', '.join(LOGS)}.")


def _read_log_sorted(path: pathlib.Path) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """The log's columns sorted by (user, time), its binary labels, and all its labels."""
    with readable_text(path), csv.open_csv(path) as reader:
        header = reader.schema.names
    binary = [name for name in ACTION_BITS if name in header]
    if not binary:
        raise ValueError(f"{path}: has none of the labels {list(ACTION_BITS)}, its columns are {header}.")
    labels = binary + [name for name in CONTINUOUS_LABELS if name in header]
    ids = {name: pa.int64() for name in ("user_id", "video_id", "time_ms")}
    log = read_log(path, {**ids, **{name: pa.float32() for name in labels}})
    if not len(log["user_id"]):
        raise ValueError(f"{path}: has no impressions. Check the file.")
    order = by_user_and_time(log["user_id"], log["time_ms"])
    return {name: column[order] for name, column in log.items()}, binary, labels


def _split(
    log: dict[str, np.ndarray],
    binary: list[str],
    labels: list[str],
    row_of: np.ndarray,
    context: dict[str, np.ndarray],
    history: np.ndarray,
    exposed: np.ndarray,
) -> Rows:
    """One row for each user who has an exposure. history, exposed: <bool>[N], which impressions are which."""
    users = len(context["user_id"])
    present = np.flatnonzero(np.bincount(row_of[exposed], minlength=users))

    def listed(values: np.ndarray, chosen: np.ndarray) -> Ragged:
        return ragged_from_groups(values[chosen], row_of[chosen], users).take(present)

    seconds = log["time_ms"] // 1000
    action = np.zeros(len(seconds), np.int64)
    for name in binary:
        action += log[name].astype(np.int64) * ACTION_BITS[name]
    columns: dict[str, Values] = {name: values[present] for name, values in context.items()}
    columns["history_item"] = listed(log["video_id"], history)
    columns["history_action"] = listed(action, history)
    columns["history_time"] = listed(seconds, history)
    columns["exposed_item"] = listed(log["video_id"], exposed)
    columns["exposed_time"] = listed(seconds, exposed)
    for name in labels:
        columns[f"exposed_{name.removeprefix('is_')}"] = listed(log[name], exposed)
    return Rows(columns, len(present))


def _user_features(folder: pathlib.Path, users: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, list]]:
    """Contextual columns <int64>[U] of these users, and the values behind the codes of each column."""
    paths = [folder / name for name in USER_FEATURES if (folder / name).is_file()]
    if not paths:
        return {}, {}
    with readable_text(paths[0]):
        table = csv.read_csv(paths[0])
    if "user_id" not in table.column_names:
        raise ValueError(f"{paths[0]}: column 'user_id' is missing, its columns are {table.column_names}.")
    row = {user: number for number, user in enumerate(table["user_id"].to_pylist())}
    rows = np.array([row.get(user, -1) for user in users.tolist()])
    contextual, codes = {}, {}
    for name in table.column_names:
        if name == "user_id":
            continue
        values = [None if value == "" else value for value in table[name].to_pylist()]
        codes[name] = sorted({value for value in values if value is not None})
        code_of = {value: code for code, value in enumerate(codes[name], start=1)}
        of_row = np.array([code_of.get(value, 0) for value in values] + [0], np.int64)  # row -1: unknown user
        contextual[name] = of_row[rows]
    return contextual, codes
