"""The only file of this package that writes: what it has returned from lies on the disk, not in a cache.

A crash at any moment leaves a file that is not there, one under a temporary name, or a whole one: data and folder are
synced before the name that others trust appears.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

_MOST = 1 << 30  # bytes per call; Linux writes and reads at most 2^31 - 4096 at once


def write(file: int, data: Any) -> None:
    """Writes all bytes of a buffer to a file descriptor. Raises OSError, for example of a full disk."""
    left = memoryview(data).cast("B")
    while len(left):
        left = left[os.write(file, left[:_MOST]) :]


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[int]:
    """Descriptor of a file that must not exist yet; synced when the block ends well."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def _synced_folder(path: pathlib.Path) -> Iterator[None]:
    """Makes the names in a folder durable when the block ends well, whatever its own name is by then."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_folder(path: pathlib.Path) -> None:
    """Makes the names in a folder durable."""
    with _synced_folder(path):
        pass


def make_folder(path: pathlib.Path) -> None:
    """Makes a folder and those that it lies in, durably, where they do not exist."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def rename(old: pathlib.Path, new: pathlib.Path) -> None:
    """Gives a file or folder its name, durably; a file of that name is replaced at once.

    Another process may have waited for that name, and rename the folder it is in as soon as it is there.
    """
    with _synced_folder(new.parent):
        os.replace(old, new)


def write_durably(path: pathlib.Path, text: str) -> None:
    """Writes a text file under a temporary name and renames it: `path` is the old one or the new one, always whole."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with new_file(partial) as file:
        write(file, text.encode())
    rename(partial, path)


def read(file: int, into: np.ndarray, offset: int) -> int:
    """Fills an array [n] with bytes of a file from `offset` on; returns how many: fewer at the file's end."""
    left, done = into.view(np.uint8).data, 0
    while done < len(left):
        count = os.preadv(file, [left[done : done + _MOST]], offset + done)
        if count == 0:
            break
        done += count
    return done


def checksum(data: Any) -> str:
    """xxh3_64 of a buffer, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)
