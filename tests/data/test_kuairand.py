"""KuaiRand: a tiny log by hand. In a log of real skew, no row knows its own future."""

import gzip
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from models.data_sets import kuairand
from models.data_sets.kuairand import convert_kuairand
from models.data_sets.layouts import read_info, read_items
from tests.data.shards import read_lists
from tests.support import small_log
from tf_fusedrec import tf
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.fingerprint import hash_strings

COLUMNS = (
    Column("user_id"),
    Column("history_item", ragged=True),
    Column("history_action", ragged=True, aligned_with="history_item"),
    Column("history_time", ragged=True, aligned_with="history_item"),
    Column("exposed_item", ragged=True),
    Column("exposed_time", ragged=True, aligned_with="exposed_item"),
    Column("exposed_click", "float32", ragged=True, aligned_with="exposed_item"),
    Column("exposed_long_view", "float32", ragged=True, aligned_with="exposed_item"),
)
HEADER = "user_id,video_id,time_ms,is_click,long_view,play_time_ms,duration_ms"
# Ten impressions; with test_fraction 0.3 the moment is 8000 ms: items 17, 25, 19 are test.
LOG = [
    (2, 21, 2000, 1, 0, 10, 5),
    (1, 11, 1000, 1, 1, 20, 5),
    (1, 12, 3000, 0, 0, 0, 5),
    (1, 13, 3000, 1, 0, 30, 5),
    (1, 14, 3000, 0, 1, 40, 5),
    (1, 16, 6000, 0, 0, 50, 5),
    (1, 17, 8000, 1, 1, 60, 5),
    (3, 11, 7999, 1, 0, 80, 5),
    (4, 25, 9000, 1, 0, 70, 5),
    (3, 19, 9999, 0, 0, 90, 5),
]


def _write(folder, name="log.csv", header=HEADER, rows=LOG):
    folder.mkdir(exist_ok=True)
    text = (header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return folder


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_split_by_hand(tmp_path, name):
    info = convert_kuairand(_write(tmp_path / "raw", name), tmp_path / "out", test_fraction=0.3)
    assert (info.task, info.users, info.items) == ("ranking", 4, 9)
    assert read_info(tmp_path / "out") == info
    # User 1 has five impressions before the moment; the third falls on 3000 ms, and so do its neighbours: all exposed.
    assert read_lists(ParquetFolder(tmp_path / "out/train", COLUMNS)) == [
        (1, (11,), (65,), (1,), (12, 13, 14, 16), (3, 3, 3, 6), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)),
        (2, (), (), (), (21,), (2,), (1.0,), (0.0,)),
        (3, (), (), (), (11,), (7,), (1.0,), (0.0,)),
    ]
    assert read_lists(ParquetFolder(tmp_path / "out/test", COLUMNS)) == [
        (1, (11, 12, 13, 14, 16), (65, 0, 1, 64, 0), (1, 3, 3, 3, 6), (17,), (8,), (1.0,), (1.0,)),
        (3, (11,), (1,), (7,), (19,), (9,), (0.0,), (0.0,)),
        (4, (), (), (), (25,), (9,), (1.0,), (0.0,)),
    ]
    continuous = ParquetFolder(tmp_path / "out/test", [Column("exposed_play_time_ms", "float32", ragged=True)])
    assert read_lists(continuous) == [((60.0,),), ((90.0,),), ((70.0,),)]
    assert [items.tolist() for items in read_items(tmp_path / "out")] == [
        [11, 12, 13, 14, 16, 17, 19, 21, 25],
        [2, 1, 1, 1, 1, 0, 0, 1, 0],
    ]


def test_split_by_user_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(kuairand, "WINDOW", 2)
    convert_kuairand(_write(tmp_path / "raw"), tmp_path / "out", test_fraction=0.5, split="user")
    columns = [Column("user_id"), *(Column(name, ragged=True) for name in ("history_item", "exposed_item"))]
    # User 1 has six impressions, of which three are train: a window of two and one of one. Others: half, rounded up.
    assert read_lists(ParquetFolder(tmp_path / "out/train", columns)) == [
        (1, (), (11, 12)), (1, (11, 12), (13,)), (2, (), (21,)), (3, (), (11,)), (4, (), (25,)),
    ]  # fmt: skip
    assert read_lists(ParquetFolder(tmp_path / "out/test", columns)) == [
        (1, (11, 12, 13), (14, 16, 17)), (3, (11,), (19,)),
    ]  # fmt: skip
    assert read_items(tmp_path / "out")[1].tolist() == [2, 1, 1, 0, 0, 0, 0, 1, 1]


