"""Writes interactions as a retrieval data set: one row per user, with the last items held out.

The converters of logs and of sequences share the stable order, the conversion to seconds, and the cut of each sequence.

convert_sequences converts a file of sequences. Each line has a user and the user's items in order:

    196 242 393 381 251          ids, integers or strings, separated by blanks or tabs
    186 302 377

Several lines of one user form one sequence, in the order of the file, so a file with one line `user item` per
interaction works, too. The files have no times: the `timestamp` of an item is its place in the sequence, from 0.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tf_fusedrec.data.rows import Ragged, Rows, Values, splits_of
from tf_fusedrec.models.data_sets.layouts import REQUEST, DatasetInfo, write_dataset
from tf_fusedrec.models.data_sets.text_log import ids_of, open_text

SPLIT = "Leave one out: of a user's interactions, {use} Users with fewer than {least} interactions are left out."
_USE = {
    "both": "the last is the target of test, the second last that of validation, and all before both are train.",
    "test": "the last is the target of test, and all before it are train.",
    "validation": "the last is left out, the second last is the target of test, and all before both are train.",
}
LAST_HELD_OUT = tuple(_USE)
_EXAMPLES = 3  # events of the example request
# (smallest time of a unit, units per second, unit). Seconds reach 10^11 in the year 5138, milliseconds did in 1973.
_FINER = ((10**17, 10**9, "nanoseconds"), (10**14, 10**6, "microseconds"), (10**11, 10**3, "milliseconds"))


class Interactions(NamedTuple):
    """N interactions, each user's in the order of time."""

    user: np.ndarray  # <int64>[N], ascending
    item: np.ndarray  # <int64>[N]
    time: np.ndarray  # <int64>[N], seconds
    rating: np.ndarray | None = None  # <float32>[N]


