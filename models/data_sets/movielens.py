"""Converts MovieLens ratings, or a log with the same columns, to the retrieval layout or to the ranking layout.

It reads the files of GroupLens, plain or gzipped (.gz):

    ratings.dat    UserID::MovieID::Rating::Timestamp, with whole or half stars
    u.data         the same columns, separated by tabs
    ratings.csv    with the header userId,movieId,rating,timestamp

Any other CSV file works, too: its columns are found by NAMES, and `rating` may be missing.

Interactions are sorted by (user, timestamp) with a STABLE sort, ties in file order. Many ratings share a second, so an
unstable sort would change the data set.

Ranking layout: An event is a rating. Labels: click := rating >= 4, five := rating = 5. The split is by time, see
events.py. This converter also reads movies.dat or movies.csv from the same folder, and users.dat if it is there.
"""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.rows import Values
from tf_fusedrec.models.data_sets.events import Events, Window, write_events
from tf_fusedrec.models.data_sets.interactions import Interactions, by_user_and_time, seconds_of, write_last_held_out
from tf_fusedrec.models.data_sets.layouts import DatasetInfo
from tf_fusedrec.models.data_sets.text_log import (
    ID,
    INTEGER,
    NUMBER,
    Log,
    header_of,
    ids_of,
    numbered,
    numbered_lists,
    open_text,
    read_log,
)

RATINGS = tuple(name + end for name in ("ratings.dat", "ratings.csv", "u.data") for end in ("", ".gz"))
# Files that list all movies: the delimiter after the id, and whether the first line is a header.
MOVIES = {"movies.dat": ("::", False), "movies.csv": (",", True), "u.item": ("|", False)}
_KINDS = {"user_id": ID, "movie_id": ID, "rating": NUMBER, "timestamp": INTEGER}
# Accepted names of each column in the header of a CSV file.
NAMES = {
    "user_id": ("user_id", "userId"),
    "movie_id": ("movie_id", "movieId", "item_id", "itemId"),
    "rating": ("rating",),
    "timestamp": ("timestamp",),
}


def convert_movielens(source: str | pathlib.Path, output: str | pathlib.Path, *, held_out: str = "test") -> DatasetInfo:
    """Writes the retrieval layout of MovieLens ratings: one row per user, with the last items held out.

    The catalogue is movies.dat, movies.csv or u.item beside the ratings, else the rated movies. String ids become
    fingerprints. Times finer than seconds are cut to seconds. The field `source` of dataset.json mentions both
    conversions.

    `source` is the file of ratings or its folder, `output` the folder to make, `held_out` as in write_last_held_out.
    Raises ValueError for a missing file, an unreadable line, times of two units, no user with enough ratings, or a
    catalogue that lacks a rated movie.
    """
    path, columns, strings, notes = _read_sorted(pathlib.Path(source))
    movie_strings = dict(strings.get("movie_id", {}))
    return write_last_held_out(
        output,
        Interactions(columns["user_id"], columns["movie_id"], columns["timestamp"], columns.get("rating")),
        path=path,
        source=", ".join([f"MovieLens, {path.name}, {len(columns['user_id'])} ratings", *notes]),
        catalogue=_catalogue(path.parent, columns["movie_id"], movie_strings),
        strings={"user_id": strings.get("user_id", {}), "item": movie_strings},
        held_out=held_out,
    )


def _read_sorted(source: pathlib.Path) -> tuple[pathlib.Path, dict[str, np.ndarray], dict[str, dict], list[str]]:
    """The file of ratings, its columns by user and time in seconds, the strings of ids, and notes on conversions."""
    path = _ratings_file(source)
    columns, strings = _read_ratings(path)
    order = by_user_and_time(columns["user_id"], columns["timestamp"])
    columns["timestamp"], unit = seconds_of(path, columns["timestamp"])
    notes = [f"{name} strings as fingerprints" for name in strings]
    notes += [f"timestamps in {unit} cut to seconds"] if unit else []
    return path, {name: column[order] for name, column in columns.items()}, strings, notes


def _ratings_file(source: pathlib.Path) -> pathlib.Path:
    if source.is_file():
        return source
    files = [source / name for name in RATINGS if (source / name).is_file()]
    if len(files) != 1:
        number = f"{len(files)} of them" if files else "none of them" if source.is_dir() else "nothing there"
        raise ValueError(
            f"input {str(source)!r} must be a folder with one of {', '.join(RATINGS)}, got {number}. "
            "Name the file of ratings itself."
        )
    return files[0]


def _read_ratings(path: pathlib.Path) -> Log:
    """The columns of _KINDS, `rating` where the file has it, in file order."""
    for suffix, delimiter in ((".dat", "::"), (".data", "\t")):
        if suffix in path.suffixes:
            return read_log(path, _KINDS, delimiter=delimiter, header=list(_KINDS))
    header = header_of(path)
    accepted = {name: [column for column in columns if column in header] for name, columns in NAMES.items()}
    names = {columns[0]: name for name, columns in accepted.items() if columns}
    missing = [" or ".join(NAMES[name]) for name in NAMES if name not in names.values() and name != "rating"]
    if missing:
        raise ValueError(
            f"{path}, line 1: got the columns {header}, want also {', '.join(missing)}. Rename the columns, or give "
            "the file the suffix of its format: .dat (separated by ::) or .data (separated by tabs)."
        )
    log = read_log(path, {column: _KINDS[name] for column, name in names.items()})
    return Log(
        {names[column]: values for column, values in log.columns.items()},
        {names[column]: strings for column, strings in log.strings.items()},
    )


