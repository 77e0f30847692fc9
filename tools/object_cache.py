"""Compiles and links once per machine: equal inputs, commands and compilers give one output for all clones.

An output is <cache>/objects/<command>/<content>: digests of the command, and of all files that the compiler read.
Outputs of the last use stay, up to KEPT_BYTES. Processes that need the same output wait for the one that makes it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KEPT_BYTES = 3 << 30
HERE = "@clone@"  # in place of the clone's path in digests
# For a process of its own, because TensorFlow prints at import and would stay loaded in this one.
DESCRIBE_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps([tf.version.VERSION, tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()]))
"""


class Failed(Exception):
    """The compilation failed. The message is for the user."""


class TensorFlow(NamedTuple):
    """The TensorFlow of this environment. Its headers and symbols include absl's."""

    version: str
    compile_flags: list[str]
    link_flags: list[str]


def cache_folder() -> pathlib.Path:
    """Returns ${XDG_CACHE_HOME:-$HOME/.cache}/tf_fusedrec."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "tf_fusedrec"


@contextlib.contextmanager
def locked(path: pathlib.Path, waiting: str) -> Iterator[None]:
    """Holds the lock `path`, and prints `waiting` while another process holds it.

    The commands of steps.run_logged inherit the lock. If the set-up is killed and a command lives on, the next set-up
    waits for its end.
    """
    with path.open("w", encoding="utf-8") as stream:
        os.set_inheritable(stream.fileno(), True)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"      {waiting}", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def folder(root: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the outputs: in the user's cache, or in the clone if that cannot be written."""
    cache = cache_folder() / "objects"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    return cache if os.access(cache, os.W_OK) else root / "build/objects"


def describe_tensorflow() -> TensorFlow:
    """Returns the TensorFlow that C++ code is compiled against."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", DESCRIBE_TENSORFLOW]
    answer = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", errors="replace")
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise Failed(
            f"error: the C++ code is compiled against TensorFlow, but {sys.executable} cannot import it ({reason}). "
            "Remedy: run `make setup` in the clone, or `pip install --no-deps -r requirements/runtime.txt -r "
            "requirements/build.txt` first."
        )
    version, compile_flags, link_flags = json.loads(answer.stdout.splitlines()[-1])
    # As system headers, TensorFlow's own warnings stay out of the output.
    compile_flags = ["-isystem" + flag[len("-I") :] if flag.startswith("-I") else flag for flag in compile_flags]
    return TensorFlow(version, compile_flags, link_flags)


@functools.cache
def version(compiler: str) -> str:
    """Returns the version of a compiler, and the machine."""
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
      headers: Compiled headers with which the source begins. make_all makes them first.
    """

    root: pathlib.Path
    command: Sequence[str]
    inputs: Sequence[pathlib.Path]
    suffix: str
    framework: str = ""
    last: Sequence[str] = ()
    headers: CompiledHeaders | None = None

    def words(self) -> list[str]:
        """Returns the command, without the name of the output."""
        return [*self.command, *map(str, self.inputs), *self.last]

    @functools.cached_property
    def _entry(self) -> pathlib.Path:
        cache = folder(self.root)
        text = "\0".join([version(self.command[0]), self.framework, *self.words()])
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
                    [*self.words(), *listing, "-o", str(unfinished)],
                    cwd=self.root, capture_output=True, encoding="utf-8", errors="replace",
                )  # fmt: skip
                if done.returncode != 0:
                    raise Failed(f"{done.stderr}error: this command failed: {shlex.join(self.words())}")
                if not listing:
                    break
                _, _, listed = depfile.read_text(encoding="utf-8").replace("\\\n", " ").partition(":")
                read = shlex.split(listed)
                if all((self.root / path).stat().st_mtime < started for path in read):
                    break
            sys.stderr.write(done.stderr)  # warnings
            output = self._entry / f"{content(self.root, read)}{self.suffix}"
            os.replace(unfinished, output)
            output.with_suffix(".inputs").write_text("\n".join(read), encoding="utf-8")
        return output


@dataclasses.dataclass(frozen=True)
class CompiledHeaders:
    """Headers with which many sources begin, compiled apart.

    Attributes:
      root: The clone.
      command: The compiler and its flags.
      header: Path of the header that includes them, relative to the clone.
      folder: Where the compiler looks for the compiled headers, relative to the clone.
      framework: As of an Output.
    """

    root: pathlib.Path
    command: Sequence[str]
    header: pathlib.Path
    folder: pathlib.Path
    framework: str

    def object(self, source: pathlib.Path, flags: Sequence[str] = ()) -> Output:
        """Returns the object of a source that begins with the headers. `flags` must not change them."""
        # The compiler looks for this name with .gch. It does not list what the compiled headers contain.
        command = [*self.command, *flags, "-include", str(self.folder / self.header.name), "-c"]
        framework = self.framework + (self.root / self.header).read_text(encoding="utf-8")
        return Output(self.root, command, [source], ".o", framework, headers=self)

    def make(self) -> None:
        """Compiles the headers if nobody has, and puts a link to them into the folder."""
        command = [*self.command, "-c", "-x", "c++-header"]
        compiled = Output(self.root, command, [self.header], ".gch", self.framework).make()
        folder = self.root / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / f"new{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(compiled)
        link.replace(folder / f"{self.header.name}.gch")


def make_all(outputs: Sequence[Output], *, print_sources: bool = False) -> list[pathlib.Path]:
    """Returns the outputs, and makes the missing ones on all cores, in their order.

    Sources that begin with compiled headers are compiled after these headers and after the other sources.
    """

    def make(output: Output) -> pathlib.Path:
        if print_sources:
            sys.stdout.write(f"compiling {output.inputs[0]}\n")  # one write: the lines of the workers do not mix
            sys.stdout.flush()
        return output.make()

    missing = sorted((output for output in outputs if output.find() is None), key=lambda output: bool(output.headers))
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        by_id = {id(output.headers): output.headers for output in missing if output.headers}
        headers = {key: pool.submit(compiled.make) for key, compiled in by_id.items()}
        running = []
        for output in missing:
            if output.headers:
                headers[id(output.headers)].result()
            running.append(pool.submit(make, output))
    for compilation in running:
        compilation.result()
    return [output.make() for output in outputs]