def by_user_and_time(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Stable order <int64>[N] by (user, time). Equal times keep the order of the file."""
    return np.lexsort((time, user))


def seconds_of(path: pathlib.Path, time: np.ndarray) -> tuple[np.ndarray, str]:
    """Times <int64>[N] in whole seconds, and their original unit if it is finer ("" for seconds).

    Raises:
      ValueError: the times have two units.
    """
    for least, per_second, unit in _FINER:
        if time.max(initial=0) < least:
            continue
        if time.min() < least:
            coarse = int(np.flatnonzero(time < least)[0])
            raise ValueError(
                f"{path}: got timestamps of two units, {time.max()} ({unit}) and {time[coarse]} (row {coarse + 1}), "
                "want one unit, seconds since 1970. Correct the smaller part."
            )
        return time // per_second, unit
    return time, ""


def write_last_held_out(
    output: str | pathlib.Path,
    interactions: Interactions,
    *,
    path: pathlib.Path,
    source: str,
    catalogue: np.ndarray | None = None,
    strings: Mapping[str, Mapping[int, str]] | None = None,
    id_kinds: Mapping[str, str] | None = None,
    names: tuple[str, str] = ("item", "time"),
    held_out: str = "test",
) -> DatasetInfo:
    """Writes the retrieval layout of interactions into `output`. The history of a target is all before it.

    Args:
      output: Folder to make.
      interactions: Interactions of all users.
      path: Source file, for messages.
      source: Description of the source for dataset.json; the number of users left out is appended.
      catalogue: <int64>[I], all items without duplicates; None: the items of the users kept.
      strings, id_kinds: See write_dataset.
      names: Columns of item and time in the example request.
      held_out: Held-out items of a user, one of LAST_HELD_OUT. "both" writes a split validation. "validation" puts
        that one's targets into test, so that settings can be chosen without the last items.

    Raises:
      ValueError: held_out is unknown; no user has an interaction to train on; write_dataset refuses the data.
    """
    if held_out not in LAST_HELD_OUT:
        raise ValueError(f"held_out must be one of {LAST_HELD_OUT}, got {held_out!r}.")
    user, item, time, rating = interactions
    everyone, row_of, counts = np.unique(user, return_inverse=True, return_counts=True)
    least = 2 if held_out == "test" else 3
    enough = (counts >= least)[row_of]
    left_out = int((counts < least).sum())
    if left_out == len(everyone):
        raise ValueError(
            f"{path}: got {len(user)} interactions of {len(everyone)} users, none with {least} or more. Want at least "
            f"{least} interactions of a user, because held_out is {held_out!r}. Check the user column"
            f"{'.' if held_out == 'test' else ', or set held_out to test.'}"
        )
    if left_out:
        source += f", {left_out} of {len(everyone)} users left out (fewer than {least} interactions)"
    user, item, time = user[enough], item[enough], time[enough]
    users, row_of = np.unique(user, return_inverse=True)
    place = np.bincount(row_of)[row_of] - np.arange(len(user)) + np.searchsorted(user, user) - 1  # 0: the last
    columns = {"item_id": item, "timestamp": time}
    if rating is not None:
        columns["rating"] = rating[enough]

    def before(end: int) -> dict[str, Values]:
        """Columns of the interactions before the last but `end`."""
        splits = splits_of(np.bincount(row_of[place > end], minlength=len(users)))
        return {"user_id": users, **{name: Ragged(values[place > end], splits) for name, values in columns.items()}}

    def targets(end: int) -> Rows:
        at = place == end
        return Rows({**before(end), "target_item": item[at], "target_timestamp": time[at]}, len(users))

    first = least - 2  # place of the first held-out interaction
    info = write_dataset(
        output,
        task="retrieval",
        source=source,
        split=SPLIT.format(use=_USE[held_out], least=least),
        users=len(users),
        train=Rows(before(first), len(users)),
        validation=targets(1) if held_out == "both" else None,
        test=targets(1 if held_out == "validation" else 0),
        item_ids=np.unique(item) if catalogue is None else catalogue,
        train_items=item[place > first],
        strings=strings,
        id_kinds=id_kinds,
    )
    # The longest sequence, from which the last item is to be found again.
    at = np.flatnonzero(row_of == np.bincount(row_of).argmax())
    texts = (strings or {}).get("item", {})
    of_item, of_time = names
    history = [
        {of_item: texts.get(i, i), of_time: t} for i, t in zip(item[at].tolist(), time[at].tolist()) if t < time[at[-1]]
    ]
    instance = {of_time: int(time[at[-1]]), "history": history[-_EXAMPLES:], "k": min(_EXAMPLES, info.items)}
    request = {"signature_name": "columns", "instances": [instance]}
    (pathlib.Path(output) / REQUEST).write_text(json.dumps(request, indent=1) + "\n", encoding="utf-8")
    return info


def convert_sequences(source: str | pathlib.Path, output: str | pathlib.Path, *, held_out: str = "test") -> DatasetInfo:
    """Writes the retrieval layout of a file of sequences. String ids become fingerprints.

    The file is plain or gzipped (.gz). `held_out`: see write_last_held_out. Raises ValueError for a missing file, a
    user without items in a line, or no user with enough items.
    """
    path = pathlib.Path(source)
    if not path.is_file():
        raise ValueError(f"input {str(path)!r} must be the file of sequences, got a folder or nothing. Name the file.")
    user, item, strings = _read(path)
    # The sort is stable, so a user's items stay in the order of the file.
    order = by_user_and_time(user, np.zeros(len(user), np.int64))
    user, item = user[order], item[order]
    first = np.searchsorted(user, user)
    notes = [f"sequences, {path.name}, {len(user)} interactions", "timestamps are places in the sequence"]
    notes += [f"{name} strings as fingerprints" for name, texts in strings.items() if texts]
    return write_last_held_out(
        output,
        Interactions(user, item, np.arange(len(user)) - first),
        path=path,
        source=", ".join(notes),
        strings={"user_id": strings["user_id"], "item": strings["item_id"]},
        held_out=held_out,
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
