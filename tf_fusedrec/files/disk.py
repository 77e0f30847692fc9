"""Durable writes. Every write of a checkpoint goes through this file, and returns once the data are on the disk.

A crash leaves no file, a file under a temporary name, or a complete file. Data and folder are synced before the file
gets the name that readers trust.
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
_BLOCK_BYTES = 1 << 24  # of a file that are in memory while it is checked
_MAX_BYTES = 1 << 30  # per call; Linux writes and reads at most 2^31 - 4096 bytes at once


def write(file: int, data: Any) -> None:
    """Writes all bytes of a buffer to a file descriptor. Raises OSError, for example for a full disk."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[os.write(file, rest[:_MAX_BYTES]) :]


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[int]:
    """Creates a file that must not exist yet and yields its descriptor. The file is synced if the block succeeds.

    Raises OSError, which names the file, if a write failed, for example on a full disk.
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
def synced_folder(path: pathlib.Path) -> Iterator[None]:
    """Makes the names in a folder durable if the block succeeds, even if the block renames the folder itself."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: pathlib.Path) -> None:
    """Makes a folder and its missing parents durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with synced_folder(folder.parent):
            pass


def rename(old: pathlib.Path, new: pathlib.Path) -> None:
    """Renames a file or folder durably. A file of the new name is replaced atomically.

    The parent folder is opened first: another process may wait for the new name, and rename the parent as soon as it
    appears.
    """
    with synced_folder(new.parent):
        os.replace(old, new)


def write_durably(path: pathlib.Path, text: str) -> None:
    """Writes a text file under a temporary name and renames it, so `path` is always a complete file, old or new."""
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
    """Fills an array [n] with the bytes of a file from `offset` on. Returns the bytes read, fewer at the file's end."""
    buffer, done = into.view(np.uint8).data, 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done : done + _MAX_BYTES]], offset + done)
        if count == 0:
            break
        done += count
    return done


def refusal(path: pathlib.Path, fault: str) -> ValueError:
    """The error for a file that no checkpoint can be read from. `fault` is a predicate such as "is missing"."""
    return ValueError(f"Checkpoint file {path} {fault}. {REMEDY}")


@contextlib.contextmanager
def refusing(path: pathlib.Path) -> Iterator[None]:
    """Turns the errors of reading a file into a ValueError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise refusal(path, "is missing") from error
    except IsADirectoryError as error:
        raise refusal(path, "is a folder instead of a file") from error
    except OSError as error:
        raise refusal(path, f"cannot be read: {error.strerror}") from error


def read_whole(path: pathlib.Path) -> bytes:
    """All bytes of a file. Raises ValueError, which names the file, if it is missing, unreadable, or a folder."""
    with refusing(path):
        return path.read_bytes()


def check_file(path: pathlib.Path, size: int, expected: str) -> None:
    """Raises ValueError, which names the file, unless it has `size` bytes with the checksum `expected`."""
    hashed, count = xxhash.xxh3_64(), 0
    with refusing(path), path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hashed.update(block)
            count += len(block)
    if count != size:
        raise refusal(path, f"{'is truncated' if count < size else 'has too much'}: {count} bytes, want {size}")
    if hashed.hexdigest() != expected:
        raise refusal(path, "is damaged: it differs from its checksum")


def checksum(data: Any) -> str:
    """xxh3_64 of a buffer, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)
