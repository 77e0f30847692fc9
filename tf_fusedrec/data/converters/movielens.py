"""Converter of MovieLens ratings, or of a log with the same columns, to the retrieval layout.

It reads the files of GroupLens, plain or gzipped (.gz):

    ratings.dat    UserID::MovieID::Rating::Timestamp, with whole or half stars
    u.data         the same columns, separated by tabs
    ratings.csv    with the header userId,movieId,rating,timestamp

Any other CSV file works, too: its columns are found by NAMES, and `rating` may be missing.

Interactions are sorted by (user, timestamp) with a STABLE sort, ties in file order. Many ratings share a second, so an
unstable sort would change the data set.
"""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.converters.interactions import Interactions, by_user_and_time, seconds_of, write_last_held_out
from tf_fusedrec.data.converters.text_log import ID, INTEGER, NUMBER, Log, header_of, ids_of, open_text, read_log
from tf_fusedrec.data.layouts import DatasetInfo

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


def convert_movielens(source: str | pathlib.Path, output: str | pathlib.Path) -> DatasetInfo:
    """Writes the retrieval layout of MovieLens ratings: one row per user, with the last item held out.

    The catalogue is movies.dat, movies.csv or u.item beside the ratings, else the rated movies. String ids become
    fingerprints, and items.parquet then has a column `string`. Times finer than seconds are cut to seconds. The field
    `source` of dataset.json mentions both conversions.

    Args:
      source: Path of the file of ratings, or of a folder with it.
      output: Folder to make.

    Raises:
      ValueError: the file of ratings is missing; a line is unreadable; no user has two ratings; times have two units;
        the catalogue lacks a rated movie.
    """
    path = ratings_file(pathlib.Path(source))
    log = read_ratings(path)
    columns = log.columns
    order = by_user_and_time(columns["user_id"], columns["timestamp"])
    columns["timestamp"], unit = seconds_of(path, columns["timestamp"])
    columns = {name: column[order] for name, column in columns.items()}
    said = [f"MovieLens, {path.name}, {len(order)} ratings"]
    said += [f"{name} strings as fingerprints" for name in log.strings]
    said += [f"timestamps in {unit} cut to seconds"] if unit else []
    strings = dict(log.strings.get("movie_id", {}))
    return write_last_held_out(
        output,
        Interactions(columns["user_id"], columns["movie_id"], columns["timestamp"], columns.get("rating")),
        path=path,
        source=", ".join(said),
        catalogue=listed_movies(path.parent, columns["movie_id"], strings),
        item_strings=strings or None,
    )


def ratings_file(source: pathlib.Path) -> pathlib.Path:
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


def read_ratings(path: pathlib.Path) -> Log:
    """The columns of _KINDS, `rating` where the file has it, in file order."""
    for suffix, delimiter in ((".dat", "::"), (".data", "\t")):
        if suffix in path.suffixes:
            return read_log(path, _KINDS, delimiter=delimiter, header=list(_KINDS))
    header = header_of(path)
    found = {name: next((one for one in known if one in header), None) for name, known in NAMES.items()}
    missing = [" or ".join(NAMES[name]) for name, column in found.items() if column is None and name != "rating"]
    if missing:
        raise ValueError(
            f"{path}, line 1: got the columns {header}, want also {', '.join(missing)}. Rename the columns, or give "
            "the file the suffix of its format: .dat (separated by ::) or .data (separated by tabs)."
        )
    log = read_log(path, {column: _KINDS[name] for name, column in found.items() if column is not None})
    own = {column: name for name, column in found.items() if column is not None}
    return Log(
        {own[column]: values for column, values in log.columns.items()},
        {own[column]: strings for column, strings in log.strings.items()},
    )


def listed_movies(folder: pathlib.Path, rated: np.ndarray, strings: dict[int, str]) -> np.ndarray | None:
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
