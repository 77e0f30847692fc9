"""The manifest, which makes files a checkpoint. It is written last, under a temporary name, and renamed.

A checkpoint is a folder on a file system that all ranks see:

    manifest.json                                 a copy of the last save's: what is loaded by default
    save-<number>-<random>/                       what one save wrote; it has ".partial" in its name until it is whole
      manifest.json                               what belongs together: see below
      <table>.<section>-<rank>.shard              rows that one rank held (shard_file.py)
      dense.index, dense.data-*                   tf.train.Checkpoint of model and optimizer, written by rank 0
      shard-<rank>.json                           what one rank says of its files; written when they are on the disk

A full save needs one folder, a delta two: that of the last full save for the rows, and its own for the rows that have
changed since, the tombstones, and all that is small. Folders of earlier saves stay while they are kept (folders.py).

    {"format": 2, "save": "save-7-9e2b41cc", "ranks": 2, "extra": ..., "dense": {file name: [bytes, xxh3_64]},
     "tables": {"item": {"spec": {...}, "owner": "hash_range", "clock": 70, "iterations": 70,
                         "learning_rate": [0.1, 0.05], "parts": [
         {"save": "save-6-41cc9e2b", "ranks": 2, "sections": {"rows": true}},
         {"save": "save-7-9e2b41cc", "ranks": 2, "sections": {"rows": false, "tombstones": false}}]}},
     "checksum": xxh3_64 of all the rest}

The flag of a section says whether its part is whole (it replaces that of earlier parts) or holds changes of them.
schema.py has what every field must be.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from tf_fusedrec.checkpoint import disk, schema

FORMAT = 2
NAME = "manifest.json"


def _checksum(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return disk.checksum(json.dumps(rest, sort_keys=True).encode())


def exists(directory: str | os.PathLike) -> bool:
    """Whether a save into `directory` was ever completed."""
    return (pathlib.Path(directory) / NAME).exists()


def read(directory: pathlib.Path, save: str | None = None) -> dict[str, Any]:
    """The manifest of the last save, or of the save of that name; every field is checked.

    Raises:
      ValueError: `directory` holds no such checkpoint, one of another format, or a manifest that is damaged or forged.
    """
    path = directory / NAME if save is None else directory / save / NAME
    if not path.exists():
        raise ValueError(f"directory must hold a checkpoint, but {path} is missing. Was its save interrupted?")
    data = disk.read_whole(path)
    try:
        manifest = json.loads(data)
        if not isinstance(manifest, dict):
            raise ValueError(f"want a dict, got {type(manifest).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}. {disk.REMEDY}") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')}, this version reads {FORMAT}. Load it with the version that "
            "wrote it, or save into another directory."
        )
    if manifest.get("checksum") != _checksum(manifest):
        raise ValueError(f"{path} is damaged: its checksum differs. {disk.REMEDY}")
    schema.check_manifest(path, directory, manifest)
    if save is not None and manifest["save"] != save:
        raise ValueError(f"{path} is foreign: it is of {manifest['save']!r}. {disk.REMEDY}")
    return manifest


def write(folder: pathlib.Path, fields: dict[str, Any]) -> None:
    """Writes the manifest into a folder; one that stood there is replaced at once."""
    # What JSON makes of it (tuples become lists) is what a reader computes the checksum of.
    manifest = json.loads(json.dumps({"format": FORMAT, **fields}))
    disk.write_durably(folder / NAME, json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1))


def shard_name(table: str, section: str, rank: int) -> str:
    """File name of a shard. Tables have any name without '/' (config.py)."""
    return f"{table}.{section}-{rank}.shard"


def saves_of(manifest: dict[str, Any]) -> set[str]:
    """Names of the folders that a checkpoint needs."""
    return {manifest["save"], *(part["save"] for table in manifest["tables"].values() for part in table["parts"])}


def shards_of(manifest: dict[str, Any]) -> dict[str, set[str]]:
    """Names of the shards that a checkpoint needs, by the save that wrote them."""
    shards: dict[str, set[str]] = {save: set() for save in saves_of(manifest)}
    for table, described in manifest["tables"].items():
        for part in described["parts"]:
            ranks = range(part["ranks"])
            shards[part["save"]] |= {shard_name(table, section, r) for section in part["sections"] for r in ranks}
    return shards
