"""The sources of Gloo for the library of the exchange, from Horovod's source release, patched and kept in the cache.

    python -m tools.gloo_sources      # downloads them, unless the cache has them

setup.py compiles them into tf_fusedrec/ops/_fusedrec_gloo.so. Where they are missing, or with FUSEDREC_GLOO=0, it
builds everything else.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import sys
import tempfile

from tools.object_cache import cache_folder

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATCHES = (ROOT / "tools/horovod.patch", ROOT / "tools/gloo.patch")
PARTS = ("common/*", "transport/*", "transport/tcp/*")  # folders of the transport over TCP


def folder() -> pathlib.Path:
    """Returns the folder that holds gloo/ in the cache, or will hold it."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in PATCHES)).hexdigest()
    return cache_folder() / f"gloo-{digest[:8]}"


def sources() -> list[pathlib.Path]:
    """Returns the sources to compile; none where the cache has not got them, or with FUSEDREC_GLOO=0."""
    if os.environ.get("FUSEDREC_GLOO") == "0":
        return []
    found = (path for part in PARTS for path in (folder() / "gloo").glob(f"{part}.cc"))
    return sorted(path for path in found if path.name != "win.cc")


def fetch(python: pathlib.Path, env: dict[str, str]) -> None:
    """Downloads the sources with an interpreter that has pip and the packages of requirements/build.txt."""
    from tools import horovod_wheel
    from tools.steps import run_logged

    if sources():
        return
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as temporary:
        gloo = horovod_wheel.unpack(ROOT, python, temporary, env) / "third_party/gloo"
        run_logged([*horovod_wheel.APPLY, str(PATCHES[1])], ROOT / "build/setup/gloo_patch.log", gloo, env)
        for path in [path for part in PARTS for path in (gloo / "gloo").glob(f"{part}.*")]:
            kept = pathlib.Path(temporary, "kept", path.relative_to(gloo))
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept)
        if not folder().exists():  # another set-up may have been first
            pathlib.Path(temporary, "kept").rename(folder())


if __name__ == "__main__":
    from tools.steps import clean_environment

    fetch(pathlib.Path(sys.executable), clean_environment(pathlib.Path(sys.prefix)))
    print(folder())
