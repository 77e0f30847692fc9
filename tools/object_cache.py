"""Compiles and links once per machine: equal inputs, commands and compilers give one output for all clones.

An output is <cache>/objects/<command>/<content>: digests of the command, and of all files that the compiler read.
Outputs of the last use stay, up to KEPT_BYTES. Processes that need the same output wait for the one that makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tools.horovod_wheel import cache_folder, locked

KEPT_BYTES = 3 << 30
HERE = "@clone@"  # in place of the clone's path in digests


class Failed(Exception):
    """The compiler failed. The message is for the user."""


def folder(root: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the outputs: in the user's cache, or in the clone if that cannot be written."""
    cache = cache_folder() / "objects"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    return cache if os.access(cache, os.W_OK) else root / "build/objects"


@functools.cache
def _version(compiler: str) -> str:
    answer = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    return answer.stdout + platform.machine()


@functools.cache
def _digest_of(path: pathlib.Path, modified_ns: int, size: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def content(root: pathlib.Path, inputs: Sequence[str]) -> str:
    """Returns a digest of files; their paths are relative to the clone."""
    total = hashlib.sha256()
    for name in inputs:
        status = (root / name).stat()
        total.update(_digest_of(root / name, status.st_mtime_ns, status.st_size))
    return total.hexdigest()[:32]


def remove_oldest(cache: pathlib.Path) -> None:
    """Removes outputs beyond KEPT_BYTES."""
    with contextlib.suppress(FileNotFoundError):  # another process removes them, too
        outputs = [(path.stat(), path) for path in cache.glob("*/*") if path.name != "lock"]
        total = sum(status.st_size for status, _ in outputs)
        for status, path in sorted(outputs, key=lambda one: one[0].st_mtime):
            if total <= KEPT_BYTES:
                break
            if path.is_file():
                path.unlink()
            total -= status.st_size


@dataclasses.dataclass(frozen=True)
class Output:
    """The output of a command.

    Attributes:
      root: The clone, in which the command runs.
      command: The compiler and its flags. With `-c`, the headers that it reads count as inputs.
      inputs: Sources or objects; paths in the clone are relative to it.
      suffix: End of the output's name, such as `.o`.
      framework: Version of the headers that the compiler reads outside the clone.
      last: Words after the inputs.
    """

    root: pathlib.Path
    command: Sequence[str]
    inputs: Sequence[pathlib.Path]
    suffix: str
    framework: str = ""
    last: Sequence[str] = ()

    def _words(self) -> list[str]:
        return [*self.command, *map(str, self.inputs), *self.last]

    @functools.cached_property
    def _entry(self) -> pathlib.Path:
        cache = folder(self.root)
        text = "\0".join([_version(self.command[0]), self.framework, *self._words()])
        text = text.replace(str(cache), "").replace(str(self.root), HERE)
        return cache / hashlib.sha256(text.encode()).hexdigest()[:32]

    def find(self) -> pathlib.Path | None:
        """Returns the output if somebody has made it."""
        for record in sorted(self._entry.glob("*.inputs"), key=os.path.getmtime, reverse=True):
            output = record.with_suffix(self.suffix)
            with contextlib.suppress(FileNotFoundError):  # a header that this state lacks, or a removed output
                if content(self.root, record.read_text(encoding="utf-8").splitlines()) == record.stem:
                    for path in (record, output):
                        os.utime(path)
                    return output
        return None

    def make(self) -> pathlib.Path:
        """Returns the output, and makes it if nobody has."""
        self._entry.mkdir(parents=True, exist_ok=True)
        with locked(self._entry / "lock", f"another process makes {self.inputs[0]}; waiting for it ..."):
            output = self.find()
            if output is None:
                output = self._run()
                remove_oldest(self._entry.parent)
        return output

    def _run(self) -> pathlib.Path:
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=self._entry) as name:
            unfinished, depfile = pathlib.Path(name, f"output{self.suffix}"), pathlib.Path(name, "depfile")
            read = list(map(str, self.inputs))
            listing = ["-MMD", "-MF", str(depfile), "-MT", "output"] if "-c" in self.command else []
            for _ in range(2):  # again if a file was edited meanwhile
                started = time.time()
                done = subprocess.run(
                    [*self._words(), *listing, "-o", str(unfinished)],
                    cwd=self.root, capture_output=True, encoding="utf-8", errors="replace",
                )  # fmt: skip
                if done.returncode != 0:
                    raise Failed(f"{done.stderr}error: this command failed: {shlex.join(self._words())}")
                if not listing:
                    break
                read = shlex.split(depfile.read_text(encoding="utf-8").replace("\\\n", " "))[1:]
                if all((self.root / path).stat().st_mtime < started for path in read):
                    break
            sys.stderr.write(done.stderr)  # warnings
            output = self._entry / f"{content(self.root, read)}{self.suffix}"
            os.replace(unfinished, output)
            output.with_suffix(".inputs").write_text("\n".join(read), encoding="utf-8")
        return output
