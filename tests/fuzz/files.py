"""A reader of a damaged file must return the written contents or refuse the file by name."""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.fuzz.mutations import altered, damaged

MOST_SECONDS = 20  # Limit per file.
CHUNK = 400  # Damages per seed.


class Target(NamedTuple):
    """A kind of folder.

    make: Function that writes a correct folder.
    read: Function that reads all of it. Results are compared with ==.
    files: Globs of the files to damage.
    checked: True if a checksum covers all these files, so that another result is a violation.
    forgeries: By glob, functions that read a file's JSON and write it with a new checksum.
    """

    make: Callable[[pathlib.Path], None]
    read: Callable[[pathlib.Path], Any]
    files: tuple[str, ...]
    checked: bool = True
    forgeries: dict[str, tuple[Callable[[bytes], Any], Callable[[bytes, Any], bytes]]] = {}


class Violation(AssertionError):
    """A reader gave neither the right result nor a refusal."""


def plain_json(data: bytes) -> Any:
    return json.loads(data)


def write_plain_json(_: bytes, value: Any) -> bytes:
    return json.dumps(value).encode()


def damage_files(target: Target, seed: int, damages: int = CHUNK) -> collections.Counter:
    """Damages one file of a folder at a time and reads the folder. Counts "right", "refused" and "forged".

    Raises:
      Violation: The result is wrong, the exception is no ValueError or names no file, or the reader hangs.
    """
    chance, counts = random.Random(seed), collections.Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        folder = pathlib.Path(home) / "whole"
        target.make(folder)
        right = target.read(folder)
        paths = sorted({path for glob in target.files for path in folder.glob(glob) if path.is_file()})
        assert paths, "there is nothing to damage"
        for number in range(damages):
            path = chance.choice(paths)
            whole = path.read_bytes()
            forgery = next((way for glob, way in target.forgeries.items() if path.match(glob)), None)
            forged = forgery is not None and chance.random() < 0.6
            path.write_bytes(
                forgery[1](whole, altered(forgery[0](whole), chance)) if forged else damaged(whole, chance)
            )
            where = f"seed {seed}, damage {number}, of {path.relative_to(folder)}"
            counts[_outcome(target, folder, right, where, anything=forged or not target.checked)] += 1
            path.write_bytes(whole)
            for left in folder.parent.iterdir():
                if left != folder:
                    shutil.rmtree(left)
    return counts


def _outcome(target: Target, folder: pathlib.Path, right: Any, where: str, anything: bool) -> str:
    try:
        with _alarm(where):
            found = target.read(folder)
    except ValueError as refusal:
        if str(folder.parent) not in str(refusal):
            raise Violation(f"a refusal that names no file, {where}: {refusal!r}") from refusal
        return "refused"
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"neither an answer nor a ValueError, {where}: {error!r}") from error
    if found == right:
        return "right"
    if not anything:
        raise Violation(f"a wrong answer, {where}")
    return "forged"


@contextlib.contextmanager
def _alarm(where: str) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Violation(f"no end within {MOST_SECONDS} s, {where}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
