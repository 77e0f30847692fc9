"""Runs the C++ tests (tests/cpp) under sanitizers: memory errors and undefined behaviour, then data races.

It compiles the algorithms of custom_ops, which include no TensorFlow, and the programs of tests/cpp into
build/sanitizers/<kind>, and compiles only changed sources again. The headers that most of them include are compiled
once. A program passes when it ends with 0.

    python -m tools.sanitizers [address] [thread]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
ALGORITHMS = "custom_ops"
PROGRAMS = "tests/cpp"
HEADERS = pathlib.Path("tests/cpp/headers.h")
BUILD = pathlib.Path("build/sanitizers")  # relative to ROOT, as are all paths given to the compiler
TIMEOUT_S = 300.0  # of one program

# The optimization that sanitizers need: reports name lines, and programs are not too slow. Rounding as in setup.py.
FLAGS = ["-O1", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-Wall", "-Wextra"]

DESCRIBE_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps([tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()]))
"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to build and run everything."""

    name: str
    finds: str
    flags: tuple[str, ...]
    only_threads: bool = False  # only programs that have threads

    def folder(self) -> pathlib.Path:
        return BUILD / self.name


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "address",
            "memory errors, leaks, undefined behaviour",
            ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DFUSEDREC_NO_CLONES"),
        ),
        Kind("thread", "data races", ("-fsanitize=thread",), only_threads=True),
    )
}


class Failed(Exception):
    """A build or a program failed. The message is for the user."""


def tensorflow_flags() -> tuple[list[str], list[str]]:
    """Returns the flags of compiler and linker. The headers and symbols of absl are TensorFlow's."""
    answer = subprocess.run(
        [sys.executable, "-c", DESCRIBE_TENSORFLOW],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise Failed(f"error: {sys.executable} cannot import TensorFlow ({reason}). Remedy: run `make setup`.")
    compile_flags, link_flags = json.loads(answer.stdout.splitlines()[-1])
    # As system headers, TensorFlow's own warnings stay out of the output.
    compile_flags = ["-isystem" + flag[len("-I") :] if flag.startswith("-I") else flag for flag in compile_flags]
    folders = [flag[len("-L") :] for flag in link_flags if flag.startswith("-L")]
    return compile_flags, [*link_flags, *(f"-Wl,-rpath,{folder}" for folder in folders)]


def host_sources() -> list[pathlib.Path]:
    """Returns the sources of the ops' CPU form, which setup.py compiles without CUDA."""
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / ALGORITHMS).rglob("*.cc"))
    return [path for path in sources if "cuda" not in path.parts]


def algorithms() -> list[pathlib.Path]:
    """Returns the sources of custom_ops that include no TensorFlow header."""
    return [path for path in host_sources() if not path.stem.endswith(("_op", "_kernel"))]


def programs(kind: Kind) -> list[pathlib.Path]:
    """Returns the sources of tests/cpp, one program each."""
    sources = sorted((ROOT / PROGRAMS).rglob("*.cc"))
    wanted = [path for path in sources if not kind.only_threads or '"threads.h"' in path.read_text(encoding="utf-8")]
    return [path.relative_to(ROOT) for path in wanted]


@dataclasses.dataclass(frozen=True)
class Step:
    """A call of the compiler: an object of one source, or a program of several objects."""

    output: pathlib.Path
    command: list[str]

    def _record(self) -> pathlib.Path:
        return ROOT / self.output.with_name(f"{self.output.name}.command")

    def is_done(self) -> bool:
        """Returns whether the same command made the output, and nothing that it read is younger."""
        output, record = ROOT / self.output, self._record()
        if not output.exists() or not record.exists() or record.read_text(encoding="utf-8") != shlex.join(self.command):
            return False
        made = output.stat().st_mtime
        return all(path.exists() and path.stat().st_mtime < made for path in self._inputs())

    def _inputs(self) -> Iterable[pathlib.Path]:
        depfile = ROOT / self.output.with_suffix(".d")
        if self.output.suffix in (".o", ".gch"):  # `object: source header ...`, as -MMD writes it
            return [ROOT / word for word in shlex.split(depfile.read_text(encoding="utf-8").replace("\\\n", " "))[1:]]
        return [ROOT / word for word in self.command if word.endswith(".o")]

    def run(self) -> None:
        started = time.time()
        (ROOT / self.output).parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*self.command, "-o", str(self.output)], cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace"
        )
        if done.returncode != 0:
            (ROOT / self.output).unlink(missing_ok=True)
            remedy = (
                "\nRemedy: install the sanitizers of the compiler (Debian: g++; Fedora: libasan, libubsan, libtsan)."
            )
            lacking = any(name in done.stderr for name in ("cannot find -l", "libasan", "libubsan", "libtsan"))
            reason = f"{done.stderr}error: this command failed: {shlex.join(self.command)}"
            raise Failed(reason + (remedy if lacking else ""))
        sys.stderr.write(done.stderr)  # warnings
        # The output gets the time at which its inputs were read, so that a file edited meanwhile is younger.
        os.utime(ROOT / self.output, (started, started))
        self._record().write_text(shlex.join(self.command), encoding="utf-8")


