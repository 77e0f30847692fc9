"""MovieLens ratings -> the retrieval layout: one row per user, the last item held out.

Reads `ratings.dat` (UserID::MovieID::Rating::Timestamp) as GroupLens publishes it, or `ratings.csv(.gz)` with the
header user_id,movie_id,rating,timestamp (further columns are ignored). Interactions are sorted by (user, timestamp)
with a STABLE sort, ties in file order: many ratings share a second, and an unstable sort there changes the data set.
"""

from __future__ import annotations

import gzip
import logging
import pathlib

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.interactions import by_user_and_time, read_double_colon, read_log
from tf_fusedrec.data.layouts import DatasetInfo, write_dataset
from tf_fusedrec.data.rows import Rows, Values, ragged_from_groups

RATINGS = ("ratings.dat", "ratings.csv", "ratings.csv.gz")
MOVIES = ("movies.dat", "movies.dat.gz")
SPLIT = (
    "Leave one out: a user's last interaction is the target of test, all before it are train and the history of test. "
    "Users with fewer than 2 interactions are left out."
)


def convert_movielens(source: str | pathlib.Path, output: str | pathlib.Path) -> DatasetInfo:
    """Writes the retrieval layout of the ratings in `source` (a folder, or the file of ratings) into `output`.

    The catalogue is movies.dat(.gz) where that lies beside the ratings, else the movies that were rated.
    """
    ratings = _ratings_file(pathlib.Path(source))
    user, movie, rating, time = _read_ratings(ratings)
    order = by_user_and_time(user, time)
    user, movie, rating, time = user[order], movie[order], rating[order], time[order]

    users, row_of, counts = np.unique(user, return_inverse=True, return_counts=True)
    enough = (counts >= 2)[row_of]
    if not enough.all():
        logging.info("%d of %d users have one interaction and are left out", int((counts < 2).sum()), len(users))
    user, movie, rating, time = user[enough], movie[enough], rating[enough], time[enough]
    users, row_of = np.unique(user, return_inverse=True)
    last = np.append(user[1:] != user[:-1], True)[: len(user)]

    before = {
        name: ragged_from_groups(values[~last], row_of[~last], len(users))
        for name, values in {"item_id": movie, "timestamp": time, "rating": rating}.items()
    }
    train: dict[str, Values] = {"user_id": users, **before}
    test = {**train, "target_item": movie[last], "target_timestamp": time[last]}
    return write_dataset(
        output,
        task="retrieval",
        source=f"MovieLens, {ratings.name}, {len(order)} ratings",
        split=SPLIT,
        users=len(users),
        train=Rows(train, len(users)),
        test=Rows(test, len(users)),
        item_ids=_catalogue(ratings.parent, movie),
        train_items=movie[~last],
    )


def _ratings_file(source: pathlib.Path) -> pathlib.Path:
    if source.is_file():
        return source
    found = [source / name for name in RATINGS if (source / name).is_file()]
    if len(found) != 1:
        what = f"{len(found)} of them" if found else "none of them" if source.is_dir() else "nothing there"
        raise ValueError(
            f"input {str(source)!r} must be a folder with one of {', '.join(RATINGS)}, got {what}. "
            "Name the file of ratings itself."
        )
    return found[0]


def _read_ratings(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """user, movie <int64>[N], rating <float32>[N], time <int64>[N] (seconds), in file order."""
    names = ("user_id", "movie_id", "rating", "timestamp")
    if ".dat" in path.suffixes:
        columns = read_double_colon(path, names)
    else:
        types = {name: pa.float32() if name == "rating" else pa.int64() for name in names}
        columns = read_log(path, types)
    user, movie, rating, time = (columns[name] for name in names)
    return user, movie, rating.astype(np.float32), time


def _catalogue(folder: pathlib.Path, rated: np.ndarray) -> np.ndarray:
    """<int64>[I] every movie: those of movies.dat(.gz), which must hold all that were rated, or the rated ones."""
    rated = np.unique(rated)
    for name in MOVIES:
        path = folder / name
        if not path.is_file():
            continue
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # Titles are latin-1 and may hold colons; the id is what stands before the first "::".
        movies = np.array([int(line.split(b"::", 1)[0]) for line in content.splitlines() if line.strip()], np.int64)
        unknown = np.setdiff1d(rated, movies)
        if len(unknown):
            raise ValueError(
                f"{path}: lacks {len(unknown)} movies that were rated, for example {unknown[0]}. "
                "Use the movies file of the same release, or take it away to use the rated movies."
            )
        return np.unique(movies)
    return rated
