"""Keeps the objects of the custom ops for the next clone, each by the content of what it was compiled from.

setup_env.py brings them into build/custom_ops before the compiler runs. setup.py then checks their commands and times,
as it does after every build, compiles the others, and links the libraries. The compiled headers stay out: they are
large, and only a changed source needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from tools import object_cache
from tools.horovod_wheel import cache_folder
from tools.object_cache import HERE

SOURCES = "custom_ops"
BUILT = pathlib.Path("build/custom_ops")
HEADERS = pathlib.Path("custom_ops/common/tensorflow.h")  # which sources include without naming them in their lists


def key(settings: str, compilers: Sequence[str]) -> str:
    """Returns a digest of what all objects depend on.

    Args:
      settings: Digest of requirements and options.
      compilers: Programs that may compile. A program that is missing has no version.
    """
    total = hashlib.sha256(f"{settings}\0{platform.machine()}\0".encode())
    for compiler in filter(shutil.which, compilers):
        answer = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
        total.update(f"{compiler}\0{answer.stdout}\0".encode())
    return total.hexdigest()


def restore(root: pathlib.Path, key: str) -> list[pathlib.Path]:
    """Brings objects into the clone `root`. Returns their sources."""
    sources = sorted(path for path in (root / SOURCES).rglob("*") if path.suffix in (".cc", ".cu"))
    restored = []
    with contextlib.suppress(OSError):  # The compiler makes the rest.
        for source in [root / HEADERS, *sources]:
            stem = source.relative_to(root / SOURCES).with_suffix("")
            kept = _find(root, _entry(key, stem))
            if kept is not None:
                _copy(kept, root / BUILT / stem, (".d", ".o", ".command"), HERE, str(root))
                restored.append(source)
    return [source for source in restored if source.suffix != ".h"]


def keep(root: pathlib.Path, key: str) -> None:
    """Keeps the objects of the clone `root`. A cache that cannot be written to is named, and nothing fails."""
    try:
        for depfile in (root / BUILT).rglob("*.d"):
            built = depfile.with_suffix("")
            entry = _entry(key, built.relative_to(root / BUILT))
            kept = _find(root, entry)
            if kept is None or _command(kept) != _command(built).replace(str(root), HERE):
                content = _content(root, depfile.read_text(encoding="utf-8"))
                # The list comes last: without it the others do not count.
                _copy(built, entry / content, (".o", ".command", ".d"), str(root), HERE)
        object_cache.remove_oldest(cache_folder() / "objects")
    except OSError as error:
        print(f"      the objects are not kept in {cache_folder()} ({error.strerror}); the next clone compiles them")


def _entry(key: str, stem: pathlib.Path) -> pathlib.Path:
    return cache_folder() / "objects" / hashlib.sha256(f"{key}\0{stem}".encode()).hexdigest()[:32]


def _find(root: pathlib.Path, entry: pathlib.Path) -> pathlib.Path | None:
    """Returns the object of the present sources, without its suffix."""
    for depfile in sorted(entry.glob("*.d"), key=os.path.getmtime, reverse=True):
        with contextlib.suppress(FileNotFoundError):  # a header that this state lacks
            if _content(root, depfile.read_text(encoding="utf-8")) == depfile.stem:
                for path in entry.glob(f"{depfile.stem}.*"):
                    path.touch()
                return depfile.with_suffix("")
    return None


def _command(built: pathlib.Path) -> str:
    path = built.with_name(f"{built.name}.command")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _content(root: pathlib.Path, depfile: str) -> str:
    """Returns a digest of the clone's files in `object: source header ...`, as setup.py has the compiler list them."""
    listed = shlex.split(depfile.replace("\\\n", " ").partition(":")[2])
    # A list leaves out the compiled headers. The settings name the version of TensorFlow's.
    own = [name for name in listed if name.startswith(f"{SOURCES}/")]
    return object_cache.content(root, [str(HEADERS), *own])


def _copy(source: pathlib.Path, target: pathlib.Path, suffixes: Sequence[str], before: str, after: str) -> None:
    """Copies an object and its texts, and replaces the path `before` in the texts. Copies have the time of now."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for suffix in suffixes:
        path, copy = (stem.with_name(stem.name + suffix) for stem in (source, target))
        unfinished = copy.with_name(f"{copy.name}.{os.getpid()}.tmp")
        try:
            if suffix == ".o":
                shutil.copyfile(path, unfinished)
            else:
                unfinished.write_text(path.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
            os.replace(unfinished, copy)
        except FileNotFoundError:  # The compiled headers have a list alone.
            continue
        finally:
            unfinished.unlink(missing_ok=True)
