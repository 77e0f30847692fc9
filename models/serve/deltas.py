"""Applies the deltas of a folder as they appear, while the model is served.

A delta follows if it starts from the version that answers; delta.json names that version. Names and dates of the
folders play no part. A damaged delta is refused by name, and tried again when one of its files changes, because a copy
may not have been complete.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import threading
from collections.abc import Callable

import numpy as np

from tf_fusedrec.models.serve.loaded import Export, RequestError

_LOGGER = logging.getLogger("tf_fusedrec.models.serve")
_Stamp = tuple[tuple[str, int, int], ...]

# Bytes of the files that are read as a whole. A delta.json has a line for each file of the delta.
_MOST_BYTES = {"delta.json": 1 << 26, "server/header": 1 << 12}


class Deltas:
    """Follows a folder of deltas.

    Args:
      export: Export that gets the deltas.
      folder: Folder that holds the folders of deltas.
      refused: Is called for every refusal.
    """

    def __init__(self, export: Export, folder: str | os.PathLike, refused: Callable[[], None]):
        self._export, self._folder, self._count_refusal = export, os.fspath(folder), refused
        self._bases: dict[str, str] = {}  # version that each sound delta starts from
        self._read_at: dict[str, int] = {}  # time of each delta.json
        self._refused: dict[str, _Stamp] = {}
        # A delta is applied once, so that versions that return to an earlier one make no circle.
        self._applied: set[str] = set()
        self._told: set[str] = set()  # logged as not following

    def look(self) -> int:
        """Applies all deltas of the folder that follow. Returns their number."""
        applied = 0
        while self._apply_next():
            applied += 1
        return applied

    def follow(self, stop: threading.Event, seconds: float = 0.2) -> None:
        """Looks for deltas until `stop` is set."""
        while not stop.wait(seconds):
            try:
                self.look()
            except Exception:  # The folder may be gone for a while. Answers go on.
                _LOGGER.exception("the folder of deltas %r cannot be read", self._folder)
                stop.wait(5)

    def _apply_next(self) -> bool:
        version, _, _ = self._export.described_version()
        self._read_descriptions()
        for path in sorted(set(self._bases) - self._applied):
            if self._bases[path] != version:
                if path not in self._told:
                    self._told.add(path)
                    _LOGGER.info(
                        "delta %r starts from version %.100r, this server has %s", path, self._bases[path], version
                    )
            elif not self._is_refused(path) and self._apply(path):
                return True
        return False

    def _apply(self, path: str) -> bool:
        try:
            for name in os.listdir(os.path.join(path, "server")):
                _check_readable(path, f"server/{name}")
            told = self._export.call("apply_delta", {"path": np.array(os.fsencode(path), object)})
        except (OSError, RequestError) as error:
            self._refuse(path, str(error))
            return False
        self._applied.add(path)
        _LOGGER.info("applied delta %r: version %s", path, told["version"].item().decode())
        return True

    def _read_descriptions(self) -> None:
        """Reads each new or changed delta.json, and forgets the removed ones."""
        found = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found[entry.path] = os.stat(os.path.join(entry.path, "delta.json")).st_mtime_ns
        for path in self._read_at.keys() - found.keys():
            self._forget(path)
        for path in sorted(path for path, changed_at in found.items() if self._read_at.get(path) != changed_at):
            if self._is_refused(path):
                continue
            self._forget(path)
            try:
                _check_readable(path, "delta.json")
                with open(os.path.join(path, "delta.json"), encoding="utf-8") as file:
                    self._bases[path] = str(json.load(file)["identity"]["version"])
                self._read_at[path] = found[path]
            except Exception as error:  # One bad entry must not keep the others from the server.
                self._refuse(path, f"file {os.path.join(path, 'delta.json')!r} is damaged: {error!r}")

    def _forget(self, path: str) -> None:
        for known in (self._bases, self._read_at):
            known.pop(path, None)
        self._applied.discard(path)
        self._told.discard(path)

    def _refuse(self, path: str, why: str) -> None:
        self._refused[path] = _stamp(path)
        self._forget(path)
        self._count_refusal()
        _LOGGER.error("refused delta %r: %s", path, why.encode("unicode_escape").decode())

    def _is_refused(self, path: str) -> bool:
        if path in self._refused and self._refused[path] != _stamp(path):
            del self._refused[path]
        return path in self._refused


def _check_readable(delta: str, name: str) -> None:
    """Raises OSError unless a file of a delta can be read to its end: a device or pipe would hold up the server."""
    path = os.path.join(delta, name)
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise OSError(f"{path!r} is no file. Remedy: copy the delta again.")
    if state.st_size > _MOST_BYTES.get(name, state.st_size):
        raise OSError(f"{path!r} has {state.st_size} bytes, want at most {_MOST_BYTES[name]}. Remedy: copy it again.")


def _stamp(delta: str) -> _Stamp:
    """Returns the state of the files that a server reads."""
    found = []
    for folder in (delta, os.path.join(delta, "server")):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if folder != delta or entry.name == "delta.json":
                    state = entry.stat()
                    found.append((entry.name, state.st_size, state.st_mtime_ns))
    return tuple(sorted(found))
