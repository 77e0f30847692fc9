"""Facts of a prepared data set for the screen, the record and the report of a run: events, times, labels, gaps.

They are computed once, from columns that are read file by file, and kept in profile.json beside the data, if that
folder can be written. A training split that grows (data.follow) is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tf_fusedrec.models.data_sets.layouts import read_info
from tf_fusedrec.models.experiment import Experiment
from tf_fusedrec.models.experiment.ranking_config import RankingConfig

PROFILE = "profile.json"
SPLITS = ("train", "validation", "test")
_FOOTER_BYTES = 1 << 16  # the end of a Parquet file has the sizes and the bounds of every column


def profile_of(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
    """Returns the facts of a data set, JSON-serializable. One rank calls it.

    Returns:
      Dict with `source` and `rule` of the split in words, numbers of `users` and `items`, `fingerprint`, and `splits`.
      Each split has `rows`, `users`, `events`, `first` and `last` (seconds since 1970), `labels` (rate by column) and
      `missing` (share by column, if above 0).
    """
    grows = experiment.data.follow and not experiment.data.follows_table
    splits = [name for name in SPLITS if (folder / name).is_dir() and not (grows and name == "train")]
    info, fingerprint = read_info(folder), fingerprint_of(folder, splits)
    asked = [fingerprint, _columns(experiment, "test")]
    kept = folder / PROFILE
    if kept.is_file():
        profile = json.loads(kept.read_text(encoding="utf-8"))
        if profile.pop("asked") == asked:
            return profile
    profile = {
        "source": info.source,
        "rule": info.split,
        "users": info.users,
        "items": info.items,
        "fingerprint": fingerprint,
        "splits": {name: _split(folder / name, **_columns(experiment, name)) for name in splits},
    }
    if not grows:
        with contextlib.suppress(OSError):  # a folder of another user
            partial = folder / f"{PROFILE}.new"
            partial.write_text(json.dumps({**profile, "asked": asked}) + "\n", encoding="utf-8")
            partial.replace(kept)
    return profile


def fingerprint_of(folder: pathlib.Path, splits: Sequence[str]) -> str:
    """Returns sixteen hexadecimal digits of the names, sizes and ends of Parquet files of a data set."""
    digest = hashlib.sha256()
    for path in sorted(path for name in splits for path in (folder / name).rglob("*.parquet")):
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - _FOOTER_BYTES))
            digest.update(f"{path.relative_to(folder)} {size} ".encode() + file.read())
    return digest.hexdigest()[:16]


def _columns(experiment: Experiment, split: str) -> dict[str, Any]:
    """Returns the columns to read by their role: arguments of _split."""
    model = experiment.model
    if not isinstance(model, RankingConfig):
        time = "timestamp" if split == "train" else "target_timestamp"
        return {"time": time, "labels": [], "values": []}
    values = [*model.id_columns("exposed"), *model.dense_columns("exposed"), *model.contextual, *model.contextual_dense]
    return {
        "time": "exposed_time",
        "labels": [*model.label_columns],
        "values": [name for name in values if not name.startswith("exposed_past_")],
    }


def _split(folder: pathlib.Path, time: str, labels: list[str], values: list[str]) -> dict[str, Any]:
    rows, events, bounds = 0, 0, list[int]()
    users = np.empty(0, np.int64)
    sums = dict.fromkeys(labels, 0.0)
    missing = {name: [0, 0] for name in values}
    for table in _tables(folder, {"user_id", time, *labels, *values}):
        rows += len(table)
        if "user_id" in table.column_names:
            users = np.union1d(users, _flat(table["user_id"]))
        times = _flat(table[time])
        events += len(times)
        if len(times):
            bounds += [int(times.min()), int(times.max())]
        for name in sums.keys() & set(table.column_names):  # the job refuses a column that is missing
            sums[name] += float(np.nansum(_flat(table[name])))
        for name, counts in missing.items():
            if name in table.column_names:
                numbers = _flat(table[name])
                counts[0] += int((np.isnan(numbers) if numbers.dtype.kind == "f" else numbers == -1).sum())
                counts[1] += len(numbers)
    return {
        "rows": rows,
        "users": len(users) or rows,
        "events": events,
        "first": min(bounds, default=None),
        "last": max(bounds, default=None),
        "labels": {name.removeprefix("exposed_"): total / events for name, total in sums.items() if events},
        "missing": {name.removeprefix("exposed_"): gone / of for name, (gone, of) in missing.items() if gone},
    }


def _tables(folder: pathlib.Path, columns: set[str]) -> Iterator[pa.Table]:
    for path in sorted(folder.rglob("*.parquet")):
        file = pq.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name in columns]
        for number in range(0, file.num_row_groups, 64):
            yield file.read_row_groups([*range(number, min(number + 64, file.num_row_groups))], columns=names)


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    """The values of a column, those of lists one after another; a missing number is NaN."""
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # of no chunk
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], column.type)
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False)
