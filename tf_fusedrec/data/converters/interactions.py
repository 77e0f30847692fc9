"""Writes interactions as a retrieval data set: one row per user, with the last item held out.

The converters of logs and of sequences share the stable order, the conversion to seconds, and the cut of each sequence.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tf_fusedrec.data.layouts import DatasetInfo, write_dataset
from tf_fusedrec.data.rows import Rows, Values, ragged_from_groups

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
    item_strings: Mapping[int, str] | None = None,
) -> DatasetInfo:
    """Writes the retrieval layout of interactions into `output`.

    Args:
      output: Folder to make.
      interactions: Interactions of all users.
      path: Source file, for messages.
      source: Description of the source for dataset.json; the number of users left out is appended.
      catalogue: <int64>[I], all items without duplicates; None: the items of the users kept.
      item_strings: String of every item id that is a fingerprint; None for integer ids.

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
    before = {name: ragged_from_groups(values[~last], row_of[~last], len(users)) for name, values in columns.items()}
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
        item_strings=item_strings,
    )
