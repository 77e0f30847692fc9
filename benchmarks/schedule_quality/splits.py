"""The two splits of a run, from one log: every user's last item is held out for test, the one before for validation."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np

from tf_fusedrec.data import Column, ParquetFolder, read_info, read_items
from tf_fusedrec.data.converters.interactions import Interactions, write_last_held_out
from tf_fusedrec.data.rows import Rows, concat

_COLUMNS = (
    Column("user_id"), Column("item_id", ragged=True), Column("timestamp", ragged=True), Column("target_item"),
    Column("target_timestamp"),
)  # fmt: skip


def validation_of(folder: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """Returns a data set without the last item of every user. Models train on it, and its test split validates them."""

    def histories(rows: Rows) -> Interactions:
        items, times = rows.ragged("item_id"), rows.ragged("timestamp")
        users = np.repeat(np.asarray(rows.columns["user_id"]), items.lengths())
        return Interactions(users, items.values, times.values)

    return _written(folder, output, histories)


def first_users(folder: pathlib.Path, output: pathlib.Path, users: int) -> pathlib.Path:
    """Returns a data set of the first users of `folder`, with the same catalogue. Makes `output` unless it exists."""

    def with_targets(rows: Rows) -> Interactions:
        rows = rows.slice(0, min(users, rows.num_rows))
        items, times = rows.ragged("item_id"), rows.ragged("timestamp")
        ends, user = items.row_splits[1:], np.asarray(rows.columns["user_id"])
        return Interactions(
            np.insert(np.repeat(user, items.lengths()), ends, user),
            np.insert(items.values, ends, np.asarray(rows.columns["target_item"])),
            np.insert(times.values, ends, np.asarray(rows.columns["target_timestamp"])),
        )

    return _written(folder, output, with_targets)


def _written(folder: pathlib.Path, output: pathlib.Path, cut: Callable[[Rows], Interactions]) -> pathlib.Path:
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        kept = cut(concat(list(ParquetFolder(folder / "test", _COLUMNS).read())))
        source = f"{read_info(folder).source}, cut"
        write_last_held_out(output, kept, path=folder, source=source, catalogue=read_items(folder)[0])
    return output
