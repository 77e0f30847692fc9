"""Writes interactions as a retrieval data set: one row per user, with the last item held out.

The converters of logs and of sequences share the stable order, the conversion to seconds, and the cut of each sequence.

convert_sequences converts a file of sequences. Each line has a user and the user's items in order:

    196 242 393 381 251          ids, integers or strings, separated by blanks or tabs
    186 302 377

Several lines of one user form one sequence, in the order of the file, so a file with one line `user item` per
interaction works, too. The files have no times: the `timestamp` of an item is its place in the sequence, from 0.
"""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.rows import Ragged, Rows, Values, splits_of
from tf_fusedrec.models.data_sets.layouts import DatasetInfo, write_dataset
from tf_fusedrec.models.data_sets.text_log import ids_of, open_text

SPLIT = (
    "Leave one out: a user's last interaction is the target of test, all before it are train and the history of test. "
    "Users with fewer than 2 interactions are left out."
)
# (smallest time of a unit, units per second, unit). Seconds reach 10^11 in the year 5138, milliseconds did in 1973.
_FINER = ((10**17, 10**9, "nanoseconds"), (10**14, 10**6, "microseconds"), (10**11, 10**3, "milliseconds"))


class Interactions(NamedTuple):
    """N interactions, each user's in the order of time."""

    user: np.ndarray  # <int64>[N], ascending
    item: np.ndarray  # <int64>[N]
    time: np.ndarray  # <int64>[N], seconds
    rating: np.ndarray | None = None  # <float32>[N]


def by_user_and_time(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Stable order <int64>[N] by (user, time). Equal times keep the order of the file."""
    return np.lexsort((time, user))


def seconds_of(path: pathlib.Path, time: np.ndarray) -> tuple[np.ndarray, str]:
    """Times <int64>[N] in whole seconds, and their original unit if it is finer ("" for seconds).

    Raises:
      ValueError: the times have two units.
    """
    for least, per_second, unit in _FINER:
        if time.max(initial=0) < least:
            continue
        if time.min() < least:
            coarse = int(np.flatnonzero(time < least)[0])
            raise ValueError(
                f"{path}: got timestamps of two units, {time.max()} ({unit}) and {time[coarse]} (row {coarse + 1}), "
                "want one unit, seconds since 1970. Correct the smaller part."
            )
        return time // per_second, unit
    return time, ""


def write_last_held_out(
    output: str | pathlib.Path,
    interactions: Interactions,
    *,
    path: pathlib.Path,
    source: str,
    catalogue: np.ndarray | None = None,
    strings: Mapping[str, Mapping[int, str]] | None = None,
) -> DatasetInfo:
    """Writes the retrieval layout of interactions into `output`.

    Args:
      output: Folder to make.
      interactions: Interactions of all users.
      path: Source file, for messages.
      source: Description of the source for dataset.json; the number of users left out is appended.
      catalogue: <int64>[I], all items without duplicates; None: the items of the users kept.
      strings: See write_dataset.

    Raises:
      ValueError: no user has two interactions; write_dataset refuses the data.
    """
    user, item, time, rating = interactions
    everyone, row_of, counts = np.unique(user, return_inverse=True, return_counts=True)
    enough = (counts >= 2)[row_of]
    left_out = int((counts < 2).sum())
    if left_out == len(everyone):
        raise ValueError(
            f"{path}: got {len(user)} interactions of {len(everyone)} users, none with two or more. Want at least two "
            "interactions of a user, because the last one is held out for test. Check the user column."
        )
    if left_out:
        source += f", {left_out} of {len(everyone)} users left out (one interaction)"
    user, item, time = user[enough], item[enough], time[enough]
    users, row_of = np.unique(user, return_inverse=True)
    last = np.append(user[1:] != user[:-1], True)
    columns = {"item_id": item, "timestamp": time}
    if rating is not None:
        columns["rating"] = rating[enough]
    before_splits = splits_of(np.bincount(row_of[~last], minlength=len(users)))
    before = {name: Ragged(values[~last], before_splits) for name, values in columns.items()}
    train: dict[str, Values] = {"user_id": users, **before}
    test = {**train, "target_item": item[last], "target_timestamp": time[last]}
    return write_dataset(
        output,
        task="retrieval",
        source=source,
        split=SPLIT,
        users=len(users),
        train=Rows(train, len(users)),
        test=Rows(test, len(users)),
        item_ids=np.unique(item) if catalogue is None else catalogue,
        train_items=item[~last],
        strings=strings,
    )


def convert_sequences(source: str | pathlib.Path, output: str | pathlib.Path) -> DatasetInfo:
    """Writes the retrieval layout of a file of sequences.

    String ids become fingerprints, and items.parquet then has a column `string`.

    The file is plain or gzipped (.gz). Raises ValueError for a missing file, a user without items in a line, or no user
    with two items.
    """
    path = pathlib.Path(source)
    if not path.is_file():
        raise ValueError(f"input {str(path)!r} must be the file of sequences, got a folder or nothing. Name the file.")
    user, item, strings = _read(path)
    # The sort is stable, so a user's items stay in the order of the file.
    order = by_user_and_time(user, np.zeros(len(user), np.int64))
    user, item = user[order], item[order]
    first = np.searchsorted(user, user)
    notes = [f"sequences, {path.name}, {len(user)} interactions", "timestamps are places in the sequence"]
    notes += [f"{name} strings as fingerprints" for name, texts in strings.items() if texts]
    return write_last_held_out(
        output,
        Interactions(user, item, np.arange(len(user)) - first),
        path=path,
        source=", ".join(notes),
        strings={"user_id": strings["user_id"], "item": strings["item_id"]},
    )


def _read(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, dict[str, dict[int, str]]]:
    """Reads user and item <int64>[N] in file order, and the strings of each column of string ids."""
    users, items, counts = [], [], []
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                user, *sequence = line.split() or [""]
                if user and not sequence:
                    raise ValueError(
                        f"{path}, line {number}: got {line.strip()!r}, want a user and at least one item, separated by "
                        "blanks or tabs. Correct the line or remove it."
                    )
                users += [user] if user else []
                counts += [len(sequence)] if user else []
                items += sequence
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not readable as text ({error}). Check the file.") from error
    strings = {}
    user_ids, strings["user_id"] = ids_of(path, "user", pa.chunked_array([pa.array(users, pa.string())]))
    item_ids, strings["item_id"] = ids_of(path, "item", pa.chunked_array([pa.array(items, pa.string())]))
    return np.repeat(user_ids, counts), item_ids, strings
