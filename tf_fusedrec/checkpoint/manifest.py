"""The manifest, which makes files a checkpoint. It is written last, under a temporary name, and renamed.

A checkpoint is a folder on a file system that all ranks see:

    manifest.json                                 what belongs together: see below
    save-<number>-<random>/                       what one save wrote; it has ".partial" in its name until it is whole
      <table>.<section>-<rank>.shard              rows that one rank held (shard_file.py)
      dense.index, dense.data-*                   tf.train.Checkpoint of model and optimizer, written by rank 0
      shard-<rank>.json                           the files of one rank; written when they are on the disk

A full save names one folder, a delta two: that of the last full save for the rows, and its own for the rows that have
changed since, the tombstones, and all that is small. Folders that the manifest does not name are what an interrupted
save left, or are about to go.

    {"format": 2, "save": "save-7-9e2b", "ranks": 2, "extra": ..., "dense": {file name: [bytes, xxh3_64]},
     "tables": {"item": {"spec": {...}, "owner": "hash_range", "clock": 70, "iterations": 70,
                         "learning_rate": [0.1, 0.05], "parts": [
         {"save": "save-6-41cc", "ranks": 2, "sections": {"rows": true}},
         {"save": "save-7-9e2b", "ranks": 2, "sections": {"rows": false, "tombstones": false}}]}},
     "checksum": xxh3_64 of all the rest}

The flag of a section says whether its part is whole (it replaces that of earlier parts) or holds changes of them.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

from tf_fusedrec.checkpoint import disk

FORMAT = 2
TOMBSTONES = "tombstones"  # the section of ids that were removed; its records have no bytes
PARTIAL = ".partial"
_NAME = "manifest.json"


def _checksum(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return disk.checksum(json.dumps(rest, sort_keys=True).encode())


def exists(directory: str | os.PathLike) -> bool:
    """Whether a save into `directory` was ever completed."""
    return (pathlib.Path(directory) / _NAME).exists()


def read_manifest(directory: str | os.PathLike) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
      ValueError: `directory` holds no checkpoint, one of another format, or a damaged manifest.
    """
    path = pathlib.Path(directory) / _NAME
    if not path.exists():
        raise ValueError(f"directory must hold a checkpoint, but {path} is missing. Was its save interrupted?")
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError(f"want a dict, got {type(manifest).__name__}")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Restore it, or load another checkpoint.") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')}, this version reads {FORMAT}. Load it with the version that "
            "wrote it, or save into another directory."
        )
    if manifest.get("checksum") != _checksum(manifest):
        raise ValueError(f"{path} is damaged: its checksum differs. Restore it, or load another checkpoint.")
    return manifest


def write_manifest(directory: pathlib.Path, fields: dict[str, Any]) -> None:
    """Makes a checkpoint of what `fields` names. Before, `directory` holds the last one, afterwards this one."""
    # What JSON makes of it (tuples become lists) is what a reader computes the checksum of.
    manifest = json.loads(json.dumps({"format": FORMAT, **fields}))
    disk.write_durably(directory / _NAME, json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1))


def shard_name(table: str, section: str, rank: int) -> str:
    """File name of a shard. Tables have any name without '/' (config.py)."""
    return f"{table}.{section}-{rank}.shard"


def saves_of(manifest: dict[str, Any]) -> set[str]:
    """Names of the folders that a checkpoint needs."""
    return {manifest["save"], *(part["save"] for table in manifest["tables"].values() for part in table["parts"])}


def remove_unused(directory: pathlib.Path) -> None:
    """Removes the folders that the manifest does not name, if there are any."""
    used = saves_of(read_manifest(directory)) if exists(directory) else set()
    for folder in directory.glob("save-*"):
        if folder.name not in used:
            shutil.rmtree(folder)
