"""Sets up .venv as the clone's files demand. `make` runs it first, with the interpreter of find_python.sh.

The steps are: virtual environment, runtime requirements, tools of development, Horovod, and this package with its
custom ops. `--train N` leaves out the tools, and Horovod for one process. The compiler needs TensorFlow alone, so it
runs beside the steps that follow the runtime requirements. Objects that another clone has compiled come from the cache.

Each step leaves a stamp in .venv/.setup with a digest of its inputs, and is skipped while the digest is equal. A second
run therefore takes a moment, and an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tools import horovod_wheel, ops_cache, prerequisites
from tools.steps import StepFailed, clean_environment, run_beside, run_logged

ROOT = pathlib.Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
STAMPS = VENV / ".setup"
LOGS = ROOT / "build/setup"
REQUIREMENTS = {
    "runtime": ["runtime.txt", "build.txt"],
    "development": ["tfra.txt", "serve.txt", "dev.txt", "docs.txt"],
}
LIBRARY = ROOT / "tf_fusedrec/ops/_fusedrec_ops.so"

# While this file exists, an installation into .venv runs or was interrupted. pip takes a half-copied package for an
# installed one, so the next set-up creates .venv anew.
INSTALLING = STAMPS / "installing"


def digest(*parts: str | pathlib.Path) -> str:
    """Returns a digest of texts, and of files with their paths in the clone."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, pathlib.Path):
            total.update(str(part.relative_to(ROOT)).encode() + b"\0" + part.read_bytes())
        else:
            total.update(part.encode())
        total.update(b"\0")
    return total.hexdigest()


def is_stamped(step: str, wanted: str) -> bool:
    stamp = STAMPS / step
    return stamp.exists() and stamp.read_text(encoding="utf-8") == wanted


def stamp(step: str, value: str) -> None:
    (STAMPS / step).write_text(value, encoding="utf-8")


def venv_version() -> str | None:
    """Returns the Python version of .venv, for example "3.11.7", or None if it is missing, broken or copied."""
    pip = VENV / "bin/pip"
    config = VENV / "pyvenv.cfg"
    if INSTALLING.exists() or not (pip.exists() and config.exists() and PYTHON.exists()):
        return None
    # Scripts name their interpreter by its full path, so the scripts of a moved folder run another one.
    if str(VENV) not in pip.read_text(encoding="utf-8").split("import", 1)[0]:
        return None
    settings = dict(line.split(" = ", 1) for line in config.read_text(encoding="utf-8").splitlines() if " = " in line)
    return settings.get("version")


def running_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def requirements_digest(kind: str, version: str) -> str:
    return digest(version, *(ROOT / "requirements" / name for name in REQUIREMENTS[kind]))


def compilers() -> list[str]:
    """Returns the programs that compile the custom ops for the CPU and for GPUs."""
    return [os.environ.get(name, default) for name, default in (("CXX", "g++"), ("NVCC", "nvcc"))]


def package_digest(version: str) -> str:
    sources = sorted(path for path in (ROOT / "custom_ops").rglob("*") if path.is_file())
    metadata = [ROOT / name for name in ("setup.py", "pyproject.toml", "tf_fusedrec/__init__.py")]
    wanted = [os.environ.get(name, "") for name in ("FUSEDREC_CUDA", "FUSEDREC_CUDA_ARCHS")]
    # FUSEDREC_CUDA=auto looks for the CUDA compiler and the GPU's driver, which may have come since.
    found = [shutil.which(name) or "" for name in (compilers()[1], "nvidia-smi")]
    return digest(requirements_digest("runtime", version), *compilers(), *wanted, *found, *metadata, *sources)


def pip_install(arguments: list[str], log: str) -> float:
    """Runs pip inside .venv, marked by INSTALLING, and returns its seconds."""
    INSTALLING.touch()
    seconds = run_logged(
        [str(PYTHON), "-m", "pip", "install", "--no-input", "--no-deps",
         "--disable-pip-version-check", *arguments],
        LOGS / log, cwd=ROOT, env=clean_environment(VENV),
    )  # fmt: skip
    INSTALLING.unlink()
    return seconds


def make_venv() -> str:
    """Creates .venv unless a usable one exists, and returns its Python version."""
    version = venv_version()
    chosen_by_hand = bool(os.environ.get("PYTHON"))
    if version is not None and not (chosen_by_hand and version != running_version()):
        print(f".venv: up to date, Python {version}", flush=True)
    else:
        why = " (the existing one is unfinished, moved or for another Python)" if VENV.exists() else ""
        version = running_version()
        print(f".venv: creating it with Python {version}{why} ...", flush=True)
        if VENV.exists():
            shutil.rmtree(VENV)
        # The base interpreter avoids a link into another virtual environment.
        base = getattr(sys, "_base_executable", sys.executable)
        run_logged([base, "-m", "venv", str(VENV)], LOGS / "venv.log", ROOT, dict(os.environ))
    STAMPS.mkdir(exist_ok=True)
    return version