def compilation(kind: Kind, compiler: list[str], source: pathlib.Path) -> Step:
    output = kind.folder() / source.with_suffix(".o")
    depfile = str(output.with_suffix(".d"))
    return Step(output, [*compiler, "-MMD", "-MF", depfile, "-MT", "object", "-c", str(source)])


def compiled_headers(kind: Kind, compiler: list[str]) -> Step:
    output = kind.folder() / HEADERS.with_suffix(".h.gch")
    depfile = str(output.with_suffix(".d"))
    return Step(output, [*compiler, "-x", "c++-header", "-MMD", "-MF", depfile, "-MT", "headers", "-c", str(HEADERS)])


def run_all(steps: list[Step], pool: concurrent.futures.Executor) -> None:
    list(pool.map(Step.run, [step for step in steps if not step.is_done()]))


def build(kind: Kind, flags: tuple[list[str], list[str]], pool: concurrent.futures.Executor) -> list[pathlib.Path]:
    """Compiles and links the programs of one kind. Returns their paths."""
    compile_flags, link_flags = flags
    compiler = [os.environ.get("CXX", "g++"), *compile_flags, *FLAGS, *kind.flags, f"-I{ALGORITHMS}", f"-I{PROGRAMS}"]
    headers = compiled_headers(kind, compiler)
    # The compiler looks for this name with .gch. Without it there is no such file.
    compiler = [*compiler, "-include", str(headers.output.with_suffix(""))]
    parts = [compilation(kind, compiler, source) for source in algorithms()]
    tests = [compilation(kind, compiler, source) for source in programs(kind)]
    run_all([headers], pool)
    # The slow sources first, so that no core waits for the last of them.
    run_all([*tests, *parts], pool)
    objects = [str(step.output) for step in parts]
    linked = [
        Step(test.output.with_suffix(""), [compiler[0], *kind.flags, str(test.output), *objects, *link_flags])
        for test in tests
    ]
    run_all(linked, pool)
    return [step.output for step in linked]


def without_address_randomization() -> list[str]:
    """Returns the command that precedes a program. Older ThreadSanitizers fail under much address randomization."""
    prefix = ["setarch", "-R"]
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    return prefix if works else []


def run(program: pathlib.Path, prefix: list[str]) -> float:
    """Runs a program; returns its seconds."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "UBSAN_OPTIONS": "print_stacktrace=1"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*prefix, str(ROOT / program)], cwd=ROOT, env=env, timeout=TIMEOUT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Failed(f"error: {program} did not end within {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise Failed(f"{done.stdout}error: {program} ended with {done.returncode}")
    return time.monotonic() - started


def main(arguments: list[str]) -> int:
    unknown = sorted(set(arguments) - set(KINDS))
    if unknown:
        print(f"error: unknown kind {unknown[0]!r}. Known: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    try:
        flags = tensorflow_flags()
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for kind in [KINDS[name] for name in arguments or KINDS]:
                started = time.monotonic()
                print(f"sanitize: {kind.name} ({kind.finds}): compiling what changed ...", flush=True)
                built = build(kind, flags, pool)
                print(f"sanitize: {kind.name}: compiled in {time.monotonic() - started:.0f} s", flush=True)
                prefix = without_address_randomization() if kind.name == "thread" else []
                durations = pool.map(functools.partial(run, prefix=prefix), built)
                for program, duration in zip(built, durations):
                    print(f"sanitize: {kind.name}: {program.name} ... {duration:.1f} s", flush=True)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
