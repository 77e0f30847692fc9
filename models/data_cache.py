"""The cache of converted data sets, which all runs share: one folder for each, with a lock beside it.

prepare.py fills it. The module needs no TensorFlow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import IO, Any

_DIGESTS = "digests.json"  # size, time and digest of each source file, by its path
_BLOCK = 1 << 20  # bytes of a file in memory at a time
_LOCK = ".lock"  # end of the name of a file beside each data set
_INFO = "dataset.json"  # A process that reads the data set has a lock of it.
_HELD: dict[pathlib.Path, IO[bytes]] = {}  # by this process


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Waits for another job that converts the same data. A file system without locks lets every job in."""
    with folder.with_name(folder.name + _LOCK).open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"data: waiting for another job that converts {folder.name} ...", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def cached(root: pathlib.Path) -> dict[pathlib.Path, int]:
    """Returns the size in bytes of each data set in a cache, by folder."""
    return {
        path.parent: sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
        for path in sorted(root.glob(f"*/{_INFO}"))
    }


def digests(root: pathlib.Path, paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns a digest of the content of each file.

    The cache remembers it, so a file is read again only after its size or its time of change has changed.
    """
    memo = root / _DIGESTS
    known = json.loads(memo.read_text(encoding="utf-8")) if memo.is_file() else {}
    entries: dict[str, Any] = {}
    for path in paths:
        state = path.stat()
        entry = known.get(str(path.resolve()), [])
        stamp = [state.st_size, state.st_mtime_ns]
        entries[str(path.resolve())] = entry if entry[:2] == stamp else [*stamp, _digest(path)]
    if any(known.get(name) != entry for name, entry in entries.items()):
        root.mkdir(parents=True, exist_ok=True)
        partial = root / f"{_DIGESTS}.{os.getpid()}"
        partial.write_text(json.dumps({**known, **entries}) + "\n", encoding="utf-8")
        partial.replace(memo)
    return [entries[str(path.resolve())][2] for path in paths]


def _digest(path: pathlib.Path) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
    return hashed.hexdigest()


def hold(folder: pathlib.Path) -> None:
    """Keeps a data set from `clear` until this process ends."""
    file = (folder / _INFO).open("rb")
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    _HELD[folder.resolve()] = file


def release(folder: pathlib.Path) -> None:
    """Lets `clear` remove a data set that this process has held, if it has."""
    if file := _HELD.pop(folder.resolve(), None):
        file.close()


def clear(folder: pathlib.Path) -> bool:
    """Removes a data set from its cache, unless a process holds it. Returns whether it is gone."""
    with locked(folder), (folder / _INFO).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        shutil.rmtree(folder)  # The lock stays, because another job may be waiting for it.
    return True