def install_requirements(kind: str, version: str) -> None:
    """Installs the pinned requirements of one kind."""
    wanted = requirements_digest(kind, version)
    if is_stamped(kind, wanted):
        print(f"{kind} requirements: up to date", flush=True)
        return
    print(f"{kind} requirements: installing (pip downloads what its cache lacks) ...", flush=True)
    files = [word for name in REQUIREMENTS[kind] for word in ("-r", f"requirements/{name}")]
    seconds = pip_install(files, f"{kind}.log")
    # The pins name every package, so pip resolved nothing. `pip check` tests that they are compatible.
    run_logged([str(PYTHON), "-m", "pip", "check"], LOGS / "check.log", ROOT, clean_environment(VENV))
    stamp(kind, wanted)
    print(f"      done in {seconds:.0f} s", flush=True)


def horovod_key(version: str) -> str:
    return horovod_wheel.cache_key(ROOT, version, horovod_wheel.pinned("tensorflow", ROOT / "requirements/runtime.txt"))


def install_horovod(version: str) -> None:
    """Installs Horovod from its built wheel."""
    key = horovod_key(version)
    if is_stamped("horovod", key):
        print("Horovod: up to date", flush=True)
        return
    print(f"Horovod: {key}", flush=True)
    env = clean_environment(VENV)
    found = horovod_wheel.wheel(ROOT, PYTHON, key, env)
    INSTALLING.touch()
    horovod_wheel.install(ROOT, PYTHON, found, env)
    INSTALLING.unlink()
    stamp("horovod", key)


@contextlib.contextmanager
def compile_beside(version: str) -> Iterator[None]:
    """Compiles the changed sources of the custom ops while the body runs, unless another clone has compiled them."""
    wanted = package_digest(version)
    if is_stamped("package", wanted) and LIBRARY.exists():
        yield
        return
    build = ops_cache.key(wanted, compilers())
    if ops_cache.restore(ROOT, build):
        print(f"custom ops: objects from the cache ({build}), linking beside the next steps ...", flush=True)
    else:
        print("custom ops: compiling changed sources, beside the next steps ...", flush=True)
    command = [str(PYTHON), "setup.py", "build_ext", "--inplace"]
    with run_beside(command, LOGS / "ops.log", ROOT, clean_environment(VENV)):
        yield
    if package_digest(version) == wanted:  # no source was edited meanwhile
        ops_cache.keep(ROOT, build)


def install_package(version: str) -> None:
    """Installs this package in editable form, with the custom ops that compile_beside has compiled."""
    wanted = package_digest(version)
    if is_stamped("package", wanted) and LIBRARY.exists():
        print("this package with its custom ops: up to date", flush=True)
        return
    print("this package: installing with its custom ops ...", flush=True)
    seconds = run_logged(
        [str(PYTHON), "-m", "pip", "install", "--verbose", "--no-input", "--no-deps",
         "--disable-pip-version-check", "--no-build-isolation", "-e", "."],
        LOGS / "package.log", cwd=ROOT, env=clean_environment(VENV),
    )  # fmt: skip
    stamp("package", wanted)
    print(f"      done in {seconds:.0f} s", flush=True)


class Wanted(NamedTuple):
    """The parts that the set-up installs besides the package and its runtime requirements."""

    development: bool  # TFRA, and the tools that test the code and build the documentation
    horovod: bool


EVERYTHING = Wanted(development=True, horovod=True)


def for_training(processes: int) -> Wanted:
    return Wanted(development=False, horovod=processes > 1)


def is_complete(wanted: Wanted = EVERYTHING) -> bool:
    version = venv_version()
    return (
        version is not None
        and not (os.environ.get("PYTHON") and version != running_version())
        and is_stamped("runtime", requirements_digest("runtime", version))
        and (not wanted.development or is_stamped("development", requirements_digest("development", version)))
        and (not wanted.horovod or is_stamped("horovod", horovod_key(version)))
        and is_stamped("package", package_digest(version))
        and LIBRARY.exists()
    )


def set_up(wanted: Wanted) -> None:
    """Runs the steps that are not done."""
    version = make_venv()
    install_requirements("runtime", version)
    with compile_beside(version):
        if wanted.development:
            install_requirements("development", version)
        if wanted.horovod:
            install_horovod(version)
    install_package(version)


def main() -> int:
    parser = argparse.ArgumentParser(description="Sets up .venv.")
    parser.add_argument("--train", metavar="N", help="only what training on N processes needs")
    given = parser.parse_args().train
    if given is not None and not (given.isdecimal() and int(given) > 0):
        print(f"error: NP must be a number of processes >= 1, got {given!r}.", file=sys.stderr)
        return 2
    processes = None if given is None else int(given)
    wanted = EVERYTHING if processes is None else for_training(processes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        with horovod_wheel.locked(LOGS / "lock", "another set-up of this clone runs; waiting ..."):
            if shutil.which(os.environ.get("CXX", "g++")) and is_complete(wanted):
                print("set-up: .venv is up to date", flush=True)
                return 0
            fresh = venv_version() is None
            cache = horovod_wheel.cache_folder()
            lacking = prerequisites.missing(ROOT, cache, fresh=fresh, horovod=wanted.horovod)
            if lacking:
                print("\n".join(lacking), file=sys.stderr)
                return 1
            set_up(wanted)
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues where this one stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