def test_durations_become_codes(tmp_path):
    rows = [(1, item, item, 1, 0, 9, duration) for item, duration in enumerate([0, -1, 1, 999, 1000, 3000, 3001, 7000])]
    convert_kuairand(_write(tmp_path / "raw", rows=rows), tmp_path / "out", test_fraction=0.2, split="user")
    columns = [Column(f"{role}_duration", ragged=True) for role in ("history", "exposed")]
    # 1 + 4 log2(1 + seconds), rounded down: 0.001 s, 0.999 s, 1 s, 3 s, 3.001 s; the last, 7 s, is test.
    assert read_lists(ParquetFolder(tmp_path / "out/test", columns)) == [((0, 0, 1, 4, 5, 9, 9), (13,))]


def test_the_small_log_is_what_its_generator_makes():
    for name, text in small_log.contents().items():
        assert small_log.read(name) == text, f"python -m tests.support.small_log writes {name} again"


def test_the_split_by_user_takes_the_first_four_fifths_of_each_user(tmp_path):
    convert_kuairand(small_log.FOLDER, tmp_path / "out", split="user")
    counts = np.unique(small_log.columns()["user_id"], return_counts=True)[1]
    first = -(-counts * 4 // 5)
    windows = -(-first // kuairand.WINDOW)
    for split, rows, exposures in (("train", windows.sum(), first.sum()), ("test", 100, (counts - first).sum())):
        lists = read_lists(ParquetFolder(tmp_path / "out" / split, COLUMNS))
        assert len(lists) == rows and sum(len(row[4]) for row in lists) == exposures


def test_user_features_become_codes(tmp_path):
    source = _write(tmp_path / "raw")
    features = [(1, "b", 7, "0.5"), (3, "a", -1, ""), (4, "", 7, "0.25"), (99, "z", 8, "2")]
    _write(source, "user_features.csv", "user_id,degree,level,hot", features)
    info = convert_kuairand(source, tmp_path / "out", test_fraction=0.3)
    assert list(info.columns["train"])[:4] == ["user_id", "degree", "level", "hot"]
    columns = [Column("user_id"), Column("degree"), Column("level"), Column("hot")]
    # User 2 is not in the features: 0 everywhere. Codes number the sorted values of all users from 1.
    assert read_lists(ParquetFolder(tmp_path / "out/train", columns)) == [(1, 2, 2, 2), (2, 0, 0, 0), (3, 1, 1, 0)]
    codes = json.loads((tmp_path / "out/codes.json").read_text(encoding="utf-8"))
    assert codes == {"degree": ["a", "b", "z"], "level": [-1, 7, 8], "hot": [0.25, 0.5, 2.0]}


def test_numbers_of_users_and_events(tmp_path):
    source = _write(tmp_path / "raw", rows=[(*row[:6], 0 if row[1] == 11 else 1500) for row in LOG])
    _write(source, "user_features.csv", "user_id,level,name", [(1, 7, "x"), (3, "", "y"), (4, 2.5, "z")])
    info = convert_kuairand(source, tmp_path / "out", test_fraction=0.3)
    assert "name_number" not in info.columns["train"]
    numbers = [
        Column(name, "float32", ragged=True)
        for name in ("history_duration_seconds", "history_play_time_ms", "exposed_past_user_count")
        + ("exposed_past_user_click_rate", "exposed_past_item_long_view_rate")
    ]
    test = read_lists(
        ParquetFolder(tmp_path / "out/test", [Column("user_id"), Column("level_number", "float32"), *numbers])
    )
    # User 1 clicked 2 of 5 videos before. User 3 has no level, user 4 no past.
    np.testing.assert_equal(
        test,
        [
            (1, 7.0, (np.nan, *[1.5] * 4), (20.0, 0.0, 30.0, 40.0, 50.0), (5.0,), (np.float32(0.4),), (np.nan,)),
            (3, np.nan, (np.nan,), (80.0,), (1.0,), (1.0,), (np.nan,)),
            (4, 2.5, (), (), (0.0,), (np.nan,), (np.nan,)),
        ],
    )  # fmt: skip


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="must be a KuaiRand log or a folder with one of log.csv, log.csv.gz"):
        convert_kuairand(tmp_path, tmp_path / "out")
    source = _write(tmp_path / "raw")
    with pytest.raises(ValueError, match="test_fraction must lie between 0 and 1, got 1"):
        convert_kuairand(source, tmp_path / "out", test_fraction=1)
    with pytest.raises(ValueError, match=r"split must be one of \['time', 'user'\], got 'half'"):
        convert_kuairand(source, tmp_path / "out", split="half")
    _write(source, "user_features.csv", "user,degree", [(1, 2)])
    with pytest.raises(ValueError, match=r"user_features.csv: column 'user_id' is missing"):
        convert_kuairand(source, tmp_path / "out")
    _write(source, header="user_id,video_id,time_ms", rows=[(1, 2, 3)])
    with pytest.raises(ValueError, match=r"log.csv: has the columns .*, want one of the labels \['is_click'"):
        convert_kuairand(source, tmp_path / "out")
    _write(source, rows=[])
    with pytest.raises(ValueError, match="log.csv: has no impressions"):
        convert_kuairand(source, tmp_path / "out")
    _write(source, rows=[(1, 2, 3, 1, "", 5, 5)])
    with pytest.raises(ValueError, match="log.csv, line 2: got long_view '', want a number"):
        convert_kuairand(source, tmp_path / "out")
    (source / "user_features.csv").unlink()
    _write(source, rows=[(*row[:2], row[2] * 10**6, *row[3:]) for row in LOG])
    with pytest.raises(ValueError, match="log.csv: the latest time_ms is 9999000000, which looks like seconds; want"):
        convert_kuairand(source, tmp_path / "out")
    _write(source, rows=LOG[:1])
    with pytest.raises(
        ValueError, match="log.csv: got no user for train, of 1 users with 1 impressions, by split 'time'"
    ):
        convert_kuairand(source, tmp_path / "out")
    with pytest.raises(
        ValueError, match="log.csv: got no user for test, of 1 users with 1 impressions, by split 'user'"
    ):
        convert_kuairand(source, tmp_path / "out", split="user")
    assert not (tmp_path / "out").exists()


def test_string_ids_become_fingerprints_and_find_their_features(tmp_path):
    source = _write(tmp_path / "raw", rows=[(f"u{row[0]}", f"v{row[1]}", *row[2:]) for row in LOG])
    # user_features.csv of the directory is by the same strings.
    _write(source, "user_features.csv", "user_id,level", [("u1", 7), ("u3", 9)])
    info = convert_kuairand(source, tmp_path / "out", test_fraction=0.3)
    assert info.source.endswith("10 impressions, user_id strings as fingerprints, video_id strings as fingerprints")
    rows = read_lists(ParquetFolder(tmp_path / "out/test", [Column("user_id"), Column("level"), COLUMNS[4]]))
    prints = {name: int(hash_strings(tf.constant(name))) for name in ("u1", "u3", "u4", "v17", "v19", "v25")}
    assert {row[0]: row[1:] for row in rows} == {
        prints["u1"]: (1, (prints["v17"],)), prints["u3"]: (2, (prints["v19"],)), prints["u4"]: (0, (prints["v25"],)),
    }  # fmt: skip
    items = pq.read_table(tmp_path / "out/items.parquet").to_pydict()
    assert len(items["string"]) == 9 and items["item_id"][items["string"].index("v17")] == prints["v17"]


def test_no_row_of_a_log_of_real_skew_knows_its_future(tmp_path):
    log = small_log.columns()
    info = convert_kuairand(small_log.FOLDER, tmp_path / "out")
    assert (info.users, info.items) == (100, len(np.unique(log["video_id"])))
    exposed = [name for name in info.columns["train"] if name.startswith("exposed_")]
    past = [name for name in exposed if "_past_" in name]
    assert (len(exposed) - len(past), len(past)) == (4 + 6 + 1, 4 * 3)
    train = read_lists(ParquetFolder(tmp_path / "out/train", COLUMNS))
    test = read_lists(ParquetFolder(tmp_path / "out/test", COLUMNS))
    for row in train + test:
        if row[3]:  # seconds are cut off milliseconds, so a strictly older millisecond may share the second
            assert row[3] == tuple(sorted(row[3])) and row[3][-1] <= row[5][0]
        assert row[5] == tuple(sorted(row[5])) and row[4]
    assert max(time for row in train for time in row[5]) <= min(time for row in test for time in row[5])
    before = {row[0]: row[1] + row[4] for row in train}
    assert all(row[1] == before.get(row[0], ()) for row in test)
    # Every impression is used once: before the moment in train, from the moment on as an exposure of test.
    late = sum(len(row[4]) for row in test)
    assert sum(map(len, before.values())) + late == small_log.ROWS
    assert late == small_log.ROWS // 5
    clicks = sum(np.sum(np.array(row[2]) & 1) + sum(row[6]) for row in train) + sum(sum(row[6]) for row in test)
    assert clicks == log["is_click"].sum()
    assert read_items(tmp_path / "out")[1].sum() == small_log.ROWS - late
