"""The cache of converted data sets, which all runs share: one folder for each, with a lock beside it.

prepare.py fills it. The module needs no TensorFlow.
"""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
import shutil
from collections.abc import Iterator
from typing import IO

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
