"""A file of sequences -> the retrieval layout: each line is a user, then the user's items in their order.

    196 242 393 381 251          ids are parted by blanks or tabs; integers, or strings
    186 302 377

Several lines of one user are one sequence, in the order of the file. So a file with a line `user item` for every
interaction is read as well. Such files have no times: an item's `timestamp` is its place in the sequence, from 0.
"""

from __future__ import annotations

import pathlib
import zlib

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.interactions import Interactions, by_user_and_time, write_last_held_out
from tf_fusedrec.data.layouts import DatasetInfo
from tf_fusedrec.data.text_log import ids_of, open_text


def convert_sequences(source: str | pathlib.Path, output: str | pathlib.Path) -> DatasetInfo:
    """Writes the retrieval layout of the sequences in the file `source` (plain, or gzipped: .gz) into `output`.

    String ids become their fingerprints; items.parquet then has a column `string`.

    Raises:
      ValueError: no such file, a line with a user and no item, no user with two items.
    """
    path = pathlib.Path(source)
    if not path.is_file():
        raise ValueError(f"input {str(path)!r} must be the file of sequences, got a folder or nothing. Name the file.")
    user, item, strings = _read(path)
    # Stable, so that a user's items stay in the order of the file.
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
    """user, item <int64>[N] in file order, and the strings of either where they are strings."""
    users, items, counts = [], [], []
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                user, *sequence = line.split() or [""]
                if user and not sequence:
                    raise ValueError(
                        f"{path}, line {number}: got {line.strip()!r}, wanted a user and at least one item, parted by "
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
