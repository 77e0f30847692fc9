"""Applies the deltas of a folder as they appear, while the model is served.

A delta follows if it starts from the version that answers; delta.json names that version. Names and dates of the
folders play no part. A damaged delta is refused by name, and tried again when one of its files changes, because a copy
may not have been complete.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import threading
from collections.abc import Callable

import numpy as np

from models.serve.loaded import Export, RequestError

_LOGGER = logging.getLogger("models.serve")
_Stamp = tuple[tuple[str, int, int], ...]


class Deltas:
    """Follows a folder of deltas.

    Args:
      export: Export that gets the deltas.
      folder: Folder that holds the folders of deltas.
      refused: Is called for every refusal.
    """

    def __init__(self, export: Export, folder: str | os.PathLike, refused: Callable[[], None]):
        self._export, self._folder, self._count_refusal = export, pathlib.Path(folder), refused
        self._bases: dict[pathlib.Path, str] = {}  # version that each sound delta starts from
        self._read_at: dict[pathlib.Path, int] = {}  # time of its delta.json
        self._refused: dict[pathlib.Path, _Stamp] = {}
        # A delta is applied once, so that versions that return to an earlier one make no circle.
        self._applied: set[pathlib.Path] = set()
        self._told: set[pathlib.Path] = set()  # logged as not following

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
                _LOGGER.exception("the folder of deltas %s cannot be read", self._folder)
                stop.wait(5)

    def _apply_next(self) -> bool:
        version, _, _ = self._export.described_version()
        self._read_descriptions()
        for path in sorted(set(self._bases) - self._applied):
            if self._bases[path] != version:
                if path not in self._told:
                    self._told.add(path)
                    _LOGGER.info(
                        "delta %s starts from version %s, this server has %s", path, self._bases[path], version
                    )
            elif not self._is_refused(path) and self._apply(path):
                return True
        return False

    def _apply(self, path: pathlib.Path) -> bool:
        try:
            told = self._export.call("apply_delta", {"path": np.array(os.fspath(path).encode(), object)})
        except RequestError as error:
            self._refuse(path, str(error))
            return False
        self._applied.add(path)
        _LOGGER.info("applied delta %s: version %s", path, told["version"].item().decode())
        return True

    def _read_descriptions(self) -> None:
        """Reads each new or changed delta.json, and forgets the removed ones."""
        found = {description.parent for description in self._folder.glob("*/delta.json")}
        for path in set(self._bases) - found:
            self._forget(path)
        for path in sorted(found):
            description = path / "delta.json"
            try:
                changed_at = description.stat().st_mtime_ns
                if self._read_at.get(path) == changed_at or self._is_refused(path):
                    continue
                self._forget(path)
                self._bases[path] = json.loads(description.read_text(encoding="utf-8"))["identity"]["version"]
                self._read_at[path] = changed_at
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._refuse(path, f"file {os.fspath(description)!r} is damaged: {error!r}")

    def _forget(self, path: pathlib.Path) -> None:
        for known in (self._bases, self._read_at):
            known.pop(path, None)
        self._applied.discard(path)
        self._told.discard(path)

    def _refuse(self, path: pathlib.Path, why: str) -> None:
        self._refused[path] = _stamp(path)
        self._forget(path)
        self._count_refusal()
        _LOGGER.error("refused delta %s: %s", path, why)

    def _is_refused(self, path: pathlib.Path) -> bool:
        if path in self._refused and self._refused[path] != _stamp(path):
            del self._refused[path]
        return path in self._refused


def _stamp(delta: pathlib.Path) -> _Stamp:
    """Returns the state of the files that a server reads."""
    found = []
    for file in sorted([delta / "delta.json", *delta.glob("server/*")]):
        if file.is_file():
            state = file.stat()
            found.append((file.name, state.st_size, state.st_mtime_ns))
    return tuple(found)
