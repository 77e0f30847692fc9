"""Runs the C++ tests (tests/cpp) under sanitizers: memory errors and undefined behaviour, then data races.

Each kind of sanitizer has one program: the algorithms of custom_ops, which include no TensorFlow, and the tests. Only
objects that no clone of this machine has compiled (object_cache.py) are compiled. A test passes when the program ends
with 0.

    python -m tools.sanitizers [address] [thread]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from tools.object_cache import CompiledHeaders, Failed, Output, TensorFlow, describe_tensorflow, make_all

ROOT = pathlib.Path(__file__).resolve().parents[1]
ALGORITHMS = "custom_ops"
TESTS = "tests/cpp"
HEADERS = pathlib.Path("tests/cpp/headers.h")
BUILD = pathlib.Path("build/sanitizers")  # relative to ROOT, as are all paths given to the compiler
TIMEOUT_S = 300.0  # of one test
LACKING = ("cannot find -l", "libasan", "libubsan", "libtsan")

# Reports name lines, and programs are not too slow; -O1 compiles half as long again. Rounding as in setup.py.
FLAGS = ["-Og", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS += ["-Wno-uninitialized"]  # At -Og, GCC warns of its own headers of AVX-512.


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to build and run everything."""

    name: str
    finds: str
    flags: tuple[str, ...]
    only_threads: bool = False  # only tests that have threads


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


def host_sources() -> list[pathlib.Path]:
    """Returns the sources of the ops' CPU form, which setup.py compiles without CUDA and without Gloo."""
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / ALGORITHMS).rglob("*.cc"))
    return [path for path in sources if not {"cuda", "gloo_exchange"} & set(path.parts)]


def algorithms() -> list[pathlib.Path]:
    """Returns the sources of custom_ops that include no TensorFlow header."""
    return [path for path in host_sources() if not path.stem.endswith(("_op", "_kernel"))]


def tests(kind: Kind) -> list[pathlib.Path]:
    sources = sorted((ROOT / TESTS).rglob("*_test.cc"))
    wanted = [path for path in sources if not kind.only_threads or '"threads.h"' in path.read_text(encoding="utf-8")]
    return [path.relative_to(ROOT) for path in wanted]


def compiler(kind: Kind, tensorflow: TensorFlow) -> list[str]:
    include = [f"-I{ALGORITHMS}", f"-I{TESTS}"]
    return [os.environ.get("CXX", "g++"), *tensorflow.compile_flags, *FLAGS, *kind.flags, *include]


def build(kinds: Sequence[Kind], tensorflow: TensorFlow) -> list[pathlib.Path]:
    """Compiles what is missing, and links. Returns the program of each kind."""
    objects = {}
    for kind in kinds:
        headers = CompiledHeaders(ROOT, compiler(kind, tensorflow), HEADERS, BUILD / kind.name, tensorflow.version)
        # The slow sources first, so that no core waits for the last of them.
        sources = [*tests(kind), *(ROOT / TESTS).glob("main.cc"), *algorithms()]
        objects[kind] = [headers.object(source) for source in sources]
    paths = iter(make_all([output for kind in kinds for output in objects[kind]]))
    return make_all([
        Output(
            ROOT, [compiler(kind, tensorflow)[0], *kind.flags], [next(paths) for _ in objects[kind]], ".run",
            tensorflow.version, tensorflow.link_flags,
        )
        for kind in kinds
    ])  # fmt: skip


def without_address_randomization() -> list[str]:
    """Returns the command that precedes a program. Older ThreadSanitizers fail under much address randomization."""
    prefix = ["setarch", "-R"]
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    return prefix if works else []


def run(command: list[str], libraries: str) -> float:
    """Runs a test; returns its seconds."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "UBSAN_OPTIONS": "print_stacktrace=1"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**env, "LD_LIBRARY_PATH": libraries}, timeout=TIMEOUT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Failed(f"error: {command[-1]} did not end within {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise Failed(f"{done.stdout}error: {command[-1]} ended with {done.returncode}: {shlex.join(command)}")
    return time.monotonic() - started


def main(arguments: list[str]) -> int:
    unknown = sorted(set(arguments) - set(KINDS))
    if unknown:
        print(f"error: unknown kind {unknown[0]!r}. Known: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    kinds = [KINDS[name] for name in arguments or KINDS]
    try:
        started = time.monotonic()
        for kind in kinds:
            print(f"sanitize: {kind.name} ({kind.finds})", flush=True)
        tensorflow = describe_tensorflow()
        built = build(kinds, tensorflow)
        print(f"sanitize: compiled what changed in {time.monotonic() - started:.0f} s", flush=True)
        prefix = {"thread": without_address_randomization()}
        libraries = ":".join(flag[len("-L") :] for flag in tensorflow.link_flags if flag.startswith("-L"))
        commands = [
            (kind, [*prefix.get(kind.name, []), str(program), test.stem.removesuffix("_test")])
            for kind, program in zip(kinds, built) for test in tests(kind)
        ]  # fmt: skip
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            durations = pool.map(lambda one: run(one[1], libraries), commands)
            for (kind, command), duration in zip(commands, durations):
                print(f"sanitize: {kind.name}: {command[-1]} ... {duration:.1f} s", flush=True)
    except Failed as error:
        print(error, file=sys.stderr)
        if any(word in str(error) for word in LACKING):
            print("Remedy: install the compiler's sanitizers (Debian: g++; Fedora: libasan, libubsan, libtsan).",
                  file=sys.stderr)  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
