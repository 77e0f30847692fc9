"""The saves in the folder of a checkpoint: which there are, which are kept, and what may be removed.

Only folders that a save of ours made are ever touched: they have its name and hold its files, and nothing else.
"""

from __future__ import annotations

import os
import pathlib
import re
import secrets
import shutil
from typing import Any

from tf_fusedrec.checkpoint import manifest, schema
from tf_fusedrec.checkpoint.schema import SAVE_NAME

PARTIAL = ".partial"
_FILES = re.compile(
    r"(.+\.shard|dense\.index|dense\.data-\d{5}-of-\d{5}|shard-\d+\.failed|(shard-\d+|manifest)\.json(\.partial)?)",
    re.DOTALL,
)


def _number(name: str) -> int:
    return int(name.split("-")[1])


def _folders(directory: pathlib.Path) -> list[pathlib.Path]:
    """Folders that have the name of a save, whole or partial, oldest first."""
    named = [path for path in directory.iterdir() if SAVE_NAME.fullmatch(path.name.removesuffix(PARTIAL))]
    return sorted((p for p in named if p.is_dir() and not p.is_symlink()), key=lambda p: (_number(p.name), p.name))


def _ours(folder: pathlib.Path) -> bool:
    """Whether a folder of that name holds what a save writes, and nothing else."""
    entries = list(folder.iterdir())
    whole = folder.name.endswith(PARTIAL) or (folder / "shard-0.json").exists()
    return whole and all(_FILES.fullmatch(entry.name) and entry.is_file() for entry in entries)


def saves(directory: str | os.PathLike) -> list[str]:
    """Names of the whole saves in the folder of a checkpoint, oldest first: what `save` of load may be."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        return []
    whole = [folder for folder in _folders(directory) if not folder.name.endswith(PARTIAL)]
    return [folder.name for folder in whole if (folder / manifest.NAME).is_file()]


def read_manifest(directory: str | os.PathLike, save: str | int | None = None) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Args:
      directory: of the checkpoint.
      save: name or number of one of `saves(directory)`; None: the last one.

    Raises:
      ValueError: `directory` holds no checkpoint, one of another format, or a manifest that is damaged or forged; it
        holds no such save.
    """
    directory = pathlib.Path(directory)
    name = None
    if save is not None:
        there = saves(directory)
        found = [name for name in there if save == (name if isinstance(save, str) else _number(name))]
        if len(found) != 1:
            raise ValueError(f"save {save!r} is not one of the saves in {directory}. It holds {there}.")
        (name,) = found
    read = manifest.read(directory, name)
    for part, shards in manifest.shards_of(read).items():
        schema.check_no_more(directory / (name or "") / manifest.NAME, directory / part, shards)
    return read


def begin(directory: pathlib.Path) -> str:
    """Removes what interrupted saves left, makes the folder of a new one, and returns its name, which is unique."""
    for folder in _folders(directory):
        if folder.name.endswith(PARTIAL) and _ours(folder):
            shutil.rmtree(folder)
    number = max((_number(folder.name) for folder in _folders(directory)), default=0) + 1
    save = f"save-{number}-{secrets.token_hex(4)}"
    (directory / (save + PARTIAL)).mkdir()
    return save


def discard(directory: pathlib.Path, save: str) -> None:
    """Removes what a save that has failed left, as well as it can: the disk may be gone."""
    shutil.rmtree(directory / (save + PARTIAL), ignore_errors=True)
    try:
        unnamed = not manifest.exists(directory) or manifest.read(directory)["save"] != save
    except ValueError:
        return
    if unnamed and (directory / save).is_dir():
        _remove(directory / save)


def prune(directory: pathlib.Path, keep: int) -> None:
    """Removes all but the last `keep` saves and what these need."""
    needed = manifest.saves_of(manifest.read(directory))
    for save in saves(directory)[-keep:]:
        try:
            needed |= manifest.saves_of(manifest.read(directory, save))
        except ValueError:  # it is refused by whoever loads it; this save is not to fail of it
            needed.add(save)
    for folder in _folders(directory):
        if folder.name not in needed and _ours(folder):
            _remove(folder)


def _remove(folder: pathlib.Path) -> None:
    """A folder that is only partly removed must not pass for a whole save."""
    partial = folder.with_name(folder.name.removesuffix(PARTIAL) + PARTIAL)
    os.replace(folder, partial)
    shutil.rmtree(partial)
