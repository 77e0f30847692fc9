"""A disk that loses power: it loses, tears or reorders all changes after the last fsync.

`PowerLoss(folder)` executes and records the calls of `os` that change files below the folder. `crash` then gives the
folder a state that a file system may show after a power loss. A file has its contents at its last fsync with any part
of the later writes. A folder has its names at its last fsync with any of the later changes. Contents and names are
independent: a synced file may have no name, and a name may lead to a file without its data.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import random
import shutil
from typing import Any
from unittest import mock

FATES = ("lost", "kept", "a part", "any")  # Fates of the changes after the last fsync.


class Crashed(BaseException):
    """The simulated end of the process, after which no line runs."""


class File:
    """Bytes on the disk, and writes (offset, bytes) after the last fsync."""

    def __init__(self, durable: bytes = b""):
        self.durable, self.pending = durable, []

    def sync(self) -> None:
        self.durable, self.pending = self.content(), []

    def content(self) -> bytes:
        return _written(self.durable, self.pending)

    def after(self, fate: str, chance: random.Random) -> bytes:
        survivors = _survivors(fate, self.pending, chance)
        if fate == "any":  # Some writes are torn, or only the file's length survives.
            torn = [(offset, data[: chance.randrange(len(data) + 1)]) for offset, data in survivors]
            empty = [(offset, bytes(len(data))) for offset, data in survivors]
            survivors = [chance.choice(write) for write in zip(survivors, torn, empty)]
        return _written(self.durable, survivors)


class Folder:
    """Names on the disk, and atomic changes {name: node or None} after the last fsync."""

    def __init__(self) -> None:
        self.durable: dict[str, Any] = {}
        self.pending: list[dict[str, Any]] = []

    def sync(self) -> None:
        self.durable, self.pending = self.content(), []

    def content(self) -> dict[str, Any]:
        return _changed(self.durable, self.pending)

    def after(self, fate: str, chance: random.Random) -> dict[str, Any]:
        return _changed(self.durable, _survivors(fate, self.pending, chance))


def _survivors(fate: str, changes: list, chance: random.Random) -> list:
    first = {"lost": 0, "kept": len(changes), "a part": chance.randrange(len(changes) + 1)}
    return changes[: first[fate]] if fate in first else [change for change in changes if chance.random() < 0.5]


def _written(data: bytes, writes: list[tuple[int, bytes]]) -> bytes:
    for offset, new in writes:
        data = data[:offset].ljust(offset, b"\0") + new + data[offset + len(new) :]
    return data


def _changed(names: dict[str, Any], changes: list[dict[str, Any]]) -> dict[str, Any]:
    names = dict(names)
    for change in changes:
        names.update(change)
    return {name: node for name, node in names.items() if node is not None}


class PowerLoss:
    """Watches one folder, whose initial contents are on the disk.

    Args:
      root: Absolute path of the existing folder.
      crash_at: Number of the operation, from 0, that raises Crashed instead of running, or None.
      fail_at: Number of the operation that raises OSError once (a full disk), or None.

    Attributes:
      operations: Number of operations so far.
    """

    def __init__(self, root: pathlib.Path, crash_at: int | None = None, fail_at: int | None = None):
        self.operations = 0
        self._root, self._crash_at, self._fail_at = root, crash_at, fail_at
        self._tree = _read(root)
        self._files: dict[int, Any] = {}  # Nodes by descriptor.
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> PowerLoss:
        for name, note in WATCHED.items():
            call = functools.partial(note, self, getattr(os, name))
            self._patches.enter_context(mock.patch.object(os, name, call))
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.close()

    def crash(self, chance: random.Random) -> None:
        """Gives the folder its state after the power loss."""
        assert _contents(_read(self._root)) == _contents(self._tree), "the folder was changed past the calls of os"
        shutil.rmtree(self._root)
        _write(self._root, self._tree, chance.choice(FATES), chance)

    def _count(self) -> None:
        """Counts an operation that changes the folder, before it runs."""
        if self._crash_at is not None and self.operations >= self._crash_at:
            raise Crashed
        self.operations += 1
        if self.operations - 1 == self._fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _place(self, path: Any, folder: int | None = None) -> tuple[Folder, str] | None:
        """Returns the node of the folder that holds a path and the name in it, or None for a path outside."""
        base = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
        whole = pathlib.Path(base, os.fsdecode(path))
        if self._root not in whole.parents:
            return None
        *parents, name = whole.relative_to(self._root).parts
        node = self._tree
        for parent in parents:
            node = node.content().get(parent)
            if not isinstance(node, Folder):
                return None
        return node, name

    def open(self, original: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if pathlib.Path(os.fsdecode(path)) == self._root:
            descriptor = original(path, flags)
            self._files[descriptor] = self._tree
            return descriptor
        place = self._place(path, dir_fd)
        if place is None:
            return original(path, flags, mode, dir_fd=dir_fd)
        folder, name = place
        known = folder.content().get(name)
        if known is None and flags & os.O_CREAT:
            self._count()
        descriptor = original(path, flags, mode, dir_fd=dir_fd)
        if known is None:
            known = File()
            folder.pending.append({name: known})
        assert not flags & (os.O_TRUNC | os.O_APPEND), "files are written once, from their beginning"
        self._files[descriptor] = known
        return descriptor

    def close(self, original: Any, descriptor: int) -> None:
        self._files.pop(descriptor, None)
        original(descriptor)

    def write(self, original: Any, descriptor: int, data: Any) -> int:
        node = self._files.get(descriptor)
        if node is None:
            return original(descriptor, data)
        self._count()
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        count = original(descriptor, data)
        node.pending.append((offset, bytes(data)[:count]))
        return count

    def fsync(self, original: Any, descriptor: int) -> None:
        node = self._files.get(descriptor)
        if node is not None:
            self._count()
            node.sync()  # The real disk need not sync.
        else:
            original(descriptor)

    def replace(self, original: Any, old: Any, new: Any) -> None:
        source, target = self._place(old), self._place(new)
        if source is None or target is None:
            original(old, new)
            return
        self._count()
        original(old, new)
        node = source[0].content()[source[1]]
        if source[0] is target[0]:
            source[0].pending.append({source[1]: None, target[1]: node})
        else:
            source[0].pending.append({source[1]: None})
            target[0].pending.append({target[1]: node})

    def mkdir(self, original: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is not None:
            self._count()
        original(path, mode, dir_fd=dir_fd)
        if place is not None:
            place[0].pending.append({place[1]: Folder()})

    def remove(self, original: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is not None:
            self._count()
        original(path, dir_fd=dir_fd)
        if place is not None:
            place[0].pending.append({place[1]: None})


WATCHED = {
    "open": PowerLoss.open, "close": PowerLoss.close, "write": PowerLoss.write, "fsync": PowerLoss.fsync,
    "replace": PowerLoss.replace, "rename": PowerLoss.replace, "mkdir": PowerLoss.mkdir,
    "unlink": PowerLoss.remove, "remove": PowerLoss.remove, "rmdir": PowerLoss.remove,
}  # fmt: skip


def _read(path: pathlib.Path) -> Any:
    """Returns the node of a path, with all contents on the disk."""
    if not path.is_dir():
        return File(path.read_bytes())
    folder = Folder()
    folder.durable = {entry.name: _read(entry) for entry in path.iterdir()}
    return folder


def _contents(node: Any) -> Any:
    content = node.content()
    return {name: _contents(child) for name, child in content.items()} if isinstance(node, Folder) else content


def _write(path: pathlib.Path, node: Any, fate: str, chance: random.Random) -> None:
    after = node.after(fate, chance)
    if isinstance(node, File):
        path.write_bytes(after)
        return
    path.mkdir()
    for name, child in after.items():
        _write(path / name, child, fate, chance)
