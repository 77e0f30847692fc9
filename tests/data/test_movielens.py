"""MovieLens: every form of its ratings, stable order, refused lines, and the real data against the published."""

import csv
import gzip

import numpy as np
import pyarrow.parquet as pq
import pytest

from models.data_sets.layouts import read_info, read_items
from models.data_sets.movielens import convert_movielens
from models.data_sets.text_log import ID, read_log
from tests.data.shards import read_lists
from tests.support import small_log
from tests.support.shared import shared_path
from tf_fusedrec import tf
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.fingerprint import hash_strings

TRAIN = (
    Column("user_id"),
    Column("item_id", ragged=True),
    Column("timestamp", ragged=True, aligned_with="item_id"),
    Column("rating", "float32", ragged=True, aligned_with="item_id"),
)
TEST = (*TRAIN, Column("target_item"), Column("target_timestamp"))

# User 3 out of order and with ties (file order decides: 30 before 10), user 1 in order, user 9 with one rating only.
RATINGS = [
    (3, 30, 5, 200),
    (3, 10, 1, 200),
    (3, 20, 4, 100),
    (3, 40, 2, 200),
    (1, 10, 3, 7),
    (1, 20, 3, 8),
    (9, 70, 1, 1),
]
CSV = "userId,movieId,rating,timestamp\n"
EXPECTED_TEST = [(1, (10,), (7,), (3.0,), 20, 8), (3, (20, 30, 10), (100, 200, 200), (4.0, 5.0, 1.0), 40, 200)]


