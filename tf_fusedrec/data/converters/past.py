"""Crossed features of a user's own past: counts of earlier events with the same key, and rates of their labels.

An event sees strictly earlier events of its user alone, never itself nor events of the same time. So a feature of an
exposure knows no label that was unknown when the exposure was shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_fusedrec.data.rows import Ragged, Values

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
    # One entry for each key of an event, whose answers are added.
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
    for one in values:
        changes[1:] |= one[1:] != one[:-1]
    return np.maximum.accumulate(np.where(changes, np.arange(len(changes)), 0))
