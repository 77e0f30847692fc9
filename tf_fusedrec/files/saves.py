"""The saves in the folder of a checkpoint: lists them, begins a new one, and removes old ones.

Only folders made by a save of this package are removed. Such a folder has the name of a save and only its files.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import secrets
import shutil
from typing import Any

from tf_fusedrec.files import disk, manifest
from tf_fusedrec.files.manifest import SAVE_NAME

PARTIAL = ".partial"
BEST = "best.json"  # names the save that is kept as the best, {"save": name}
_FILES = re.compile(
    r"(.+\.shard|dense\.index|dense\.data-\d{5}-of-\d{5}|shard-\d+\.failed|(shard-\d+|manifest)\.json(\.partial)?)",
    re.DOTALL,
)


def _number(name: str) -> int:
    return int(name.split("-")[1])


def _folders(directory: pathlib.Path) -> list[pathlib.Path]:
    """Folders with the name of a complete or partial save, oldest first."""
    named = [path for path in directory.iterdir() if SAVE_NAME.fullmatch(path.name.removesuffix(PARTIAL))]
    return sorted((p for p in named if p.is_dir() and not p.is_symlink()), key=lambda p: (_number(p.name), p.name))


def _is_removable(folder: pathlib.Path) -> bool:
    """Returns whether a folder with the name of a save has the files of a save and nothing else."""
    entries = list(folder.iterdir())
    written = folder.name.endswith(PARTIAL) or (folder / "shard-0.json").exists()
    return written and all(_FILES.fullmatch(entry.name) and entry.is_file() for entry in entries)


def saves(folder: str | os.PathLike) -> list[str]:
    """Names of the complete saves in a checkpoint's folder, oldest first, for the argument `save` of load."""
    directory = pathlib.Path(folder)
    if not directory.is_dir():
        return []
    complete = [path for path in _folders(directory) if not path.name.endswith(PARTIAL)]
    return [path.name for path in complete if (path / manifest.NAME).is_file()]


def best(directory: pathlib.Path) -> str | None:
    """Name of the save that is kept as the best; None if there is none."""
    try:
        name = json.loads((directory / BEST).read_text(encoding="utf-8"))["save"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if name in saves(directory) else None


def read_manifest(directory: str | os.PathLike, save: str | int | None = None) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Args:
      directory: Folder of the checkpoint.
      save: Name or number of one of `saves(directory)`, or "best"; None: the last one.

    Raises:
      ValueError: `directory` has no checkpoint or lacks this save; the format is unknown; the manifest is damaged or
        forged.
    """
    directory = pathlib.Path(directory)
    name = None
    if save == "best":
        name = best(directory)
        if name is None:
            raise ValueError(
                f"save 'best' is not in {directory}, which holds {saves(directory)}. callbacks.Checkpoint("
                "save_best=True) or Checkpointer.save(best=True) makes one."
            )
    elif save is not None:
        existing = saves(directory)
        matching = [name for name in existing if save == (name if isinstance(save, str) else _number(name))]
        if len(matching) != 1:
            raise ValueError(
                f"save {save!r} is not one of the saves in {directory}, which holds {existing}. Name one of them."
            )
        (name,) = matching
    contents = manifest.read(directory, name)
    manifest.check_shards(directory / (name or "") / manifest.NAME, directory, contents)
    return contents


def size_of(directory: pathlib.Path, contents: dict[str, Any]) -> int:
    """The bytes of all files that a save needs, `contents` being its manifest."""
    return sum(path.stat().st_size for name in manifest.saves_of(contents) for path in (directory / name).iterdir())


def begin(directory: pathlib.Path) -> str:
    """Removes the remains of interrupted saves and makes the folder of a new save. Returns its unique name."""
    for folder in _folders(directory):
        if folder.name.endswith(PARTIAL) and _is_removable(folder):
            shutil.rmtree(folder)
    number = max((_number(folder.name) for folder in _folders(directory)), default=0) + 1
    save = f"save-{number}-{secrets.token_hex(4)}"
    (directory / (save + PARTIAL)).mkdir()
    return save


def discard(directory: pathlib.Path, save: str) -> None:
    """Removes the remains of a failed save. Errors are ignored, because the disk may be gone."""
    shutil.rmtree(directory / (save + PARTIAL), ignore_errors=True)
    try:
        unnamed = not manifest.exists(directory) or manifest.read(directory)["save"] != save
    except ValueError:
        return
    if unnamed and (directory / save).is_dir():
        _remove(directory / save)


def prune(directory: pathlib.Path, keep: int) -> None:
    """Removes all saves except the last `keep` ones, the best one and the full saves that they need."""
    needed = manifest.saves_of(manifest.read(directory))
    for save in (*saves(directory)[-keep:], best(directory)):
        if save is None:
            continue
        try:
            needed |= manifest.saves_of(manifest.read(directory, save))
        except ValueError:  # A damaged old save is refused when it is loaded; it must not fail the current save.
            needed.add(save)
    for folder in reversed(_folders(directory)):  # a delta goes before the full save that it needs
        if folder.name not in needed and _is_removable(folder):
            _remove(folder)


def _remove(folder: pathlib.Path) -> None:
    """Renames a save's folder durably, then removes it: a loss of power must not leave part of it under its name."""
    partial = folder.with_name(folder.name.removesuffix(PARTIAL) + PARTIAL)
    disk.rename(folder, partial)
    shutil.rmtree(partial)
