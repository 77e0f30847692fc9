"""Converter of MovieLens ratings to the ranking layout: is a rating at least 4 stars, and is it 5?

An event is a rating. Labels: click := rating >= 4, five := rating = 5. The split is by time, see events.py. The
converter reads the files of movielens.py, with movies.dat or movies.csv beside them, and users.dat where the release
has it.
"""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.converters.codes import numbered, numbered_lists
from tf_fusedrec.data.converters.events import Events, Window, write_events
from tf_fusedrec.data.converters.interactions import by_user_and_time, seconds_of
from tf_fusedrec.data.converters.movielens import MOVIES, listed_movies, ratings_file, read_ratings
from tf_fusedrec.data.converters.text_log import ID, Log, ids_of, open_text, read_log
from tf_fusedrec.data.layouts import DatasetInfo
from tf_fusedrec.data.rows import Values

USERS = ("users.dat", "users.dat.gz")  # UserID::Gender::Age::Occupation::Zip-code
_NO_GENRE = "(no genres listed)"
_TITLE_YEAR = re.compile(r"\((\d{4})\)\"?\s*$")


def convert_movielens_ranking(
    source: str | pathlib.Path, output: str | pathlib.Path, *, held_out: str = "test", window: Window | None = None
) -> DatasetInfo:
    """Writes the ranking layout of MovieLens ratings.

    Columns besides write_events': gender, age, occupation and zip of the user, as codes; history_ and exposed_year, the
    year of the title (0 without one), _genre, the codes of all genres, and _genre_set, a code of their combination.
    history_action is twice the rating, history_rating the rating as a number. Counts and rates of the past are by user,
    item, hour, year and genre.

    Args:
      source: Path of the file of ratings, or of a folder with it.
      output: Folder to make.
      held_out: Part in the folder test, one of events.HELD_OUT.
      window: Sizes of rows and parts.

    Raises:
      ValueError: a file is missing or unreadable; a user or a movie of a rating is not listed; write_events refuses
        the data.
    """
    path = ratings_file(pathlib.Path(source))
    log = read_ratings(path)
    columns = log.columns
    if "rating" not in columns:
        raise ValueError(f"{path}: has no column 'rating', want the stars of each line. Add it, or use movielens.")
    order = by_user_and_time(columns["user_id"], columns["timestamp"])
    columns["timestamp"], unit = seconds_of(path, columns["timestamp"])
    columns = {name: column[order] for name, column in columns.items()}
    stars = columns["rating"]
    users = np.unique(columns["user_id"])
    context, codes = _users(path.parent, users, log)
    features, of_movies = _movies(path.parent, columns["movie_id"], log)
    strings = dict(log.strings.get("movie_id", {}))
    events = Events(
        user=columns["user_id"],
        time=columns["timestamp"],
        item=columns["movie_id"],
        action=np.rint(2 * stars).astype(np.int64),
        labels={"click": (stars >= 4).astype(np.float32), "five": (stars == 5).astype(np.float32)},
        context=context,
        features=features,
        outcomes={"rating": stars},
        crossed=("year", "genre"),
    )
    said = [f"MovieLens, {path.name}, {len(order)} ratings as clicks (4 stars or more)"]
    said += [f"{name} strings as fingerprints" for name in log.strings]
    said += [f"timestamps in {unit} cut to seconds"] if unit else []
    return write_events(
        output,
        events,
        path=path,
        source=", ".join(said),
        held_out=held_out,
        window=window,
        catalogue=listed_movies(path.parent, columns["movie_id"], strings),
        item_strings=strings or None,
        codes={**codes, **of_movies},
    )


def _users(folder: pathlib.Path, users: np.ndarray, log: Log) -> tuple[dict[str, Values], dict[str, list]]:
    """Codes of gender, age, occupation and zip of the users <int64>[U]; nothing without a file of USERS."""
    names = ("gender", "age", "occupation", "zip")
    for path in (folder / name for name in USERS):
        if not path.is_file():
            continue
        listed = read_log(path, dict.fromkeys(("user_id", *names), ID), delimiter="::", header=["user_id", *names])
        rows = _rows_of(path, "user", users, listed.columns["user_id"], log.strings.get("user_id", {}))
        context: dict[str, Values] = {}
        codes: dict[str, list] = {}
        for name in names:
            strings = listed.strings.get(name, {})
            codes_of = listed.columns[name].tolist()
            values = [strings.get(value, str(value)) for value in codes_of] if strings else codes_of
            of_row, codes[name] = numbered(values)
            context[name] = of_row[rows]
        return context, codes
    return {}, {}


def _movies(folder: pathlib.Path, movie: np.ndarray, log: Log) -> tuple[dict[str, Values], dict[str, list]]:
    """Year, genres and set of genres of the movie of each rating <int64>[N]."""
    lists = [name for name in MOVIES if name != "u.item"]
    paths = [path for name in lists for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not paths:
        raise ValueError(
            f"{folder}: has none of {lists}, want one for the years and genres. Put it beside the ratings."
        )
    delimiter, header = MOVIES[paths[0].name.removesuffix(".gz")]
    with open_text(paths[0]) as file:
        lines = [line.rstrip("\r\n") for line in file if line.strip()][header:]
    parts = [(line.split(delimiter, 1)[0].strip().strip('"'), *line.rsplit(delimiter, 1)) for line in lines]
    ids, _ = ids_of(paths[0], "movie_id", pa.chunked_array([pa.array([part[0] for part in parts], pa.string())]))
    found = [_TITLE_YEAR.search(part[1]) for part in parts]
    year = np.array([int(match[1]) if match else 0 for match in found], np.int64)
    genres = [[] if part[2] in ("", _NO_GENRE) else sorted(part[2].split("|")) for part in parts]
    genre, names = numbered_lists(genres)
    genre_set, sets = numbered(["|".join(one) or None for one in genres])
    rows = _rows_of(paths[0], "movie", movie, ids, log.strings.get("movie_id", {}))
    return {"year": year[rows], "genre_set": genre_set[rows], "genre": genre.take(rows)}, {
        "genre": names,
        "genre_set": sets,
    }


def _rows_of(path: pathlib.Path, kind: str, wanted: np.ndarray, listed: np.ndarray, strings: dict) -> np.ndarray:
    """Row <int64>[N] in the list of each wanted id <int64>[N]."""
    order = np.argsort(listed, kind="stable")
    at = order[np.minimum(np.searchsorted(listed, wanted, sorter=order), len(listed) - 1)]
    unknown = np.flatnonzero(listed[at] != wanted)
    if len(unknown):
        first = wanted[unknown[0]].item()
        raise ValueError(
            f"{path}: lacks the {kind} {strings.get(first, first)} of a rating. Use the file of the same release."
        )
    return at
