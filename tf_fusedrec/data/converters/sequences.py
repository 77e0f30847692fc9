"""Converter of a file of sequences to the retrieval layout. Each line has a user and the user's items in order.

    196 242 393 381 251          ids, integers or strings, separated by blanks or tabs
    186 302 377

Several lines of one user form one sequence, in the order of the file, so a file with one line `user item` per
interaction works, too. These files have no times: the `timestamp` of an item is its place in the sequence, from 0.
"""

from __future__ import annotations

import pathlib
import zlib

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.converters.interactions import Interactions, by_user_and_time, write_last_held_out
from tf_fusedrec.data.converters.text_log import ids_of, open_text
from tf_fusedrec.data.layouts import DatasetInfo


def convert_sequences(source: str | pathlib.Path, output: str | pathlib.Path) -> DatasetInfo:
    """Writes the retrieval layout of a file of sequences.

    String ids become fingerprints, and items.parquet then has a column `string`.

    Args:
      source: Path of the file, plain or gzipped (.gz).
      output: Folder to make.

    Raises:
      ValueError: the file is missing; a line has a user and no item; no user has two items.
    """
    path = pathlib.Path(source)
    if not path.is_file():
        raise ValueError(f"input {str(path)!r} must be the file of sequences, got a folder or nothing. Name the file.")
    user, item, strings = _read(path)
    # The sort is stable, so a user's items stay in the order of the file.
    order = by_user_and_time(user, np.zeros(len(user), np.int64))
    user, item = user[order], item[order]
    first = np.searchsorted(user, user)
    said = [f"sequences, {path.name}, {len(user)} interactions", "timestamps are places in the sequence"]
    said += [f"{name} strings as fingerprints" for name, found in strings.items() if found]
    return write_last_held_out(
        output,
        Interactions(user, item, np.arange(len(user)) - first),
        path=path,
        source=", ".join(said),
        item_strings=strings["item_id"] or None,
    )


def _read(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, dict[str, dict[int, str]]]:
    """Reads user and item <int64>[N] in file order, and the strings of each column of string ids."""
    users, items, counts = [], [], []
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                user, *sequence = line.split() or [""]
                if user and not sequence:
                    raise ValueError(
                        f"{path}, line {number}: got {line.strip()!r}, want a user and at least one item, separated by "
                        "blanks or tabs. Correct the line or remove it."
                    )
                users += [user] if user else []
                counts += [len(sequence)] if user else []
                items += sequence
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not readable as text ({error}). Check the file.") from error
    strings = {}
    user_ids, strings["user_id"] = ids_of(path, "user", pa.chunked_array([pa.array(users, pa.string())]))
    item_ids, strings["item_id"] = ids_of(path, "item", pa.chunked_array([pa.array(items, pa.string())]))
    return np.repeat(user_ids, counts), item_ids, strings
