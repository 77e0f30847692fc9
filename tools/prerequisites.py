"""Checks the machine before the set-up changes anything, and names each missing prerequisite with its remedy."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

GIB = 2**30
# .venv takes 2.8 GiB and build/ below 0.6, pip's cache 1, and the builds of pip and Horovod 2 in the temporary folder.
ROOM_FOR_CLONE, ROOM_FOR_CACHE, ROOM_FOR_TEMPORARY = 3.5 * GIB, 1.0 * GIB, 2.0 * GIB
CXX17_PROGRAM = """
#include <optional>
#include <string_view>
int main() {
  if (std::optional<std::string_view> name = "C++17"; name) return name->empty();
}
"""


def check_machine(root: pathlib.Path) -> Iterator[str]:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        yield (
            f"missing: Linux on x86-64 or aarch64; this is {system} on {machine}.\n"
            "  Remedy: use such a machine, a virtual one or a container; TensorFlow Recommenders "
            "Addons have no wheels for others."
        )
    # Horovod's cmake files do not quote TensorFlow's path in the clone's .venv.
    if any(character.isspace() for character in str(root)):
        yield (
            f"missing: a path without blanks; this clone lies in {str(root)!r}.\n"
            "  Remedy: move the clone; Horovod cannot be built there."
        )
    # Debian packages these modules apart from Python.
    if lacking := [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]:
        yield (
            f"missing: the module {' and '.join(lacking)} of {sys.executable}.\n"
            f"  Remedy: Debian, Ubuntu: apt install python{sys.version_info.major}.{sys.version_info.minor}-venv; "
            "else choose a complete Python with make PYTHON=..."
        )


def check_programs(*names: str) -> Iterator[str]:
    """Checks for a C++17 compiler with its standard library, and for programs that Debian packages by their name."""
    compiler = os.environ.get("CXX", "g++")
    remedy = "  Remedy: Debian, Ubuntu: apt install g++ (9 or newer), or name another one in CXX."
    if shutil.which(compiler) is None:
        yield f"missing: a C++ compiler; {compiler} is not on PATH.\n{remedy}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "program.cc"
            source.write_text(CXX17_PROGRAM, encoding="utf-8")
            command = [compiler, "-std=c++17", str(source), "-o", str(source.with_suffix(""))]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
            )
        if done.returncode != 0:
            reason = (done.stdout.strip().splitlines() or ["no message"])[0]
            yield f"missing: C++17; {compiler} does not compile a small program (its message: {reason}).\n{remedy}"
    for name in names:
        if shutil.which(name) is None:
            yield f"missing: {name} is not on PATH.\n  Remedy: Debian, Ubuntu: apt install {name}"


def check_disk(needs: list[tuple[pathlib.Path, float]]) -> Iterator[str]:
    """Checks free space for each (folder, bytes). Folders of one file system share it."""
    by_device: dict[int, list[tuple[pathlib.Path, float]]] = {}
    for folder, wanted in needs:
        while not folder.exists():
            folder = folder.parent
        by_device.setdefault(folder.stat().st_dev, []).append((folder, wanted))
    for on_device in by_device.values():
        wanted, free = sum(wanted for _, wanted in on_device), shutil.disk_usage(on_device[0][0]).free
        if free < wanted:
            folders = " and ".join(dict.fromkeys(str(folder) for folder, _ in on_device))
            yield (
                f"missing: disk space; {folders}: {free / GIB:.1f} GiB free, {wanted / GIB:.1f} GiB needed.\n"
                "  Remedy: make room, clone onto a larger disk, or point XDG_CACHE_HOME and TMPDIR to one."
            )


def missing(root: pathlib.Path, cache: pathlib.Path, *, fresh: bool, horovod: bool = True) -> list[str]:
    """Returns a message for each missing prerequisite. horovod_wheel.check_cmake looks for CMake.

    Args:
      root: Folder of the clone.
      cache: Folder of built wheels and downloads.
      fresh: True if .venv is still empty. Only then is room on the disk needed.
      horovod: True if Horovod is wanted, whose sources get tools/horovod.patch.
    """
    temporary = pathlib.Path(tempfile.gettempdir())
    needs = [(root, ROOM_FOR_CLONE), (cache, ROOM_FOR_CACHE), (temporary, ROOM_FOR_TEMPORARY)]
    return [
        *check_machine(root),
        *check_programs("make", *(["patch"] if horovod else [])),
        *(check_disk(needs) if fresh else []),
    ]