def _catalogue(folder: pathlib.Path, rated: np.ndarray, strings: dict[int, str]) -> np.ndarray | None:
    """All movies <int64>[I] of a file of MOVIES, which must list every rated movie; None without such a file.

    The strings of unrated movies are added to `strings` if ids are strings.
    """
    for name, (delimiter, header) in MOVIES.items():
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return _listed(path, delimiter, header, np.unique(rated), strings)
    return None


def _listed(path: pathlib.Path, delimiter: str, header: bool, rated: np.ndarray, strings: dict[int, str]) -> np.ndarray:
    # Only the text before the first delimiter is used: titles may be latin-1 and hold any delimiter.
    with open_text(path) as file:
        ids = [line.split(delimiter, 1)[0].strip().strip('"') for line in file if line.strip()][header:]
    movies, theirs = ids_of(path, "movie_id", pa.chunked_array([pa.array(ids, pa.string())]))
    if bool(theirs) != bool(strings):
        kinds = ("strings", "integers") if theirs else ("integers", "strings")
        raise ValueError(
            f"{path}: its movie ids are {kinds[0]}, but the movie ids of the ratings are {kinds[1]}. "
            "Use the movies file of the same release, or remove it to use the rated movies."
        )
    strings.update(theirs)
    unknown = np.setdiff1d(rated, movies)
    if len(unknown):
        example = strings.get(int(unknown[0]), unknown[0])
        raise ValueError(
            f"{path}: lacks {len(unknown)} rated movies, for example {example}. "
            "Use the movies file of the same release, or remove it to use the rated movies."
        )
    return np.unique(movies)


USERS = ("users.dat", "users.dat.gz")  # UserID::Gender::Age::Occupation::Zip-code
_NO_GENRE = "(no genres listed)"
_TITLE_YEAR = re.compile(r"\((\d{4})\)\"?\s*$")


def convert_movielens_ranking(
    source: str | pathlib.Path, output: str | pathlib.Path, *, held_out: str = "test", window: Window | None = None
) -> DatasetInfo:
    """Writes the ranking layout of MovieLens ratings.

    Columns in addition to write_events': gender, age, occupation and zip of the user, as codes; history_ and
    exposed_year, the year of the title (0 without one), _genre, the codes of all genres, and _genre_set, a code of
    their combination. history_action is twice the rating, history_rating the rating as a number. Counts and rates of
    the past are by user, item, hour, year and genre.

    `held_out` and `window`: see write_events. Raises ValueError for a missing or unreadable file, or for a rating
    with a user or movie that is not listed.
    """
    path, columns, strings, notes = _read_sorted(pathlib.Path(source))
    if "rating" not in columns:
        raise ValueError(f"{path}: has no column 'rating', want the stars of each line. Add it, or use movielens.")
    stars = columns["rating"]
    context, codes = _users(path.parent, np.unique(columns["user_id"]), strings.get("user_id", {}))
    movie_strings = dict(strings.get("movie_id", {}))
    features, movie_codes = _movies(path.parent, columns["movie_id"], movie_strings)
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
    return write_events(
        output,
        events,
        path=path,
        source=", ".join([f"MovieLens, {path.name}, {len(stars)} ratings as clicks (4 stars or more)", *notes]),
        held_out=held_out,
        window=window,
        catalogue=_catalogue(path.parent, columns["movie_id"], movie_strings),
        strings={"user_id": strings.get("user_id", {}), "item": movie_strings},
        codes={**codes, **movie_codes},
    )


def _users(
    folder: pathlib.Path, users: np.ndarray, user_strings: dict[int, str]
) -> tuple[dict[str, Values], dict[str, list]]:
    """Codes of gender, age, occupation and zip of the users <int64>[U]; nothing without a file of USERS."""
    names = ("gender", "age", "occupation", "zip")
    for path in (folder / name for name in USERS):
        if not path.is_file():
            continue
        listed = read_log(path, dict.fromkeys(("user_id", *names), ID), delimiter="::", header=["user_id", *names])
        rows = _rows_of(path, "user", users, listed.columns["user_id"], user_strings)
        context: dict[str, Values] = {}
        codes: dict[str, list] = {}
        for name in names:
            strings = listed.strings.get(name, {})
            values = listed.columns[name].tolist()
            numbers, codes[name] = numbered([strings.get(x, str(x)) for x in values] if strings else values)
            context[name] = numbers[rows]
        return context, codes
    return {}, {}


def _movies(
    folder: pathlib.Path, movie: np.ndarray, movie_strings: dict[int, str]
) -> tuple[dict[str, Values], dict[str, list]]:
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
    matches = [_TITLE_YEAR.search(part[1]) for part in parts]
    year = np.array([int(match[1]) if match else 0 for match in matches], np.int64)
    genres = [[] if part[2] in ("", _NO_GENRE) else sorted(part[2].split("|")) for part in parts]
    genre, genre_names = numbered_lists(genres)
    genre_set, sets = numbered(["|".join(names) or None for names in genres])
    rows = _rows_of(paths[0], "movie", movie, ids, movie_strings)
    features: dict[str, Values] = {"year": year[rows], "genre_set": genre_set[rows], "genre": genre.take(rows)}
    return features, {"genre": genre_names, "genre_set": sets}


def _rows_of(path: pathlib.Path, role: str, ids: np.ndarray, listed: np.ndarray, strings: dict) -> np.ndarray:
    """Row <int64>[N] of each id <int64>[N] in the list."""
    order = np.argsort(listed, kind="stable")
    at = order[np.minimum(np.searchsorted(listed, ids, sorter=order), len(listed) - 1)]
    unknown = np.flatnonzero(listed[at] != ids)
    if len(unknown):
        first = ids[unknown[0]].item()
        raise ValueError(
            f"{path}: lacks the {role} {strings.get(first, first)} of a rating. Use the file of the same release."
        )
    return at
