"""Rows of events: windows, histories strictly before them, the parts in time, and past columns without leakage."""

import pathlib

import numpy as np
import pytest

from tests.data.shards import lists
from tf_fusedrec.data.rows import Ragged, splits_of
from tf_fusedrec.models.data_sets.events import Events, Window, write_events
from tf_fusedrec.models.data_sets.layouts import read_info, read_items

OF_ROW = "user_id history_item* exposed_item*"
SIZES = Window(exposures=2, history=3, validation=0.25, test=0.25)


def events_of(user, time, **fields):
    count = len(user)
    label = np.arange(count) % 2
    tags = np.arange(count) % 3
    given = {
        "item": np.arange(count) + 100,
        "action": label,
        "labels": {"click": label.astype(np.float32)},
        "features": {"tag": Ragged(np.repeat(np.arange(count), tags), splits_of(tags))},
        "context": {"age": np.unique(user) * 10},
        **fields,
    }
    return Events(np.array(user), np.array(time), **given)


def write(folder, events, **arguments):
    return write_events(folder, events, path=pathlib.Path("log.csv"), source="x", window=SIZES, **arguments)


# Users 1 and 2 with eight events; those of user 1 at 3 s are two.
USER, TIME = [1, 1, 1, 1, 1, 2, 2, 2], [1, 2, 3, 3, 9, 4, 5, 8]


def test_rows_by_hand(tmp_path):
    info = write(tmp_path / "d", events_of(USER, TIME))
    # The order in time is 1 2 3 3 4 5 | 8 9: the last quarter of the eight events are two.
    columns = "user_id age history_item* exposed_item* history_tag* history_tag_count* exposed_tag* exposed_tag_count*"
    train = lists(tmp_path / "d/train", columns)
    assert train == [
        (1, 10, (), (100, 101), (), (), (1,), (0, 1)),
        # Both events of 3 s are in one window. Its history is what came before 3 s.
        (1, 10, (100, 101), (102, 103), (1,), (0, 1), (2, 2), (2, 0)),
        (2, 20, (), (105, 106), (), (), (5, 5), (2, 0)),
    ]
    test = lists(tmp_path / "d/test", "user_id history_item* exposed_item* exposed_time*")
    assert test == [(1, (101, 102, 103), (104,), (9,)), (2, (105, 106), (107,), (8,))]  # the newest three of history
    assert read_items(tmp_path / "d")[1].tolist() == [1, 1, 1, 1, 0, 1, 1, 0]
    assert read_info(tmp_path / "d") == info and info.split.startswith("By time: the first 0.5 of the events")


def test_history_ends_before_the_time_of_the_first_exposure(tmp_path):
    write(tmp_path / "d", events_of([1, 1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 3, 4, 5, 6, 7]))
    # Event 101 is in the window before 102, but not earlier.
    assert lists(tmp_path / "d/train", OF_ROW) == [
        (1, (), (100, 101)), (1, (100,), (102, 103)), (2, (), (104, 105)),
    ]  # fmt: skip


@pytest.mark.parametrize(("held_out", "folder"), [("validation", "test"), ("both", "validation")])
def test_the_validation_part_is_left_out_of_training(tmp_path, held_out, folder):
    write(tmp_path / "d", events_of(USER, TIME), held_out=held_out)
    assert lists(tmp_path / "d/train", OF_ROW) == [(1, (), (100, 101)), (1, (100, 101), (102, 103))]
    assert lists(tmp_path / "d" / folder, OF_ROW) == [(2, (), (105, 106))]
    if held_out == "both":
        test = [(1, (101, 102, 103), (104,)), (2, (105, 106), (107,))]
        assert lists(tmp_path / "d/test", OF_ROW) == test
        assert read_info(tmp_path / "d").columns["validation"] == read_info(tmp_path / "d").columns["test"]


def test_the_past_of_every_row_is_that_of_a_loop_over_the_log(tmp_path):
    rng = np.random.default_rng(3)
    user = np.sort(rng.integers(0, 5, 200))
    time = np.concatenate([np.sort(rng.integers(0, 400_000, int(n))) // 9000 * 9000 for n in np.bincount(user)])
    item, click = rng.integers(0, 6, 200), rng.integers(0, 2, 200).astype(np.float32)
    crossed, tags = rng.integers(0, 3, 200), [np.unique(rng.integers(0, 4, rng.integers(0, 4))) for _ in range(200)]
    tag = Ragged(np.concatenate(tags), splits_of(np.array([len(row) for row in tags])))
    features = {"kind": crossed, "tag": tag}
    write(
        tmp_path / "d",
        events_of(user, time, item=item, labels={"click": click}, features=features, crossed=("kind", "tag")),
    )
    keys = {"user": 0 * item, "item": item, "hour": time // 3600 % 24, "kind": crossed}
    seen = 0
    for part in ("train", "test"):
        for role in ("history", "exposed"):
            names = [f"{role}_past_{key}_{what}" for key in (*keys, "tag") for what in ("count", "click_rate")]
            columns = [f"{role}_{name}*" for name in ("time", "item", "kind", "tag_count", "tag")]
            for row in lists(tmp_path / "d" / part, " ".join(["user_id", *columns, *(f"{name}*f" for name in names)])):
                of_place = np.split(row[5], np.cumsum(row[4])[:-1])
                for place, (at, of_item, kind) in enumerate(zip(*row[1:4])):
                    own = {"user": 0, "item": of_item, "hour": at // 3600 % 24, "kind": kind}
                    earlier = (user == row[0]) & (time < at)
                    for key, (count, rate) in zip((*keys, "tag"), zip(row[6::2], row[7::2])):
                        if key == "tag":  # an event counts once for each tag that both have
                            past = np.repeat(click, [np.isin(of, of_place[place]).sum() for of in tags] * earlier)
                        else:
                            past = click[earlier & (keys[key] == own[key])]
                        assert count[place] == len(past)
                        wanted = np.float32(past.mean()) if len(past) else np.nan
                        np.testing.assert_array_equal(np.float32(rate[place]), wanted)
                        seen += 1
    assert seen > 4 * 200


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"held_out must be one of \('both', 'test', .*, 'none'\), got 'train'"):
        write(tmp_path / "d", events_of(USER, TIME), held_out="train")
    with pytest.raises(ValueError, match="log.csv: got no event for train, of 3 events with 1 distinct times"):
        write(tmp_path / "d", events_of([1, 1, 2], [5, 5, 5]))
    with pytest.raises(ValueError, match="log.csv: got no event for train, of 0 events with 0 distinct times"):
        write(tmp_path / "d", events_of([], []))
    assert not (tmp_path / "d").exists()
