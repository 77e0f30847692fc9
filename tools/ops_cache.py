"""Keeps the objects of the custom ops for the next clone of the same sources.

They lie in <cache>/ops-<key>/, where the key names everything that the objects depend on. setup_env.py brings them into
build/custom_ops before the compiler runs. setup.py then checks their commands and times, as it does after every build,
and links the libraries. The compiled headers stay out: they are large, and only a changed source needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from tools.horovod_wheel import cache_folder, locked

BUILT = pathlib.Path("build/custom_ops")
KEPT = 4  # builds; the one that was used last stays longest
HERE = "@clone@"  # in place of the clone's path, which stands in commands and in lists of inputs
ABANDONED = "unfinished-ops-"


def key(inputs: str, compilers: Sequence[str]) -> str:
    """Returns the name of a build.

    Args:
      inputs: Digest of sources, requirements and settings.
      compilers: Programs that may compile. A program that is missing has no version.
    """
    total = hashlib.sha256(f"{inputs}\0{platform.machine()}\0".encode())
    for compiler in filter(shutil.which, compilers):
        answer = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
        total.update(f"{compiler}\0{answer.stdout}\0".encode())
    return f"ops-{total.hexdigest()[:16]}"


def restore(root: pathlib.Path, name: str) -> bool:
    """Brings the objects of the build `name` into the clone `root`. Returns whether the cache has it."""
    kept = cache_folder() / name
    try:
        with _alone():
            if not kept.is_dir():
                return False
            _copy(kept, root / BUILT, HERE, str(root))
            kept.touch()
    except OSError:  # What came is used; the compiler makes the rest.
        return False
    return True


def keep(root: pathlib.Path, name: str) -> None:
    """Keeps the objects of the clone `root` as the build `name`, and removes the oldest beyond KEPT.

    A cache that cannot be written to is named, and nothing fails.
    """
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone():
            for abandoned in cache.glob(f"{ABANDONED}*"):  # A killed set-up leaves such folders.
                shutil.rmtree(abandoned, ignore_errors=True)
            if not (cache / name).is_dir():
                _write(root, cache, name)
            for old in sorted(cache.glob("ops-*/"), key=os.path.getmtime)[:-KEPT]:
                shutil.rmtree(old)
    except OSError as error:
        print(f"      the compiled objects are not kept in {cache} ({error.strerror}); the next clone compiles them")


def _alone() -> contextlib.AbstractContextManager[None]:
    return locked(cache_folder() / "ops.lock", "another set-up copies compiled objects; waiting for it ...")


def _write(root: pathlib.Path, cache: pathlib.Path, name: str) -> None:
    unfinished = pathlib.Path(tempfile.mkdtemp(prefix=ABANDONED, dir=cache))
    try:
        _copy(root / BUILT, unfinished, str(root), HERE)
        os.replace(unfinished, cache / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy(source: pathlib.Path, target: pathlib.Path, before: str, after: str) -> None:
    """Copies objects and their texts, and replaces the path `before` in the texts. Copies have the time of now."""
    # An object counts with its command only, and must not meet the inputs of an older one.
    for suffix in (".d", ".o", ".command"):
        for path in source.rglob(f"*{suffix}"):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            unfinished = copy.with_name(f"{copy.name}.tmp")
            if suffix == ".o":
                shutil.copyfile(path, unfinished)
            else:
                unfinished.write_text(path.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
            os.replace(unfinished, copy)
