"""The trainer's side of delta exports: writes the changes from a base to a full export. applying.py is the other side.

The rows themselves are compared. Change counters would be cheaper, but a restarted job resets them to its last
checkpoint, and they would miss rows that were trained differently since.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np

from tf_fusedrec.saved_model import applying, server_changes
from tf_fusedrec.saved_model.overlay import groups_of


def check_base(base: pathlib.Path, described: dict) -> None:
    """Raises ValueError unless `base` is a full export with these ops and tables; see applying.describe."""
    found = applying.describe(base)
    if found != described:
        raise ValueError(
            f"base {os.fspath(base)!r} has {found}, but the model to export has {described}. Remedy: a base with the "
            "same format, ops, tables and rows, or a full export."
        )


def write_delta(base: pathlib.Path, export: pathlib.Path, delta: pathlib.Path, weights: Sequence[np.ndarray]) -> None:
    """Writes the changes from `base` to `export` into a new folder. The files of `export` move into that folder.

    Args:
      base, export: Folders of full exports with the same ops and tables.
      delta: Folder to make.
      weights: All dense weights of `export`.
    """
    description = {**applying.describe(export), "base": {}, "result": {}, "files": {}}
    of_server = {}
    before, after = applying.read_tables(base), applying.read_tables(export)
    (delta / "changes").mkdir(parents=True)
    for name in after:
        description["base"][name] = applying.digest(*before[name])
        description["result"][name] = applying.digest(*after[name])
        of_server[name] = _changes(*before[name], *after[name])
        for kind, array in of_server[name].items():
            np.save(delta / "changes" / f"{name}.{kind}.npy", array)
    of_base, of_result = applying.identity(base), applying.identity(export)
    # An export without a version cannot take deltas while it is served.
    versions = [of_base.get("version", "-" * server_changes.VERSION_BYTES), of_result["version"], of_result["layout"]]
    description["identity"] = of_base
    server_changes.write(delta, versions, groups_of(description["tables"]), of_server, weights)
    _remove_tables(export, description)
    export.rename(delta / "model")
    shutil.copyfile(applying.__file__, delta / "apply_delta.py")
    for path in sorted(path for path in delta.rglob("*") if path.is_file()):
        description["files"][path.relative_to(delta).as_posix()] = [path.stat().st_size, applying.checksum_of(path)]
    (delta / "delta.json").write_text(json.dumps(description, indent=1), encoding="utf-8")


def _remove_tables(export: pathlib.Path, described: dict) -> None:
    """Removes the rows of all tables from a full export. It cannot be loaded until applying.put_tables."""
    if described["ops"] == "ours":
        for name in described["tables"]:
            (export / applying.record_file(name)).unlink()
        return
    keys = applying.keys_of(described)
    kept = {name: value for name, value in applying.read_bundle(export).items() if name not in keys}
    applying.write_bundle(export, kept)


def _changes(old_ids: np.ndarray, old_rows: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """New or changed ids <int64>[n] with their rows <uint8>[n, bytes], and removed ids <int64>[m]. All ids ascend."""
    same = np.isin(ids, old_ids)
    same[same] = (rows[same] == old_rows[np.searchsorted(old_ids, ids[same])]).all(axis=1)
    return {"ids": ids[~same], "rows": rows[~same], "removed": old_ids[~np.isin(old_ids, ids)]}
