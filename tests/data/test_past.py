"""Counts and rates of the past equal an obvious oracle; an event never sees itself nor events of the same time."""

import numpy as np

from models.data_sets.events import hour_of_day, past_columns
from tf_fusedrec.data.rows import Ragged, splits_of


def log_of(seed, events=300, users=6, keys=4, times=40):
    rng = np.random.default_rng(seed)
    user, time = rng.integers(0, users, events), rng.integers(0, times, events)  # many ties, in no order
    one = rng.integers(0, keys, events)
    several = [np.unique(rng.integers(0, keys, rng.integers(0, 4))) for _ in range(events)]
    labels = {name: rng.integers(0, 2, events).astype(np.float32) for name in ("click", "five")}
    return user, time, {"genre": one, "tag": several}, labels


def past_of(event, user, time, keys, label):
    """The pairs (earlier event, label), once for each key that both have, by a loop over all events."""
    found = []
    for other in range(len(user)):
        if user[other] == user[event] and time[other] < time[event]:
            shared = set(np.atleast_1d(keys[other])) & set(np.atleast_1d(keys[event]))
            found += [label[other]] * len(shared)
    return found


def test_every_event_against_a_loop_over_all_others():
    user, time, keys, labels = log_of(seed=0)
    splits = splits_of(np.array([len(one) for one in keys["tag"]]))
    columns = past_columns(user, time, {**keys, "tag": Ragged(np.concatenate(keys["tag"]), splits)}, labels)
    everything = {"user": np.zeros(len(user), np.int64), **keys}
    assert len(columns) == 3 * len(everything)
    for name, key in everything.items():
        for label in labels:
            past = [past_of(event, user, time, key, labels[label]) for event in range(len(user))]
            np.testing.assert_array_equal(columns[f"past_{name}_count"], [len(one) for one in past])
            rates = np.array([np.mean(one) if one else np.nan for one in past], np.float32)
            np.testing.assert_array_equal(columns[f"past_{name}_{label}_rate"], rates)
            assert np.isnan(rates).any() and columns[f"past_{name}_count"].dtype == np.float32


def test_no_label_of_the_same_time_or_later_changes_an_event():
    user, time, keys, labels = log_of(seed=1, events=60, users=2)
    before = past_columns(user, time, {"genre": keys["genre"]}, labels)
    for event in range(len(user)):
        changed = {name: np.where(time >= time[event], 1 - label, label) for name, label in labels.items()}
        after = past_columns(user, time, {"genre": keys["genre"]}, changed)
        for name in before:
            np.testing.assert_array_equal(before[name][event], after[name][event])


def test_no_events():
    none = np.zeros(0, np.int64)
    columns = past_columns(none, none, {"tag": Ragged(none, np.zeros(1, np.int64))}, {"click": none.astype(np.float32)})
    assert all(column.shape == (0,) for column in columns.values())


def test_hours():
    np.testing.assert_array_equal(hour_of_day(np.array([0, 3599, 3600, 86_399, 86_400 + 7200])), [0, 0, 1, 23, 2])
