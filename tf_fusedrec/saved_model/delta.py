"""A trainer's side of delta exports: what a full export has that its base has not. applying.py is the other side.

The rows themselves are compared. Counters of changes would be cheaper, but they begin anew from the last checkpoint
when a job is restarted, and rows that were trained differently since would be passed over.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import numpy as np

from tf_fusedrec.saved_model import applying


def check_base(base: pathlib.Path, described: dict) -> None:
    """Raises ValueError unless `base` is a full export with these operations and tables; see applying.describe."""
    found = applying.describe(base)
    if found != described:
        raise ValueError(
            f"base {os.fspath(base)!r} has {found}, and the model to export has {described}. Remedy: a base of the "
            "same ops and tables, or a full export."
        )


def write_delta(base: pathlib.Path, export: pathlib.Path, delta: pathlib.Path) -> None:
    """Makes `delta`, a new folder, of what `export` changes in `base`. `export` is used up: its files go into it.

    Args:
      base, export: full exports with the same operations and tables.
      delta: folder to make.
    """
    told = {**applying.describe(export), "base": {}, "result": {}, "files": {}}
    before, now = applying.read_tables(base), applying.read_tables(export)
    (delta / "changes").mkdir(parents=True)
    for name in now:
        told["base"][name], told["result"][name] = applying.digest(*before[name]), applying.digest(*now[name])
        for what, array in _changes(*before[name], *now[name]).items():
            np.save(delta / "changes" / f"{name}.{what}.npy", array)
    _take_tables(export, told)
    export.rename(delta / "model")
    shutil.copyfile(applying.__file__, delta / "apply_delta.py")
    for path in sorted(path for path in delta.rglob("*") if path.is_file()):
        told["files"][path.relative_to(delta).as_posix()] = [path.stat().st_size, applying.checksum_of(path)]
    (delta / "delta.json").write_text(json.dumps(told, indent=1), encoding="utf-8")


def _take_tables(export: pathlib.Path, described: dict) -> None:
    """Removes the rows of all tables from a full export, which cannot be loaded until applying.put_tables."""
    if described["ops"] == "ours":
        for name in described["tables"]:
            (export / applying.record_file(name)).unlink()
        return
    keys = {key for name in described["tables"] for key in applying.keys_of(name)}
    kept = {name: value for name, value in applying.read_bundle(export).items() if name not in keys}
    applying.write_bundle(export, kept)


def _changes(old_ids: np.ndarray, old_rows: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """ids [n] and rows [n, bytes] that are not in the old ones, and ids [m] that are in these alone. Ids ascend."""
    same = np.isin(ids, old_ids)
    same[same] = (rows[same] == old_rows[np.searchsorted(old_ids, ids[same])]).all(axis=1)
    return {"ids": ids[~same], "rows": rows[~same], "removed": old_ids[~np.isin(old_ids, ids)]}
