"""The manifest, which makes files a checkpoint. It is written last, under a temporary name, and renamed.

A checkpoint is a folder on a file system that all ranks see:

    manifest.json                                 copy of the last save's manifest; load reads it by default
    save-<number>-<random>/                       files of one save; its name ends in ".partial" until it is whole
      manifest.json                               list of the files that belong together, see below
      <table>.<section>-<rank>.shard              rows of one rank (shard_file.py)
      dense.index, dense.data-*                   tf.train.Checkpoint of model and optimizer, written by rank 0
      shard-<rank>.json                           report of one rank on its files, written once they are on the disk

A full save needs one folder. A delta needs two: the folder of the last full save, and its own folder with the changed
rows, the tombstones and all small data. Folders of earlier saves stay while they are kept (folders.py).

    {"format": 2, "save": "save-7-9e2b41cc", "ranks": 2, "extra": ..., "dense": {file name: [bytes, xxh3_64]},
     "tables": {"item": {"spec": {...}, "owner": "hash_range", "clock": 70, "iterations": 70,
                         "learning_rate": [0.1, 0.05], "parts": [
         {"save": "save-6-41cc9e2b", "ranks": 2, "sections": {"rows": true}},
         {"save": "save-7-9e2b41cc", "ranks": 2, "sections": {"rows": false, "tombstones": false}}]}},
     "checksum": xxh3_64 of all the rest}

The flag of a section is true if the part holds the whole section, and false if it holds changes to earlier parts.
schema.py checks every field.
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
    """Returns whether a save into `directory` was ever completed."""
    return (pathlib.Path(directory) / NAME).exists()


def read(directory: pathlib.Path, save: str | None = None) -> dict[str, Any]:
    """The manifest of the named save, or of the last one. Every field is checked.

    Raises:
      ValueError: `directory` holds no such save; the format is another one; the manifest is damaged or forged.
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
            f"{path} has format {manifest.get('format')}, but this version reads {FORMAT}. Load it with the version "
            "that wrote it, or save into another directory."
        )
    if manifest.get("checksum") != _checksum(manifest):
        raise ValueError(f"{path} is damaged: its checksum differs. {disk.REMEDY}")
    schema.check_manifest(path, directory, manifest)
    if save is not None and manifest["save"] != save:
        raise ValueError(f"{path} is foreign: it belongs to {manifest['save']!r}. {disk.REMEDY}")
    return manifest


def write(folder: pathlib.Path, fields: dict[str, Any]) -> None:
    """Writes the manifest into a folder and replaces an existing one atomically."""
    # A reader computes the checksum over the parsed JSON, where tuples have become lists.
    manifest = json.loads(json.dumps({"format": FORMAT, **fields}))
    disk.write_durably(folder / NAME, json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1))


def shard_name(table: str, section: str, rank: int) -> str:
    """File name of a shard. TableConfig refuses names that no file can have."""
    return f"{table}.{section}-{rank}.shard"


def saves_of(manifest: dict[str, Any]) -> set[str]:
    """Names of the save folders that a checkpoint needs."""
    return {manifest["save"], *(part["save"] for table in manifest["tables"].values() for part in table["parts"])}


def shards_of(manifest: dict[str, Any]) -> dict[str, set[str]]:
    """Names of the shard files that a checkpoint needs, by the save that wrote them."""
    shards: dict[str, set[str]] = {save: set() for save in saves_of(manifest)}
    for table, described in manifest["tables"].items():
        for part in described["parts"]:
            ranks = range(part["ranks"])
            shards[part["save"]] |= {shard_name(table, section, r) for section in part["sections"] for r in ranks}
    return shards
