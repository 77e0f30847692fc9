"""Converters of logs: small raw files by hand, logs of real skew against loops, and refusals by file and line."""

import functools
import gzip
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.shards import lists
from tests.support import small_log
from tf_fusedrec.data.fingerprint import hash_strings
from tf_fusedrec.models.data_sets import convert, kuairand
from tf_fusedrec.models.data_sets.events import Window
from tf_fusedrec.models.data_sets.interactions import convert_sequences
from tf_fusedrec.models.data_sets.kuairand import convert_kuairand
from tf_fusedrec.models.data_sets.layouts import read_info, read_items
from tf_fusedrec.models.data_sets.movielens import convert_movielens, convert_movielens_ranking
from tf_fusedrec.models.data_sets.text_log import ID, read_log


def write(folder, files):
    """Writes texts by file name, zipped where the name says so, and bytes as they are."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") and data is not content else data)
    return folder


def lines(rows, delimiter=","):
    return "".join(delimiter.join(map(str, row)) + "\n" for row in rows)


def counts(folder):
    return dict(zip(*(column.tolist() for column in read_items(folder))))


def strings(folder):
    texts = pq.read_table(folder / "strings.parquet", filters=[("name", "=", "item")]).to_pydict()
    return dict(zip(texts["string"], texts["id"]))


def prints(*texts):
    return hash_strings(list(texts)).tolist()


TRAIN = "user_id item_id* timestamp* rating*f"
TEST = f"{TRAIN} target_item target_timestamp"
# User 3 out of order and with ties (file order decides: 30 before 10), user 1 in order, user 9 with one rating only.
RATINGS = [
    (3, 30, 5, 200),
    (3, 10, 1, 200),
    (3, 20, 4.5, 100),
    (3, 40, 2, 200),
    (1, 10, 3, 7),
    (1, 20, 3, 8),
    (9, 7, 1, 1),
]
EXPECTED_TEST = [(1, (10,), (7,), (3.0,), 20, 8), (3, (20, 30, 10), (100, 200, 200), (4.5, 5.0, 1.0), 40, 200)]
OWN, GROUPLENS = "user_id,movie_id,rating,timestamp,ts_kind\n", "userId,movieId,rating,timestamp,tag\n"
WIDE = [(*row, 0) for row in RATINGS]
FORMS = {
    "ratings.dat": lines(RATINGS, "::"), "ratings.dat.gz": lines(RATINGS, "::"), "u.data": lines(RATINGS, "\t"),
    "ratings.csv": GROUPLENS + lines(WIDE), "ratings.csv.gz": OWN + lines(WIDE),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("as_file", [False, True])
def test_every_form_of_movielens_gives_the_same(tmp_path, name, as_file):
    source = write(tmp_path / "raw", {name: FORMS[name]})
    info = convert_movielens(source / name if as_file else source, tmp_path / "out")
    assert (info.task, info.users, info.items) == ("retrieval", 2, 4) and read_info(tmp_path / "out") == info
    assert info.source == f"MovieLens, {name}, 7 ratings, 1 of 3 users left out (fewer than 2 interactions)"
    assert lists(tmp_path / "out/test", TEST) == EXPECTED_TEST
    assert lists(tmp_path / "out/train", TRAIN) == [row[:4] for row in EXPECTED_TEST]
    assert counts(tmp_path / "out") == {10: 2, 20: 1, 30: 1, 40: 0}


@pytest.mark.parametrize(
    "name, delimiter", [("movies.dat", "::"), ("movies.dat.gz", "::"), ("movies.csv", ","), ("u.item", "|")]
)
def test_the_file_of_movies_is_the_catalogue(tmp_path, name, delimiter):
    text = "movieId,title,genres\n" * (name == "movies.csv")
    for movie in (7, 10, 20, 30, 40, 50):
        text += f'{movie}{delimiter}"Caf\xe9 :: a title, with: | all"{delimiter}Drama\n'
    data = text.encode("latin-1")
    files = {"ratings.dat": FORMS["ratings.dat"], name: gzip.compress(data) if name.endswith(".gz") else data}
    convert_movielens(write(tmp_path / "raw", files), tmp_path / "out")
    assert read_items(tmp_path / "out")[0].tolist() == [7, 10, 20, 30, 40, 50]


def test_a_custom_log_with_string_ids_and_without_ratings(tmp_path):
    log = "timestamp,user_id,item_id\n5,ann,B01\n3,ann,A7\n9,ann,007\n1,bob,A7\n2,bob,B01\n"
    info = convert_movielens(write(tmp_path, {"log.csv": log}) / "log.csv", tmp_path / "out")
    assert info.source == (
        "MovieLens, log.csv, 5 ratings, user_id strings as fingerprints, movie_id strings as fingerprints"
    )
    assert "rating" not in info.columns["train"]
    ann, bob, a7, b01, zero = prints("ann", "bob", "A7", "B01", "007")
    rows = {row[0]: row[1:] for row in lists(tmp_path / "out/test", "user_id item_id* target_item")}
    assert rows == {ann: ((a7, b01), zero), bob: ((a7,), b01)}
    assert strings(tmp_path / "out") == {"A7": a7, "B01": b01, "007": zero}
    assert counts(tmp_path / "out") == {a7: 2, b01: 1, zero: 0}


def test_an_id_of_a_log_depends_on_its_own_text(tmp_path):
    path = write(tmp_path, {"log.csv": "user,item\n1,7\n2, 8\n3,007\n4,A7\n5,9.0\n"}) / "log.csv"
    log, (zero, a7) = read_log(path, {"user": ID, "item": ID}), prints("007", "A7")
    assert [values.tolist() for values in log.columns.values()] == [[1, 2, 3, 4, 5], [7, 8, zero, a7, 9]]
    assert log.strings == {"item": {zero: "007", a7: "A7"}}


def test_a_file_of_movies_with_string_ids_names_those_that_nobody_rated(tmp_path):
    rated = {"ratings.csv": OWN + "1,m1,3,7,0\n1,m2,3,8,0\n"}
    movies = {"movies.csv": 'movieId,title\n"m1",A\nm2,B\nm3,C\n'}
    convert_movielens(write(tmp_path / "raw", {**rated, **movies}), tmp_path / "out")
    assert sorted(strings(tmp_path / "out")) == ["m1", "m2", "m3"]


@pytest.mark.parametrize("factor, unit", [(10**3, "milliseconds"), (10**6, "microseconds"), (10**9, "nanoseconds")])
def test_finer_times_are_cut_to_seconds_after_the_sort(tmp_path, factor, unit):
    times = [1_400_000_000 * factor + 5, 1_400_000_000 * factor + 2, 1_400_000_009 * factor]
    rows = [(1, item, 3, time, 0) for item, time in zip((10, 20, 30), times)]
    source = write(tmp_path / "raw", {"ratings.csv": OWN + lines(rows)})
    info = convert_movielens(source, tmp_path / "out")
    assert info.source.endswith(f"3 ratings, timestamps in {unit} cut to seconds")
    (row,) = lists(tmp_path / "out/test", TEST)
    assert row == (1, (20, 10), (1_400_000_000, 1_400_000_000), (3.0, 3.0), 30, 1_400_000_009)
    write(source, {"ratings.csv": OWN + lines([rows[0], (1, 20, 3, 1_400_000_000, 0)])})
    words = rf"got timestamps of two units, {times[0]} \({unit}\) and 1400000000 \(row 2\), want"
    with pytest.raises(ValueError, match=words):
        convert_movielens(source, tmp_path / "again")


def test_a_log_of_real_skew_is_each_users_films_in_order(tmp_path):
    info = convert_movielens(small_log.write_movielens(tmp_path / "raw"), tmp_path / "out")
    log = small_log.columns()
    seconds, films = log["time_ms"] // 1000, log["video_id"]
    expected, trained = [], []
    for user in np.unique(log["user_id"]):
        rows = sorted(np.flatnonzero(log["user_id"] == user), key=lambda row: seconds[row])
        expected.append((user, tuple(films[rows[:-1]]), tuple(seconds[rows[:-1]]), films[rows[-1]], seconds[rows[-1]]))
        trained += films[rows[:-1]].tolist()
    test = lists(tmp_path / "out/test", TEST)
    assert [row[:3] + row[4:] for row in test] == expected
    assert [row[:4] for row in test] == lists(tmp_path / "out/train", TRAIN)
    assert info.users == 100 and counts(tmp_path / "out") == {
        film: trained.count(film) for film in sorted(set(films.tolist()))
    }


RELEASE = {
    "ratings.dat": "1::10::5::100\n1::20::3::200\n2::10::4::150\n2::30::4::250\n1::30::1::300\n2::20::5::310\n",
    "movies.dat": "10::Alien (1979)::Horror|Sci-Fi\n20::Café :: Noir (1990)::Drama\n30::Untitled::Drama|Horror\n"
    "40::New (2000)::\n".encode("latin-1"),
    "users.dat": "1::F::25::7::0123\n2::M::18::7::99999\n",
}
convert_ranking = functools.partial(
    convert_movielens_ranking, window=Window(exposures=4, history=5, validation=0.2, test=1 / 3)
)


def test_movielens_as_ranking_by_hand(tmp_path):
    info = convert_ranking(write(tmp_path / "raw", RELEASE), tmp_path / "d")
    assert (info.task, info.users, info.items) == ("ranking", 2, 4)
    columns = "user_id gender age occupation zip history_item* history_action* exposed_item* exposed_year* "
    columns += "exposed_genre_set* exposed_genre* exposed_genre_count* exposed_click*f exposed_five*f"
    # Genres are Drama 1, Horror 2, Sci-Fi 3; their sets Drama 1, Drama|Horror 2, Horror|Sci-Fi 3.
    assert lists(tmp_path / "d/train", columns) == [
        (1, 1, 2, 1, 1, (), (), (10, 20), (1979, 1990), (3, 1), (2, 3, 1), (2, 1), (1.0, 0.0), (1.0, 0.0)),
        (2, 2, 1, 1, 2, (), (), (10, 30), (1979, 0), (3, 2), (2, 3, 1, 2), (2, 2), (1.0, 1.0), (0.0, 0.0)),
    ]
    # User 1 rates 30 (Drama, Horror) after 10 (Horror, click) and 20 (Drama, no click).
    columns = "user_id history_item* history_action* exposed_item* "
    columns += "exposed_past_genre_count*f exposed_past_genre_click_rate*f"
    assert lists(tmp_path / "d/test", columns) == [
        (1, (10, 20), (10, 6), (30,), (2.0,), (0.5,)), (2, (10, 30), (8, 8), (20,), (1.0,), (1.0,)),
    ]  # fmt: skip
    codes = json.loads((tmp_path / "d/codes.json").read_text(encoding="utf-8"))
    assert codes["genre_set"] == ["Drama", "Drama|Horror", "Horror|Sci-Fi"] and codes["gender"] == ["F", "M"]
    assert counts(tmp_path / "d") == {10: 2, 20: 1, 30: 1, 40: 0}
    (tmp_path / "raw/users.dat").unlink()
    read = convert_ranking(tmp_path / "raw", tmp_path / "e").columns["train"]
    assert "gender" not in read and "exposed_genre" in read


@pytest.mark.parametrize(
    "text", ["7 30 10 20\n\n3\t5 5\n9 1\n", "7 30\n3 5\n7 10\n9 1\n7 20\n3 5\n"], ids=["user", "item"]
)
@pytest.mark.parametrize("name", ["seq.txt", "seq.txt.gz"])
def test_sequences_keep_their_order(tmp_path, name, text):
    """A line has all items of a user, or one."""
    info = convert_sequences(write(tmp_path, {name: text}) / name, tmp_path / "out")
    assert (info.task, info.users, info.items) == ("retrieval", 2, 4)
    assert info.source == (
        f"sequences, {name}, 6 interactions, timestamps are places in the sequence, "
        "1 of 3 users left out (fewer than 2 interactions)"
    )
    assert lists(tmp_path / "out/test", "user_id item_id* timestamp* target_item target_timestamp") == [
        (3, (5,), (0,), 5, 1), (7, (30, 10), (0, 1), 20, 2),
    ]  # fmt: skip
    assert counts(tmp_path / "out") == {5: 1, 10: 1, 20: 0, 30: 1}


@pytest.mark.parametrize("held_out", ["both", "test", "validation"])
def test_the_second_last_item_is_validation(tmp_path, held_out):
    """User 3 has too few items for two held-out ones."""
    raw = write(tmp_path, {"seq.txt": "7 30 10 20 40\n3 5 5\n9 10 20 30\n"}) / "seq.txt"
    info = convert_sequences(raw, tmp_path / "out", held_out=held_out)
    splits = {
        name: [
            (user, *row) for user, *row in lists(tmp_path / "out" / name, "user_id item_id* target_item") if user != 3
        ]
        for name in info.columns
        if name != "train"
    }
    second_last, last = [(7, (30, 10), 20), (9, (10,), 20)], [(7, (30, 10, 20), 40), (9, (10, 20), 30)]
    expected = {"both": {"validation": second_last, "test": last}, "test": {"test": last}}
    assert splits == {**expected, "validation": {"test": second_last}}[held_out]
    train = [(7, (30, 10, 20)), (9, (10, 20)), (3, (5,))] if held_out == "test" else [(7, (30, 10)), (9, (10,))]
    assert lists(tmp_path / "out/train", "user_id item_id*") == sorted(train)
    assert sum(counts(tmp_path / "out").values()) == sum(len(items) for _, items in train)
    assert ("1 of 3 users left out (fewer than 3 interactions)" in info.source) == (held_out != "test")


def test_sequences_of_strings_become_fingerprints(tmp_path):
    info = convert_sequences(write(tmp_path, {"seq.txt": "A2 x y\nA1 y x\n"}) / "seq.txt", tmp_path / "out")
    assert "user_id strings as fingerprints, item_id strings" in info.source
    a1, a2, x, y = prints("A1", "A2", "x", "y")
    rows = lists(tmp_path / "out/test", "user_id item_id* target_item")
    assert sorted(rows) == sorted([(a2, (x,), y), (a1, (y,), x)]) and strings(tmp_path / "out") == {"x": x, "y": y}


HEADER = "user_id,video_id,time_ms,is_click,long_view,play_time_ms,duration_ms\n"
# Ten impressions; with test_fraction 0.3 the moment is 8000 ms: items 17, 25, 19 are test.
LOG = [
    (2, 21, 2000, 1, 0, 10, 5), (1, 11, 1000, 1, 1, 20, 5), (1, 12, 3000, 0, 0, 0, 5), (1, 13, 3000, 1, 0, 30, 5),
    (1, 14, 3000, 0, 1, 40, 5), (1, 16, 6000, 0, 0, 50, 5), (1, 17, 8000, 1, 1, 60, 5), (3, 11, 7999, 1, 0, 80, 5),
    (4, 25, 9000, 1, 0, 70, 5), (3, 19, 9999, 0, 0, 90, 5),
]  # fmt: skip
IMPRESSIONS = "user_id history_item* history_action* history_time* exposed_item* exposed_time* exposed_click*f "
IMPRESSIONS += "exposed_long_view*f"


def of_kuairand(folder, rows=LOG, users=None, name="log.csv", **options):
    """Converts a log, with test_fraction 0.3. users: header and rows of user_features.csv."""
    features = {} if users is None else {"user_features.csv": users[0] + "\n" + lines(users[1])}
    source = write(folder / "raw", {name: HEADER + lines(rows), **features})
    return convert_kuairand(source, folder / "out", **{"test_fraction": 0.3, **options})


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_kuairand_split_by_time_by_hand(tmp_path, name):
    info = of_kuairand(tmp_path, name=name)
    assert (info.task, info.users, info.items) == ("ranking", 4, 9) and read_info(tmp_path / "out") == info
    # User 1 has five impressions before the moment; the third falls on 3000 ms, and so do its neighbours: all exposed.
    assert lists(tmp_path / "out/train", IMPRESSIONS) == [
        (1, (11,), (65,), (1,), (12, 13, 14, 16), (3, 3, 3, 6), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)),
        (2, (), (), (), (21,), (2,), (1.0,), (0.0,)),
        (3, (), (), (), (11,), (7,), (1.0,), (0.0,)),
    ]
    assert lists(tmp_path / "out/test", IMPRESSIONS + " exposed_play_time_ms*f") == [
        (1, (11, 12, 13, 14, 16), (65, 0, 1, 64, 0), (1, 3, 3, 3, 6), (17,), (8,), (1.0,), (1.0,), (60.0,)),
        (3, (11,), (1,), (7,), (19,), (9,), (0.0,), (0.0,), (90.0,)),
        (4, (), (), (), (25,), (9,), (1.0,), (0.0,), (70.0,)),
    ]
    assert counts(tmp_path / "out") == {11: 2, 12: 1, 13: 1, 14: 1, 16: 1, 17: 0, 19: 0, 21: 1, 25: 0}


def test_kuairand_split_by_user_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(kuairand, "WINDOW", 2)
    of_kuairand(tmp_path, test_fraction=0.5, split="user")
    columns = "user_id history_item* exposed_item*"
    # User 1 has six impressions, of which three are train: a window of two and one of one. Others: half, rounded up.
    assert lists(tmp_path / "out/train", columns) == [
        (1, (), (11, 12)), (1, (11, 12), (13,)), (2, (), (21,)), (3, (), (11,)), (4, (), (25,)),
    ]  # fmt: skip
    assert lists(tmp_path / "out/test", columns) == [(1, (11, 12, 13), (14, 16, 17)), (3, (11,), (19,))]
    assert read_items(tmp_path / "out")[1].tolist() == [2, 1, 1, 0, 0, 0, 0, 1, 1]


def test_durations_become_codes(tmp_path):
    rows = [(1, item, item, 1, 0, 9, duration) for item, duration in enumerate([0, -1, 1, 999, 1000, 3000, 3001, 7000])]
    of_kuairand(tmp_path, rows, test_fraction=0.2, split="user")
    # 1 + 4 log2(1 + seconds), rounded down: 0.001 s, 0.999 s, 1 s, 3 s, 3.001 s; the last, 7 s, is test.
    assert lists(tmp_path / "out/test", "history_duration* exposed_duration*") == [((0, 0, 1, 4, 5, 9, 9), (13,))]


def test_user_features_become_codes(tmp_path):
    features = [(1, "b", 7, "0.5"), (3, "a", -1, ""), (4, "", 7, "0.25"), (99, "z", 8, "2")]
    info = of_kuairand(tmp_path, users=("user_id,degree,level,hot", features))
    assert list(info.columns["train"])[:4] == ["user_id", "degree", "level", "hot"]
    # User 2 is not in the features: 0 everywhere. Codes number the sorted values of all users from 1.
    assert lists(tmp_path / "out/train", "user_id degree level hot") == [(1, 2, 2, 2), (2, 0, 0, 0), (3, 1, 1, 0)]
    codes = json.loads((tmp_path / "out/codes.json").read_text(encoding="utf-8"))
    assert codes == {"degree": ["a", "b", "z"], "level": [-1, 7, 8], "hot": [0.25, 0.5, 2.0]}


def test_numbers_of_users_and_events(tmp_path):
    rows = [(*row[:6], 0 if row[1] == 11 else 1500) for row in LOG]
    info = of_kuairand(tmp_path, rows, ("user_id,level,name", [(1, 7, "x"), (3, "", "y"), (4, 2.5, "z")]))
    assert "name_number" not in info.columns["train"]
    columns = "user_id level_number:f history_duration_seconds*f history_play_time_ms*f exposed_past_user_count*f "
    columns += "exposed_past_user_click_rate*f exposed_past_item_long_view_rate*f"
    # User 1 clicked 2 of 5 videos before. User 3 has no level, user 4 no past.
    np.testing.assert_equal(
        lists(tmp_path / "out/test", columns),
        [
            (1, 7.0, (np.nan, *[1.5] * 4), (20.0, 0.0, 30.0, 40.0, 50.0), (5.0,), (np.float32(0.4),), (np.nan,)),
            (3, np.nan, (np.nan,), (80.0,), (1.0,), (1.0,), (np.nan,)),
            (4, 2.5, (), (), (0.0,), (np.nan,), (np.nan,)),
        ],
    )


def test_string_ids_become_fingerprints_and_find_their_features(tmp_path):
    rows = [(f"u{row[0]}", f"v{row[1]}", *row[2:]) for row in LOG]
    info = of_kuairand(tmp_path, rows, ("user_id,level", [("u1", 7), ("u3", 9)]))  # features by the same strings
    assert info.source.endswith("10 impressions, user_id strings as fingerprints, video_id strings as fingerprints")
    u1, u3, u4, v17, v19, v25 = prints("u1", "u3", "u4", "v17", "v19", "v25")
    rows = lists(tmp_path / "out/test", "user_id level exposed_item*")
    assert sorted(rows) == sorted([(u1, 1, (v17,)), (u3, 2, (v19,)), (u4, 0, (v25,))])
    assert len(strings(tmp_path / "out")) == 9 and strings(tmp_path / "out")["v17"] == v17


def test_no_row_of_a_log_of_real_skew_knows_its_future(tmp_path):
    log = small_log.columns()
    info = convert_kuairand(small_log.FOLDER, tmp_path / "out")
    assert (info.users, info.items) == (100, len(np.unique(log["video_id"])))
    exposed = [name for name in info.columns["train"] if name.startswith("exposed_")]
    past = [name for name in exposed if "_past_" in name]
    assert (len(exposed) - len(past), len(past)) == (4 + 6 + 1, 4 * 3)
    train, test = (lists(tmp_path / "out" / part, IMPRESSIONS) for part in ("train", "test"))
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


FOUR = "userId,movieId,rating,timestamp\n"
ML = FORMS["ratings.dat"]
movielens, ranking, by_time = convert_movielens, convert_ranking, convert_kuairand
by_user = functools.partial(convert_kuairand, split="user")


def sequences(raw, output, **options):
    return convert_sequences(raw / "seq.txt", output, **options)


def missing(raw, output):
    return convert_movielens(raw / "missing", output)


def with_one(name, old, new):
    return {**RELEASE, name: RELEASE[name].replace(old, new)}


FULL, LATE = {"log.csv": HEADER + lines(LOG)}, [(*row[:2], row[2] * 10**6, *row[3:]) for row in LOG]
REFUSALS = [
    (movielens, {}, "got none of them"),
    (missing, {}, "must be a folder with one of ratings.dat, .* got nothing there"),
    (movielens, {"ratings.dat": ML, "ratings.csv": ML}, "got 2 of them. Name the file of ratings itself"),
    (movielens, {"ratings.dat": ML, "movies.dat": "10::A::B\n"}, "movies.dat: lacks 4 rated movies, .* example 7"),
    (
        movielens,
        {"ratings.csv": OWN + "1,m1,3,7,0\n1,m2,3,8,0\n", "movies.csv": "movieId,title\n1,A\n2,B\n"},
        "its movie ids are integers, but the movie ids of the ratings are strings",
    ),
    (movielens, {"ratings.dat": "1::10::3::7\n2::10::3::7\n"}, "got 2 interactions of 2 users, none with 2 or m"),
    (movielens, {"ratings.dat": ""}, "ratings.dat: got an empty file"),
    (movielens, {"ratings.csv": OWN}, "ratings.csv: got 0 interactions of 0 users"),
    (movielens, {"ratings.dat": "1::2::3::4\n\n1::2::five::3\n"}, "line 3: got rating 'five', want a number. C"),
    (movielens, {"ratings.dat": "1::2::3::4\n1::2::3\n"}, "line 2: got 3 fields, '1::2::3', want 4: use"),
    (movielens, {"u.data": "1\t2\t3\t4\n1 2 3 4\n"}, "u.data, line 2: got 1 fields, '1 2 3 4', want 4: user_id"),
    (movielens, {"u.data": "1\t2\t3\t4\n1\t2\tnan\t4\n"}, "u.data, line 2: got rating 'nan', want a number"),
    (movielens, {"ratings.csv": ""}, r"line 1: got the columns \[\], want also user_id or userId, movie_id or"),
    (movielens, {"ratings.csv": "1,2,3,4\n"}, r"line 1: got the columns \['1', .* want also user_id or userId"),
    (movielens, {"ratings.csv": "userId,movieId\n1,2\n"}, r"the columns \['userId', 'movieId'\], want also time"),
    (movielens, {"ratings.csv": FOUR + "1,2,3,\n"}, "line 2: got timestamp '', want an integer"),
    (movielens, {"ratings.csv": FOUR + "1,,3,4\n"}, "ratings.csv, line 2: got movieId '', want an id"),
    (movielens, {"ratings.csv": FOUR + "1,2,3,1.5e9\n"}, "line 2: got timestamp '1.5e9', want an integer"),
    (movielens, {"ratings.csv": FOUR + '1,"2\n2",3,4\n1,2,x,4\n'}, "line 4: got rating 'x', want a number"),
    (movielens, {"ratings.csv.gz": gzip.compress((OWN + lines(WIDE)).encode())[:-20]}, "csv.gz: not readable as "),
    (movielens, {"ratings.csv": b"user\0id," + b"x" * (1 << 18)}, "ratings.csv: not readable as a CSV file"),
    (
        ranking,
        {name: text for name, text in RELEASE.items() if name != "movies.dat"},
        r"has none of \['movies.dat', 'movies.csv'\], want one for the years and genres",
    ),
    (ranking, with_one("movies.dat", b"30::", b"31::"), "movies.dat: lacks the movie 30 of a rating"),
    (ranking, with_one("users.dat", "2::M", "3::M"), "users.dat: lacks the user 2 of a rating"),
    (ranking, {**RELEASE, "users.dat": "1::F::25\n"}, "users.dat, line 1: got 3 fields"),
    (ranking, with_one("ratings.dat", "::3::", "::x::"), "line 2: got rating 'x', want a number"),
    (sequences, {"seq.txt": "1 2 3\n7\n"}, "seq.txt, line 2: got '7', want a user and at least one item"),
    (sequences, {"seq.txt": "1 2\n3 4\n"}, "seq.txt: got 2 interactions of 2 users, none with 2 or more"),
    (
        functools.partial(sequences, held_out="both"),
        {"seq.txt": "1 2 3\n3 4 5\n"},
        "got 4 interactions of 2 users, none with 3 or more. .* or set held_out to test",
    ),
    (functools.partial(sequences, held_out="all"), {"seq.txt": "1 2 3\n"}, "held_out must be one of .*'all'"),
    (sequences, {"seq.txt": ""}, "seq.txt: got 0 interactions of 0 users"),
    (convert_sequences, {}, "must be the file of sequences, got a folder or nothing"),
    (by_time, {}, "must be a KuaiRand log or a folder with one of log.csv, log.csv.gz"),
    (functools.partial(by_user, test_fraction=1), FULL, "test_fraction must lie between 0 and 1"),
    (functools.partial(by_user, split="half"), FULL, r"split must be one of \['time', 'user'\]"),
    (by_time, {**FULL, "user_features.csv": "user,degree\n1,2\n"}, "user_features.csv: column 'user_id' is missing"),
    (by_time, {"log.csv": "user_id,video_id,time_ms\n1,2,3\n"}, r"the columns .*, want one of the labels \['is_cl"),
    (by_time, {"log.csv": HEADER}, "log.csv: has no impressions"),
    (by_time, {"log.csv": HEADER + "1,2,3,1,,5,5\n"}, "log.csv, line 2: got long_view '', want a number"),
    (by_time, {"log.csv": HEADER + lines(LATE)}, "latest time_ms is 9999000000, which looks like seconds; want"),
    (by_time, {"log.csv": HEADER + lines(LOG[:1])}, "user for train, of 1 users with 1 impressions, by split 'ti"),
    (by_user, {"log.csv": HEADER + lines(LOG[:1])}, "no user for test, of 1 users with 1 impressions, by split 'user'"),
]  # fmt: skip


@pytest.mark.parametrize(("converter", "files", "message"), REFUSALS)
def test_what_cannot_be_converted_is_refused_by_file_and_line(tmp_path, converter, files, message):
    with pytest.raises(ValueError, match=message):
        converter(write(tmp_path / "raw", files), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def run(*arguments):
    convert.convert(["convert", *map(str, arguments)])


def test_the_command_makes_data_sets_and_says_so(tmp_path, capsys):
    run("synthetic-ranking", "--output", tmp_path / "r", "--users=12", "--items=9", "--clusters=3", "--exposures=2")
    assert "ranking, 12 users, 9 items, from synthetic ranking" in capsys.readouterr().out
    run("synthetic-retrieval", "--output", tmp_path / "s", "--users=5", "--items=50", "--seed=4")
    assert read_info(tmp_path / "s").source.endswith("seed=4")
    write(tmp_path, {"ratings.dat": "1::2::3::4\n1::5::3::6\n", "seq.txt": "1 2 3\n", "log.csv": HEADER + lines(LOG)})
    run("movielens", "--input", tmp_path, "--output", tmp_path / "m")
    assert read_info(tmp_path / "m").users == 1
    run("sequences", "--input", tmp_path / "seq.txt", "--output", tmp_path / "q")
    assert "1 users, 2 items, from sequences, seq.txt, 2 interactions, timestamps are" in capsys.readouterr().out
    run("kuairand", f"--input={tmp_path}", "--output", tmp_path / "k", "--test_fraction=0.5")
    assert read_info(tmp_path / "k").items == 9
    run("--help")
    assert "synthetic-retrieval" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], r"name one converter of movielens, sequences, kuairand, movielens_ranking, synthetic-.* got \[\]"),
        (["criteo"], r"name one converter of .* got \['criteo'\]"),
        (["movielens", "--output=x"], "movielens needs --input"),
        (["synthetic-ranking"], "synthetic-ranking needs --output"),
        (["movielens", "--input=a", "--output=b", "--users=3"], "--users is not a flag of movielens; it takes input"),
        (["movielens", "--inputt=a"], "Unknown command line flag 'inputt'.*Run with --help"),
        (["synthetic-ranking", "--output=x", "--users=many"], "flag --users=many"),
    ],
)
def test_arguments_of_the_command_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def test_an_error_of_the_command_is_one_line_and_exit_code_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["convert", "kuairand", "--input", str(tmp_path), "--output", str(tmp_path / "o")])
    with pytest.raises(SystemExit, match="error: input .* must be a KuaiRand log"):
        convert.main()
