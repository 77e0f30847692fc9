"""Simulates the end of the process at the n-th change that any Python code makes to a folder.

Unlike power_loss.py this sees files that NumPy, shutil and `open` write, but not when they are synced.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

from tests.soak.power_loss import Crashed

# Events of Python's audit hooks, with the positions of the paths among their arguments.
CHANGES = {"os.mkdir": [0], "os.rename": [0, 1], "os.remove": [0], "os.rmdir": [0], "open": [0], "os.truncate": [0]}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_watched: list[dict] = []


def _watch(event: str, arguments: tuple) -> None:
    if not _watched or event not in CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    (watched,) = _watched
    paths = [os.path.abspath(os.fsdecode(p)) for n in CHANGES[event] if isinstance(p := arguments[n], (str, bytes))]
    if any(path.startswith(watched["root"]) for path in paths):
        if watched["left"] == 0:
            raise Crashed
        watched["left"] -= 1


@contextlib.contextmanager
def killed_at(root: pathlib.Path, n: int) -> Iterator[None]:
    """Makes the n-th change below `root`, counted from 0, and all later ones raise Crashed instead of happening."""
    if not hasattr(sys, "_fusedrec_soak_watches"):  # A hook stays until the process ends.
        sys.addaudithook(_watch)
        sys._fusedrec_soak_watches = True
    _watched.append({"root": f"{root}{os.sep}", "left": n})
    try:
        yield
    finally:
        _watched.clear()
