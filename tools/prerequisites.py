"""Checks the machine before the set-up starts, and names each missing prerequisite with its remedy.

setup_env.py calls it before it changes anything, with the interpreter that find_python.sh chose. It also runs alone:
`python3 -m tools.prerequisites`.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

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


def check_machine(system: str, machine: str) -> list[str]:
    """Checks the machine type, because TensorFlow and TFRA have wheels for Linux on x86-64 and aarch64 only."""
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        return []
    return [
        f"missing: Linux on x86-64 or aarch64; this is {system} on {machine}.\n"
        "  Remedy: use such a machine, a virtual one or a container; TensorFlow Recommenders "
        "Addons have no wheels for others."
    ]


def check_path(root: pathlib.Path) -> list[str]:
    """Checks for blanks, because Horovod's cmake files do not quote TensorFlow's path in the clone's .venv."""
    if not any(character.isspace() for character in str(root)):
        return []
    return [
        f"missing: a path without blanks; this clone lies in {str(root)!r}.\n"
        "  Remedy: move the clone; Horovod cannot be built there."
    ]


def check_venv_module() -> list[str]:
    """Checks for `venv` and `ensurepip`, which Debian packages apart from Python."""
    lacking = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if not lacking:
        return []
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [
        f"missing: the module {' and '.join(lacking)} of {sys.executable}.\n"
        f"  Remedy: Debian, Ubuntu: apt install python{version}-venv; else choose a complete "
        "Python with make PYTHON=..."
    ]


def check_compiler(compiler: str) -> list[str]:
    """Checks for a C++17 compiler with its standard library by compiling a small program."""
    remedy = "  Remedy: Debian, Ubuntu: apt install g++ (9 or newer), or name another one in CXX."
    if shutil.which(compiler) is None:
        return [f"missing: a C++ compiler; {compiler} is not on PATH.\n{remedy}"]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "program.cc"
        source.write_text(CXX17_PROGRAM, encoding="utf-8")
        done = subprocess.run(
            [compiler, "-std=c++17", str(source), "-o", str(source.with_suffix(""))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    if done.returncode == 0:
        return []
    reason = (done.stdout.strip().splitlines() or ["no message"])[0]
    return [f"missing: C++17; {compiler} does not compile a small program (its message: {reason}).\n{remedy}"]


def check_programs(*names: str) -> list[str]:
    """Checks for programs that Debian packages under their own name."""
    return [
        f"missing: {name} is not on PATH.\n  Remedy: Debian, Ubuntu: apt install {name}"
        for name in names
        if shutil.which(name) is None
    ]


def check_disk(needs: list[tuple[pathlib.Path, float]]) -> list[str]:
    """Checks free space for each (folder, bytes). Folders of one file system share it."""
    by_device: dict[int, list[tuple[pathlib.Path, float]]] = {}
    for folder, wanted in needs:
        while not folder.exists():
            folder = folder.parent
        by_device.setdefault(folder.stat().st_dev, []).append((folder, wanted))
    messages = []
    for on_device in by_device.values():
        wanted = sum(wanted for _, wanted in on_device)
        free = shutil.disk_usage(on_device[0][0]).free
        if free < wanted:
            folders = " and ".join(dict.fromkeys(str(folder) for folder, _ in on_device))
            messages.append(
                f"missing: disk space; {folders}: {free / GIB:.1f} GiB free, "
                f"{wanted / GIB:.1f} GiB needed.\n  Remedy: make room, clone onto a larger disk, "
                "or point XDG_CACHE_HOME and TMPDIR to one."
            )
    return messages


def missing_for_horovod() -> list[str]:
    """Returns a message for each missing program that builds Horovod; horovod_wheel.check_cmake looks for CMake."""
    return [*check_compiler(os.environ.get("CXX", "g++")), *check_programs("make", "patch")]


def missing(root: pathlib.Path, cache: pathlib.Path, *, fresh: bool, horovod: bool = True) -> list[str]:
    """Returns a message for each missing prerequisite.

    Args:
      root: Folder of the clone.
      cache: Folder of built wheels and downloads.
      fresh: True if .venv is still empty. Only then is room on the disk needed.
      horovod: True if Horovod is wanted, whose sources get tools/horovod.patch.
    """
    needs = [
        (root, ROOM_FOR_CLONE),
        (cache, ROOM_FOR_CACHE),
        (pathlib.Path(tempfile.gettempdir()), ROOM_FOR_TEMPORARY),
    ]
    return [
        *check_machine(platform.system(), platform.machine()),
        *check_path(root),
        *check_venv_module(),
        *check_compiler(os.environ.get("CXX", "g++")),
        *check_programs("make", *(["patch"] if horovod else [])),
        *(check_disk(needs) if fresh else []),
    ]


def main() -> int:
    root = pathlib.Path(__file__).resolve().parents[1]
    messages = missing(root, pathlib.Path.home(), fresh=not (root / ".venv").exists())
    print("\n".join(messages) or "nothing is missing")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
