"""What the machine must have before the set-up starts; each thing that lacks is named with its remedy.

Called by setup_env.py before it changes anything, with the interpreter that find_python.sh chose.
Alone: `python3 -m tools.prerequisites`.
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
# Measured: .venv 2.8 GiB and build/ below 0.2; pip's cache 1; pip and Horovod's build in the
# temporary folder 2.
ROOM_FOR_CLONE, ROOM_FOR_CACHE, ROOM_FOR_TEMPORARY = 3.5 * GIB, 1.0 * GIB, 2.0 * GIB

CXX17_PROGRAM = """
#include <optional>
#include <string_view>
int main() {
  if (std::optional<std::string_view> name = "C++17"; name) return name->empty();
}
"""


def check_machine(system: str, machine: str) -> list[str]:
    """TensorFlow and TFRA have wheels for these machines only."""
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        return []
    return [
        f"missing: Linux on x86-64 or aarch64; this is {system} on {machine}.\n"
        "  Remedy: use such a machine, a virtual one or a container; there are no TensorFlow "
        "Recommenders Addons for others."
    ]


def check_path(root: pathlib.Path) -> list[str]:
    """Horovod's cmake files do not quote the path of TensorFlow, which lies in the clone's .venv."""
    if not any(character.isspace() for character in str(root)):
        return []
    return [
        f"missing: a path without blanks; this clone lies in {str(root)!r}.\n"
        "  Remedy: move the clone; Horovod cannot be built there."
    ]


def check_venv_module() -> list[str]:
    """Debian packs `venv` and `ensurepip` apart from Python."""
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
    """A C++17 compiler with its standard library, shown by compiling a program of a few lines."""
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
    said = (done.stdout.strip().splitlines() or ["nothing"])[0]
    return [f"missing: C++17; {compiler} does not compile a small program (it says: {said}).\n{remedy}"]


def check_make() -> list[str]:
    """Horovod's own build runs make."""
    if shutil.which("make") is not None:
        return []
    return ["missing: make is not on PATH.\n  Remedy: Debian, Ubuntu: apt install make"]


def check_disk(needs: list[tuple[pathlib.Path, float]]) -> list[str]:
    """Free space for each (folder, bytes); folders of one file system share it."""
    by_device: dict[int, list[tuple[pathlib.Path, float]]] = {}
    for folder, wanted in needs:
        while not folder.exists():
            folder = folder.parent
        by_device.setdefault(folder.stat().st_dev, []).append((folder, wanted))
    messages = []
    for places in by_device.values():
        wanted = sum(wanted for _, wanted in places)
        free = shutil.disk_usage(places[0][0]).free
        if free < wanted:
            folders = " and ".join(dict.fromkeys(str(folder) for folder, _ in places))
            messages.append(
                f"missing: disk space; {folders}: {free / GIB:.1f} GiB free, "
                f"{wanted / GIB:.1f} GiB needed.\n  Remedy: make room, clone onto a larger disk, "
                "or point XDG_CACHE_HOME and TMPDIR to one."
            )
    return messages


def missing(root: pathlib.Path, cache: pathlib.Path, *, fresh: bool) -> list[str]:
    """Messages, one for each prerequisite that lacks.

    Args:
      root: the clone.
      cache: folder in which built wheels and downloads are kept.
      fresh: whether .venv is still to be filled, which is what needs room on the disk.
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
        *check_make(),
        *(check_disk(needs) if fresh else []),
    ]


def main() -> int:
    root = pathlib.Path(__file__).resolve().parents[1]
    messages = missing(root, pathlib.Path.home(), fresh=not (root / ".venv").exists())
    print("\n".join(messages) or "nothing is missing")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
