"""MovieLens as ranking: a tiny release by hand, and refusals."""

import json

import pytest

from models.data_sets.events import Window
from models.data_sets.layouts import read_items
from models.data_sets.movielens import convert_movielens_ranking
from tests.data.shards import read_lists
from tf_fusedrec.data import Column, ParquetFolder

RATINGS = "1::10::5::100\n1::20::3::200\n2::10::4::150\n2::30::4::250\n1::30::1::300\n2::20::5::310\n"
MOVIES = (
    "10::Alien (1979)::Horror|Sci-Fi\n20::Café :: Noir (1990)::Drama\n30::Untitled::Drama|Horror\n40::New (2000)::\n"
)
USERS = "1::F::25::7::0123\n2::M::18::7::99999\n"
SIZES = Window(exposures=4, history=5, validation=0.2, test=1 / 3)


def release(folder, **changed):
    for name, text in {"ratings": RATINGS, "movies": MOVIES, "users": USERS, **changed}.items():
        if text is not None:
            (folder / f"{name}.dat").write_text(text, encoding="latin-1" if name == "movies" else "utf-8")
    return folder


def test_rows_by_hand(tmp_path):
    info = convert_movielens_ranking(release(tmp_path), tmp_path / "d", window=SIZES)
    assert (info.task, info.users, info.items) == ("ranking", 2, 4)
    context = [Column(name) for name in ("user_id", "gender", "age", "occupation", "zip")]
    lists = [
        Column(name, ragged=True)
        for name in ("history_item", "history_action", "exposed_item", "exposed_year", "exposed_genre_set")
        + ("exposed_genre", "exposed_genre_count")
    ]
    labels = [Column(f"exposed_{name}", "float32", ragged=True) for name in ("click", "five")]
    # Genres are Drama 1, Horror 2, Sci-Fi 3; their sets Drama 1, Drama|Horror 2, Horror|Sci-Fi 3.
    assert read_lists(ParquetFolder(tmp_path / "d/train", [*context, *lists, *labels])) == [
        (1, 1, 2, 1, 1, (), (), (10, 20), (1979, 1990), (3, 1), (2, 3, 1), (2, 1), (1.0, 0.0), (1.0, 0.0)),
        (2, 2, 1, 1, 2, (), (), (10, 30), (1979, 0), (3, 2), (2, 3, 1, 2), (2, 2), (1.0, 1.0), (0.0, 0.0)),
    ]
    assert read_lists(ParquetFolder(tmp_path / "d/test", [*context[:1], *lists[:3]])) == [
        (1, (10, 20), (10, 6), (30,)), (2, (10, 30), (8, 8), (20,)),
    ]  # fmt: skip
    genre = [Column(f"exposed_past_genre_{name}", "float32", ragged=True) for name in ("count", "click_rate")]
    # User 1 rates 30 (Drama, Horror) after 10 (Horror, click) and 20 (Drama, no click).
    assert read_lists(ParquetFolder(tmp_path / "d/test", genre)) == [((2.0,), (0.5,)), ((1.0,), (1.0,))]
    codes = json.loads((tmp_path / "d/codes.json").read_text(encoding="utf-8"))
    assert codes["genre_set"] == ["Drama", "Drama|Horror", "Horror|Sci-Fi"] and codes["gender"] == ["F", "M"]
    assert read_items(tmp_path / "d")[1].tolist() == [2, 1, 1, 0]


def test_without_users_there_are_no_user_columns(tmp_path):
    info = convert_movielens_ranking(release(tmp_path, users=None), tmp_path / "d", window=SIZES)
    assert "gender" not in info.columns["train"] and "exposed_genre" in info.columns["train"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"movies": None}, r"has none of \['movies.dat', 'movies.csv'\], want one for the years and genres"),
        ({"movies": MOVIES.replace("30::", "31::")}, r"movies.dat: lacks the movie 30 of a rating"),
        ({"users": USERS.replace("2::M", "3::M")}, r"users.dat: lacks the user 2 of a rating"),
        ({"users": "1::F::25\n"}, r"users.dat, line 1: got 3 fields"),
        ({"ratings": RATINGS.replace("::3::", "::x::")}, r"ratings.dat, line 2: got rating 'x', want a number"),
    ],
)
def test_refusals(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        convert_movielens_ranking(release(tmp_path, **changed), tmp_path / "d", window=SIZES)
    assert not (tmp_path / "d").exists()
