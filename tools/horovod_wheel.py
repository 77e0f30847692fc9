"""Builds Horovod's wheel from its source release once per machine, and keeps it for the next clone.

    python -m tools.horovod_wheel      # installs Horovod for the TensorFlow of the running environment

setup_env.py calls it after installing TensorFlow, because Horovod is compiled against TensorFlow. The sources get
horovod.patch, whose head has the reasons. The wheel lies in <cache>/<key>/, where the key names everything that the
binary depends on. Two clones may build at once: one waits for the other's lock, and a finished wheel appears by a
rename.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

from tools import prerequisites
from tools.object_cache import cache_folder, locked
from tools.steps import StepFailed, clean_environment, run_logged

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATCH = ROOT / "tools/horovod.patch"
APPLY = ("patch", "-p1", "--fuzz=0", "--input")
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"  # of the source release

# Gloo needs no further installation, unlike MPI.
BUILD_OPTIONS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
# Options of `wheel tags` for libraries without a symbol of Python, which TensorFlow loads.
TAGS = ("--python-tag", "py3", "--abi-tag", "none")
JOB_MEMORY = 1.5 * 2**30  # Largest memory in bytes of one compilation of Horovod against TensorFlow.


def pinned(name: str, requirements: pathlib.Path) -> str:
    """Returns the version of `name` in a requirements file (`name==version`)."""
    found = re.search(rf"^{re.escape(name)}==(\S+)", requirements.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise StepFailed(f"error: {requirements} must pin {name} as {name}==<version>.")
    return found.group(1)


def cache_key(root: pathlib.Path, tensorflow: str) -> str:
    """Returns everything that the binary depends on, as a folder's name.

    Args:
      root: Folder of the clone, whose requirements pin Horovod.
      tensorflow: TensorFlow version of the environment, for example "2.16.2".
    """
    horovod = pinned("horovod", root / "requirements/horovod.txt")
    horovod += "-" + hashlib.sha256(PATCH.read_bytes()).hexdigest()[:8]
    compiler = os.environ.get("CXX", "g++")
    answer = subprocess.run([compiler, "-dumpversion"], stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    major = answer.stdout.strip().split(".")[0]
    return f"horovod-{horovod}-tensorflow-{tensorflow}-{pathlib.Path(compiler).name}{major}-{platform.machine()}"


def check_cmake(env: dict[str, str]) -> None:
    """Checks for cmake, which .venv gets from requirements/build.txt, so that no system package is needed."""
    found = shutil.which("cmake", path=env["PATH"])
    answer = ""
    if found is not None:
        command = [found, "--version"]
        answer = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", errors="replace").stdout
    version = re.search(r"cmake version (\d+)\.(\d+)", answer)
    if version is None or not (3, 13) <= (int(version[1]), int(version[2])) < (4, 0):
        raise StepFailed(
            "missing: cmake >= 3.13, < 4, which builds Horovod; "
            + (f"{found} reports {answer.splitlines()[:1]}." if found else "none is on PATH or in .venv.")
            + "\n  Remedy: remove .venv and run the command again (its cmake comes from "
            "requirements/build.txt), or Debian: apt install cmake"
        )


def unpack(root: pathlib.Path, python: pathlib.Path, folder: str, env: dict[str, str]) -> pathlib.Path:
    """Downloads Horovod's source release into an empty folder, and patches it. Returns the folder of the sources."""
    logs = root / "build/setup"
    logs.mkdir(parents=True, exist_ok=True)
    download = ["-m", "pip", "download", "--no-build-isolation", "--no-deps", "--no-binary", "horovod"]
    words = [str(python), *download, "--dest", folder, "-r", "requirements/horovod.txt"]
    run_logged(words, logs / "horovod_download.log", root, env)
    (archive,) = pathlib.Path(folder).glob("horovod-*.tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise StepFailed(f"error: {archive.name} must have SHA-256 {SHA256}, got {digest}. Remedy: pip cache purge")
    subprocess.run(["tar", "-xzf", archive.name], cwd=folder, check=True)
    archive.unlink()
    (sources,) = pathlib.Path(folder).glob("horovod-*")
    run_logged([*APPLY, str(PATCH)], logs / "horovod_patch.log", sources, env)
    return sources


def build(root: pathlib.Path, python: pathlib.Path, output: pathlib.Path, env: dict[str, str]) -> float:
    """Downloads Horovod's source release, patches it, and builds its wheel into `output`. Returns the seconds."""
    logs, pip = root / "build/setup", [str(python), "-m", "pip"]
    # Not in the cache, because Gloo's build takes its path for a regular expression, and g++ is none.
    with tempfile.TemporaryDirectory() as temporary:
        sources = unpack(root, python, temporary, env)
        # pip's cache would key the wheel by its source, not by the TensorFlow that it is built for.
        options = ["wheel", "--verbose", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir"]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        jobs = max(1, min(len(os.sched_getaffinity(0)), int(memory / JOB_MEMORY)))
        build_env = {**env, **BUILD_OPTIONS, "MAKEFLAGS": f"-j{jobs}"}
        command = [*pip, *options, str(output), str(sources)]
        seconds = run_logged(command, logs / "horovod.log", root, build_env, r"\[ *\d+%\].*")
    (built,) = output.glob("horovod-*.whl")
    retag = ["-m", "wheel", "tags", "--remove", *TAGS, str(built)]
    return seconds + run_logged([str(python), *retag], logs / "horovod_tags.log", root, env)


def wheel(root: pathlib.Path, python: pathlib.Path, key: str, env: dict[str, str]) -> pathlib.Path:
    """Returns the wheel of `key` from the cache, or builds it (two minutes on two cores).

    Args:
      root: Folder of the clone.
      python: Interpreter of the virtual environment with TensorFlow.
      key: Result of cache_key.
      env: Result of steps.clean_environment.
    """
    cache = cache_folder()
    folder, lock = cache / key, cache / f"{key}.lock"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise StepFailed(
            f"error: the built Horovod cannot be kept in {cache} ({error.strerror}).\n"
            "  Remedy: set XDG_CACHE_HOME to a folder that you may write to."
        ) from error
    with locked(lock, "another set-up is building this wheel; waiting for it ..."):
        if kept := sorted(folder.glob("horovod-*.whl")):
            print(f"      from the cache: {kept[0]}", flush=True)
            return kept[0]
        check_cmake(env)
        print("      building from source, about 2 minutes on 2 cores ...", flush=True)
        for abandoned in cache.glob(f"unfinished-{key}-*"):  # A killed set-up leaves such folders.
            shutil.rmtree(abandoned, ignore_errors=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(prefix=f"unfinished-{key}-", dir=cache))
        try:
            seconds = build(root, python, unfinished, env)
            os.replace(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    print(f"      built in {seconds:.0f} s, kept in {folder}", flush=True)
    return next(folder.glob("horovod-*.whl"))


def install(root: pathlib.Path, python: pathlib.Path, built: pathlib.Path, env: dict[str, str]) -> None:
    """Installs the wheel `built` for `python`, and checks that it loads. Other arguments are those of `wheel`."""
    logs = root / "build/setup"
    pip = [str(python), "-m", "pip", "install", "--no-input", "--no-deps", "--disable-pip-version-check"]
    run_logged([*pip, "--force-reinstall", str(built)], logs / "horovod_install.log", root, env)
    try:
        run_logged([str(python), "-c", "import horovod.tensorflow"], logs / "horovod_check.log", root, env)
    except StepFailed as error:
        raise StepFailed(
            f"{error}\n  Horovod was built but does not load. Remedy: remove {built.parent} and run the command again."
        ) from error


def main() -> None:
    try:
        tensorflow = importlib.metadata.version("tensorflow")
        if lacking := [*prerequisites.check_programs("make", "patch")]:
            raise StepFailed("\n".join(lacking))
        key = cache_key(ROOT, tensorflow)
        print(f"Horovod: {key}", flush=True)
        python, env = pathlib.Path(sys.executable), clean_environment(pathlib.Path(sys.prefix))
        install(ROOT, python, wheel(ROOT, python, key, env), env)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(
            f"error: Horovod is compiled against TensorFlow, but {sys.executable} has none. "
            "Remedy: pip install 'tensorflow>=2.16.2,<2.23' first."
        )
    except StepFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