def _write(folder, name, header="user_id,movie_id,rating,timestamp,ts_kind", rows=RATINGS):
    """Writes `rows` in the form of the file's name; a CSV file has one more column."""
    folder.mkdir(exist_ok=True)
    if ".csv" in name:
        text = header + "\n" + "".join(",".join(map(str, row)) + ",0\n" for row in rows)
    else:
        delimiter = "::" if name.startswith("ratings") else "\t"
        text = "".join(delimiter.join(map(str, row)) + "\n" for row in rows)
    (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return folder


@pytest.mark.parametrize("name", ["ratings.dat", "ratings.dat.gz", "ratings.csv", "ratings.csv.gz", "u.data"])
@pytest.mark.parametrize("as_file", [False, True])
def test_every_form_gives_the_same(tmp_path, name, as_file):
    # GroupLens' own header for one file.
    header = {"header": "userId,movieId,rating,timestamp,tag"} if name == "ratings.csv" else {}
    source = _write(tmp_path / "raw", name, **header)
    info = convert_movielens(source / name if as_file else source, tmp_path / "out")
    assert (info.task, info.users, info.items) == ("retrieval", 2, 4)
    assert read_info(tmp_path / "out") == info
    assert read_lists(ParquetFolder(tmp_path / "out/test", TEST)) == EXPECTED_TEST
    assert read_lists(ParquetFolder(tmp_path / "out/train", TRAIN)) == [row[:4] for row in EXPECTED_TEST]
    ids, counts = read_items(tmp_path / "out")
    assert dict(zip(ids.tolist(), counts.tolist())) == {10: 2, 20: 1, 30: 1, 40: 0}


@pytest.mark.parametrize(
    "name, delimiter", [("movies.dat", "::"), ("movies.dat.gz", "::"), ("movies.csv", ","), ("u.item", "|")]
)
def test_movies_file_is_the_catalogue(tmp_path, name, delimiter):
    source = _write(tmp_path / "raw", "ratings.dat")
    lines = ["movieId,title,genres\n"] if name == "movies.csv" else []
    lines += [
        f'{movie}{delimiter}"Caf\xe9 :: a title, with: | all"{delimiter}Drama\n' for movie in (10, 20, 30, 40, 50, 70)
    ]
    text = "".join(lines).encode("latin-1")
    (source / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    convert_movielens(source, tmp_path / "out")
    assert read_items(tmp_path / "out")[0].tolist() == [10, 20, 30, 40, 50, 70]


def test_half_stars_stay(tmp_path):
    source = _write(
        tmp_path / "raw", "ratings.dat", rows=[(1, 122, 5, 838985046), (1, 185, 4.5, 838983525), (1, 9, 0.5, 838985047)]
    )
    info = convert_movielens(source, tmp_path / "out")
    assert info.source == "MovieLens, ratings.dat, 3 ratings"
    assert read_lists(ParquetFolder(tmp_path / "out/train", TRAIN)) == [
        (1, (185, 122), (838983525, 838985046), (4.5, 5.0))
    ]


def test_a_custom_log_with_string_ids_and_without_ratings(tmp_path):
    (tmp_path / "log.csv").write_text(
        "timestamp,user_id,item_id\n5,ann,B01\n3,ann,A7\n9,ann,007\n1,bob,A7\n2,bob,B01\n", encoding="utf-8"
    )
    info = convert_movielens(tmp_path / "log.csv", tmp_path / "out")
    assert (
        info.source
        == "MovieLens, log.csv, 5 ratings, user_id strings as fingerprints, movie_id strings as fingerprints"
    )
    assert "rating" not in info.columns["train"]
    ann, bob, *items = hash_strings(tf.constant(["ann", "bob", "A7", "B01", "007"])).numpy().tolist()
    a7, b01, zero = items
    rows = {row[0]: row[1:] for row in read_lists(ParquetFolder(tmp_path / "out/test", [*TEST[:2], TEST[4]]))}
    assert rows == {ann: ((a7, b01), zero), bob: ((a7,), b01)}
    table = pq.read_table(tmp_path / "out/items.parquet").to_pydict()
    assert dict(zip(table["string"], table["item_id"])) == {"A7": a7, "B01": b01, "007": zero}
    assert dict(zip(*(column.tolist() for column in read_items(tmp_path / "out")))) == {a7: 2, b01: 1, zero: 0}


def test_an_id_of_a_log_depends_on_its_own_text(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("user,item\n1,7\n2, 8\n3,007\n4,A7\n5,9.0\n", encoding="utf-8")
    log = read_log(path, {"user": ID, "item": ID})
    zero, a7 = hash_strings(["007", "A7"]).tolist()
    assert [values.tolist() for values in log.columns.values()] == [[1, 2, 3, 4, 5], [7, 8, zero, a7, 9]]
    assert log.strings == {"item": {zero: "007", a7: "A7"}}


def test_a_movies_file_of_string_ids_names_those_that_nobody_rated(tmp_path):
    source = _write(tmp_path / "raw", "ratings.csv", rows=[(1, "m1", 3, 7), (1, "m2", 3, 8)])
    (source / "movies.csv").write_text('movieId,title\n"m1",A\nm2,B\nm3,C\n', encoding="utf-8")
    convert_movielens(source, tmp_path / "out")
    assert sorted(pq.read_table(tmp_path / "out/items.parquet")["string"].to_pylist()) == ["m1", "m2", "m3"]
    (source / "movies.csv").write_text("movieId,title\n1,A\n2,B\n", encoding="utf-8")
    with pytest.raises(ValueError, match="its movie ids are integers, but the movie ids of the ratings are strings"):
        convert_movielens(source, tmp_path / "again")


@pytest.mark.parametrize("factor, unit", [(10**3, "milliseconds"), (10**6, "microseconds"), (10**9, "nanoseconds")])
def test_finer_times_are_cut_to_seconds_after_the_sort(tmp_path, factor, unit):
    times = [1_400_000_000 * factor + 5, 1_400_000_000 * factor + 2, 1_400_000_009 * factor]
    source = _write(
        tmp_path / "raw", "ratings.csv", rows=[(1, item, 3, time) for item, time in zip((10, 20, 30), times)]
    )
    info = convert_movielens(source, tmp_path / "out")
    assert info.source.endswith(f"3 ratings, timestamps in {unit} cut to seconds")
    assert read_lists(ParquetFolder(tmp_path / "out/test", TEST)) == [
        (1, (20, 10), (1_400_000_000, 1_400_000_000), (3.0, 3.0), 30, 1_400_000_009)
    ]
    _write(source, "ratings.csv", rows=[(1, 10, 3, times[0]), (1, 20, 3, 1_400_000_000)])
    with pytest.raises(
        ValueError, match=rf"got timestamps of two units, {times[0]} \({unit}\) and 1400000000 \(row 2\), want"
    ):
        convert_movielens(source, tmp_path / "again")


def test_users_that_are_left_out_are_told_of_and_no_users_are_refused(tmp_path):
    source = _write(tmp_path / "raw", "ratings.dat")
    assert convert_movielens(source, tmp_path / "out").source.endswith(
        "7 ratings, 1 of 3 users left out (one interaction)"
    )
    _write(source, "ratings.dat", rows=[(user, 10, 3, 7) for user in range(4)])
    with pytest.raises(ValueError, match=r"ratings.dat: got 4 interactions of 4 users, none with two or more. Want"):
        convert_movielens(source, tmp_path / "none")
    _write(source, "ratings.dat", rows=[])
    with pytest.raises(ValueError, match="ratings.dat: got an empty file"):
        convert_movielens(source, tmp_path / "none")
    (source / "ratings.dat").unlink()
    _write(source, "ratings.csv", rows=[])
    with pytest.raises(ValueError, match="ratings.csv: got 0 interactions of 0 users"):
        convert_movielens(source, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("ratings.dat", "1::2::3::4\n\n1::2::five::3\n", "line 3: got rating 'five', want a number. Correct"),
        (
            "ratings.dat",
            "1::2::3::4\n1::2::3\n",
            "line 2: got 3 fields, '1::2::3', want 4: user_id::movie_id::rating",
        ),
        ("u.data", "1\t2\t3\t4\n1 2 3 4\n", "line 2: got 1 fields, '1 2 3 4', want 4: user_id"),
        ("u.data", "1\t2\t3\t4\n1\t2\tnan\t4\n", "line 2: got rating 'nan', want a number"),
        ("ratings.csv", "", r"line 1: got the columns \[\], want also user_id or userId, movie_id or"),
        ("ratings.csv", "1,2,3,4\n1,3,3,5\n", r"line 1: got the columns \['1', .* want also user_id or userId"),
        ("ratings.csv", "userId,movieId\n1,2\n", r"line 1: got the columns \['userId', 'movieId'\], want also time"),
        ("ratings.csv", CSV + "1,2,3,\n", "line 2: got timestamp '', want an integer"),
        ("ratings.csv", CSV + "1,,3,4\n", "line 2: got movieId '', want an id"),
        ("ratings.csv", CSV + "1,2,3,1.5e9\n", "line 2: got timestamp '1.5e9', want an integer"),
        ("ratings.csv", CSV + '1,"2\n2",3,4\n1,2,x,4\n', "line 4: got rating 'x', want a number"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name}, {message}"):
        convert_movielens(tmp_path, tmp_path / "out")


def test_a_damaged_gzip_file_is_named(tmp_path):
    source = _write(tmp_path / "raw", "ratings.csv.gz")
    (source / "ratings.csv.gz").write_bytes((source / "ratings.csv.gz").read_bytes()[:-20])
    with pytest.raises(ValueError, match="ratings.csv.gz: not readable as "):
        convert_movielens(source, tmp_path / "out")
    (source / "ratings.csv").write_bytes(b"user\0id," + b"x" * (1 << 18))
    with pytest.raises(ValueError, match="ratings.csv: not readable as a CSV file"):
        convert_movielens(source / "ratings.csv", tmp_path / "out")


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="must be a folder with one of ratings.dat, .* got nothing there"):
        convert_movielens(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(ValueError, match="got none of them"):
        convert_movielens(tmp_path, tmp_path / "out")
    source = _write(_write(tmp_path / "raw", "ratings.dat").parent / "raw", "ratings.csv")
    with pytest.raises(ValueError, match="got 2 of them. Name the file of ratings itself"):
        convert_movielens(source, tmp_path / "out")
    (source / "movies.dat").write_text("10::A::B\n", encoding="utf-8")
    with pytest.raises(ValueError, match="movies.dat: lacks 4 rated movies, for example 20"):
        convert_movielens(source / "ratings.dat", tmp_path / "out")


def test_a_log_of_real_skew_is_each_users_films_in_order(tmp_path):
    info = convert_movielens(small_log.write_movielens(tmp_path / "raw"), tmp_path / "out")
    log = small_log.columns()
    seconds, films = log["time_ms"] // 1000, log["video_id"]
    expected, trained = [], []
    for user in np.unique(log["user_id"]):
        rows = sorted(np.flatnonzero(log["user_id"] == user), key=lambda row: seconds[row])
        expected.append((user, tuple(films[rows[:-1]]), tuple(seconds[rows[:-1]]), films[rows[-1]], seconds[rows[-1]]))
        trained += films[rows[:-1]].tolist()
    test = read_lists(ParquetFolder(tmp_path / "out/test", TEST))
    assert [row[:3] + row[4:] for row in test] == expected
    assert [row[:4] for row in test] == read_lists(ParquetFolder(tmp_path / "out/train", TRAIN))
    ids, counts = read_items(tmp_path / "out")
    assert (info.users, info.items) == (100, len(ids)) and ids.tolist() == sorted(set(films.tolist()))
    assert counts.tolist() == [trained.count(film) for film in ids.tolist()]


@pytest.fixture(scope="module")
def movielens(tmp_path_factory):
    source = shared_path("data/ml-1m")
    output = tmp_path_factory.mktemp("ml-1m") / "out"
    return source, output, convert_movielens(source, output)


@pytest.mark.slow
def test_real_data_is_the_published_sequence(movielens):
    """sasrec_ml-1m.txt holds every user's films in order, without films rated fewer than 5 times."""
    source, output, info = movielens
    assert (info.users, info.items) == (6040, 3883)
    with (source / "sasrec_item_map.csv").open(encoding="utf-8") as lines:
        film = {row["sasrec_item"]: int(row["movie_id"]) for row in csv.DictReader(lines)}
    with (source / "sasrec_user_map.csv").open(encoding="utf-8") as lines:
        person = {row["sasrec_user"]: int(row["user_id"]) for row in csv.DictReader(lines)}
    published = {user: [] for user in person.values()}
    with gzip.open(source / "sasrec_ml-1m.txt.gz", "rt") as lines:
        for line in lines:
            user, item = line.split()
            published[person[user]].append(film[item])
    kept = set(film.values())
    test = read_lists(ParquetFolder(output / "test", TEST))
    assert {row[0]: [item for item in (*row[1], row[4]) if item in kept] for row in test} == published
    assert [row[:4] for row in test] == read_lists(ParquetFolder(output / "train", TRAIN))
    assert all(row[2] == tuple(sorted(row[2])) and row[2][-1] <= row[5] for row in test)
