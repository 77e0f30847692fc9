"""The only file of this package that writes: what it has returned from lies on the disk, not in a cache.

A crash at any moment leaves a file that is not there, one under a temporary name, or a whole one: data and folder are
synced before the name that others trust appears.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

REMEDY = "Restore it, or load another checkpoint."
_FULL = "make room there, or save into another folder; earlier checkpoints stand"
_MOST = 1 << 30  # bytes per call; Linux writes and reads at most 2^31 - 4096 at once


def write(file: int, data: Any) -> None:
    """Writes all bytes of a buffer to a file descriptor. Raises OSError, for example of a full disk."""
    left = memoryview(data).cast("B")
    while len(left):
        left = left[os.write(file, left[:_MOST]) :]


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[int]:
    """Descriptor of a file that must not exist yet; synced when the block ends well.

    Raises:
      OSError: for example of a full disk; it names the file.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise OSError(error.errno, f"{error.strerror} ({_FULL})" if full else error.strerror, str(path)) from error


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
    try:
        with new_file(partial) as file:
            write(file, text.encode())
        rename(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read(file: int, into: np.ndarray, offset: int) -> int:
    """Fills an array [n] with bytes of a file from `offset` on; returns how many: fewer at the file's end."""
    left, done = into.view(np.uint8).data, 0
    while done < len(left):
        count = os.preadv(file, [left[done : done + _MOST]], offset + done)
        if count == 0:
            break
        done += count
    return done


def refusal(path: pathlib.Path, what: str) -> ValueError:
    """The error of a file that a checkpoint cannot be read from."""
    return ValueError(f"Checkpoint file {path} {what}. {REMEDY}")


@contextlib.contextmanager
def refusing(path: pathlib.Path) -> Iterator[None]:
    """Raises ValueError, which names the file, where the block cannot read it."""
    try:
        yield
    except FileNotFoundError as error:
        raise refusal(path, "is missing") from error
    except IsADirectoryError as error:
        raise refusal(path, "is a folder, where a file should be") from error
    except OSError as error:
        raise refusal(path, f"cannot be read: {error.strerror}") from error


def read_whole(path: pathlib.Path) -> bytes:
    """All bytes of a file. Raises ValueError, which names it: there is none, or a folder, or it cannot be read."""
    with refusing(path):
        return path.read_bytes()


def checksum(data: Any) -> str:
    """xxh3_64 of a buffer, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)
