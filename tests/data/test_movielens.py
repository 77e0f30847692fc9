"""MovieLens: the three forms of its ratings, stable order, and the real data set against the published sequences."""

import csv
import gzip

import numpy as np
import pytest

from tests.data.shards import read_lists
from tests.support.shared import shared_path
from tf_fusedrec.data import Column, ParquetFolder, read_info, read_items
from tf_fusedrec.data.movielens import convert_movielens

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
EXPECTED_TEST = [(1, (10,), (7,), (3.0,), 20, 8), (3, (20, 30, 10), (100, 200, 200), (4.0, 5.0, 1.0), 40, 200)]


def _write(folder, name):
    folder.mkdir(exist_ok=True)
    if name.endswith(".dat"):
        text = "".join("::".join(map(str, row)) + "\n" for row in RATINGS)
    else:
        rows = "".join(",".join(map(str, row)) + ",0\n" for row in RATINGS)
        text = "user_id,movie_id,rating,timestamp,ts_kind\n" + rows
    (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return folder


@pytest.mark.parametrize("name", ["ratings.dat", "ratings.csv", "ratings.csv.gz"])
@pytest.mark.parametrize("as_file", [False, True])
def test_every_form_gives_the_same(tmp_path, name, as_file):
    source = _write(tmp_path / "raw", name)
    info = convert_movielens(source / name if as_file else source, tmp_path / "out")
    assert (info.task, info.users, info.items) == ("retrieval", 2, 4)
    assert read_info(tmp_path / "out") == info
    assert read_lists(ParquetFolder(tmp_path / "out/test", TEST)) == EXPECTED_TEST
    assert read_lists(ParquetFolder(tmp_path / "out/train", TRAIN)) == [row[:4] for row in EXPECTED_TEST]
    ids, counts = read_items(tmp_path / "out")
    assert dict(zip(ids.tolist(), counts.tolist())) == {10: 2, 20: 1, 30: 1, 40: 0}


@pytest.mark.parametrize("name", ["movies.dat", "movies.dat.gz"])
def test_movies_file_is_the_catalogue(tmp_path, name):
    source = _write(tmp_path / "raw", "ratings.dat")
    lines = [f"{movie}::Caf\xe9 :: a title: with colons::Drama\n" for movie in (10, 20, 30, 40, 50)]
    text = "".join(lines).encode("latin-1")
    (source / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    convert_movielens(source, tmp_path / "out")
    assert read_items(tmp_path / "out")[0].tolist() == [10, 20, 30, 40, 50]


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="must be a folder with one of ratings.dat, .* got nothing there"):
        convert_movielens(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(ValueError, match="got none of them"):
        convert_movielens(tmp_path, tmp_path / "out")
    source = _write(_write(tmp_path / "raw", "ratings.dat").parent / "raw", "ratings.csv")
    with pytest.raises(ValueError, match="got 2 of them. Name the file of ratings itself"):
        convert_movielens(source, tmp_path / "out")
    (source / "movies.dat").write_text("10::A::B\n", encoding="utf-8")
    with pytest.raises(ValueError, match="movies.dat: lacks 3 movies that were rated, for example 20"):
        convert_movielens(source / "ratings.dat", tmp_path / "out")
    (source / "ratings.dat").write_text("1::2::five::3\n", encoding="utf-8")
    with pytest.raises(ValueError, match="ratings.dat: not readable as the log it should be"):
        convert_movielens(source / "ratings.dat", tmp_path / "out")
    (source / "ratings.csv").write_text("user_id,movie_id,rating\n1,2,3\n", encoding="utf-8")
    with pytest.raises(ValueError, match="ratings.csv: not readable as the log it should be .*timestamp"):
        convert_movielens(source / "ratings.csv", tmp_path / "out")
    (source / "ratings.csv").write_text("user_id,movie_id,rating,timestamp\n1,2,3,\n", encoding="utf-8")
    with pytest.raises(ValueError, match="ratings.csv: column 'timestamp' has 1 empty values"):
        convert_movielens(source / "ratings.csv", tmp_path / "out")


@pytest.fixture(scope="module")
def movielens(tmp_path_factory):
    source = shared_path("data/ml-1m")
    output = tmp_path_factory.mktemp("ml-1m") / "out"
    return source, output, convert_movielens(source, output)


def test_real_data_is_the_published_sequence(movielens):
    """sasrec_ml-1m.txt holds every user's films in order, without those rated fewer than 5 times."""
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


def test_real_data_popularity(movielens):
    """items.parquet gives the popularity baseline that the data set's own notes state: HR@10 0.036, HR@50 0.140."""
    _, output, _ = movielens
    ids, counts = read_items(output)
    assert counts.sum() == 1_000_209 - 6_040
    hits = {10: 0, 50: 0}
    rank_order = np.argsort(-counts, kind="stable")
    for row in read_lists(ParquetFolder(output / "test", (TEST[1], TEST[4]))):
        unseen = ids[rank_order[: 50 + len(row[0])]]
        top = unseen[~np.isin(unseen, row[0])][:50]
        for k in hits:
            hits[k] += row[1] in top[:k]
    assert round(hits[10] / 6040, 3) == 0.036
    assert round(hits[50] / 6040, 3) == 0.140
