"""Writes the two Parquet layouts of docs/input.md, and reads their metadata.

The converters and the synthetic generators write through this module. A data set is a folder with Parquet shards in
train/, test/ and, in some data sets, validation/, items.parquet with the popularity of every item, and dataset.json
with the metadata. It appears completely or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tf_fusedrec.data.columns import Column
from tf_fusedrec.data.rows import Ragged, Rows, Values
from tf_fusedrec.models.data_sets.strings import CODES, STRINGS, write_strings

TASKS = ("ranking", "retrieval")
REQUEST = "request.json"  # an example request to a server, in the columns of the source
# Row groups are small, because ranks divide them among each other and a shuffle reorders them.
ROWS_PER_GROUP = 256
GROUPS_PER_FILE = 64


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Contents of dataset.json: the data of a data set and their origin."""

    task: str  # "ranking" or "retrieval"
    source: str  # origin of the data, with the arguments of a generator
    split: str  # rule that separates train from test
    users: int
    items: int  # rows of items.parquet
    columns: Mapping[str, Mapping[str, str]]  # split, such as "train" -> column -> type, such as "list<int64>"
    id_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name of ids -> "integer" or "string"


def write_dataset(
    root: str | pathlib.Path,
    *,
    task: str,
    source: str,
    split: str,
    users: int,
    train: Rows,
    test: Rows,
    validation: Rows | None = None,
    item_ids: np.ndarray,
    train_items: np.ndarray,
    strings: Mapping[str, Mapping[int, str]] | None = None,
    codes: Mapping[str, list] | None = None,
    id_kinds: Mapping[str, str] | None = None,
) -> DatasetInfo:
    """Writes a data set into the folder `root`, which must be new or empty.

    Args:
      root: Folder to make.
      task, source, split, users, id_kinds: See DatasetInfo.
      train, test, validation: Rows of each split. A data set may have no validation split.
      item_ids: <int64>[I], the catalogue, without duplicates.
      train_items: <int64>[T], the item of every interaction of the training split, counted for items.parquet.
      strings: By name of ids ("user_id", "item", a feature), the text of fingerprints, for strings.parquet.
      codes: By column of codes, the values of the codes 1, 2, ... (0 is missing), for codes.json.

    Raises:
      ValueError: the task is unknown, or `root` is not empty.
    """
    root = pathlib.Path(root)
    if task not in TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}.")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ValueError(f"output {str(root)!r} is not empty. Remove it, or name another folder.")
    # The data set is written to another folder and renamed at the end, so `root` is always complete.
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    columns = {}
    splits = {"train": train, "test": test} | ({} if validation is None else {"validation": validation})
    for name, rows in splits.items():
        (partial / name).mkdir(parents=True)
        declared = _declared(rows)
        _write_shards(partial / name, rows, declared)
        columns[name] = {column.name: column.type_name() for column in declared}
    _write_items(partial / "items.parquet", item_ids, train_items)
    write_strings(partial / STRINGS, strings or {})
    if codes:
        (partial / CODES).write_text(json.dumps(codes) + "\n", encoding="utf-8")
    info = DatasetInfo(task, source, split, users, len(item_ids), columns, dict(id_kinds or {}))
    (partial / "dataset.json").write_text(json.dumps(dataclasses.asdict(info), indent=2) + "\n", encoding="utf-8")
    if root.exists():
        root.rmdir()  # empty, as checked
    partial.rename(root)
    return info


def read_info(root: str | pathlib.Path) -> DatasetInfo:
    """Reads dataset.json of a data set. Raises ValueError for a folder that is not a data set."""
    path = pathlib.Path(root) / "dataset.json"
    known = [field.name for field in dataclasses.fields(DatasetInfo)]
    if not path.is_file():
        raise ValueError(
            f"{str(root)!r} is not a data set of this package: it has no dataset.json. "
            "Make one with python -m tf_fusedrec.models.data_sets.convert."
        )
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}). Convert the data again.") from error
    if not isinstance(facts, dict) or sorted({"id_kinds": {}, **facts}) != sorted(known):
        raise ValueError(f"{path}: must hold the fields {known}, got {list(facts)}. Convert the data again.")
    return DatasetInfo(**facts)


def read_items(root: str | pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Catalogue and popularity: item_id <int64>[I], ascending, and its count <int64>[I] of training interactions."""
    path = pathlib.Path(root) / "items.parquet"
    if not path.is_file():
        raise ValueError(f"{path} is missing. Make one with write_dataset.")
    table = pq.read_table(path)
    return table["item_id"].to_numpy(), table["count"].to_numpy()


def _declared(rows: Rows) -> list[Column]:
    """The columns of rows; integers are int64 and floats float32, as a Column wants them."""
    return [
        Column(name, str((values.values if isinstance(values, Ragged) else values).dtype), isinstance(values, Ragged))
        for name, values in rows.columns.items()
    ]


def _write_shards(folder: pathlib.Path, rows: Rows, declared: list[Column]) -> None:
    schema = pa.schema([(column.name, column.arrow_type()) for column in declared])
    size = ROWS_PER_GROUP * GROUPS_PER_FILE
    for number, begin in enumerate(range(0, max(rows.num_rows, 1), size)):  # an empty split: one file with its schema
        shard = rows.slice(begin, min(begin + size, rows.num_rows))
        pq.write_table(
            pa.table([_to_arrow(shard.columns[column.name], column) for column in declared], schema=schema),
            folder / f"part-{number:05d}.parquet",
            row_group_size=ROWS_PER_GROUP,
            write_page_checksum=True,
        )


def _to_arrow(values: Values, column: Column) -> pa.Array:
    if isinstance(values, Ragged):
        # list<> has 32-bit offsets, enough for the values of ROWS_PER_GROUP * GROUPS_PER_FILE rows.
        return pa.ListArray.from_arrays(pa.array(values.row_splits, pa.int32()), pa.array(values.values))
    return pa.array(values, column.arrow_type())


def _write_items(path: pathlib.Path, item_ids: np.ndarray, train_items: np.ndarray) -> None:
    catalogue = np.sort(item_ids)
    items, counts = np.unique(train_items, return_counts=True)
    popularity = np.zeros(len(catalogue), np.int64)
    popularity[np.searchsorted(catalogue, items)] = counts
    columns = {"item_id": pa.array(catalogue), "count": pa.array(popularity)}
    pq.write_table(pa.table(columns), path, write_page_checksum=True)
