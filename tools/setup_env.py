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
from collections.abc import Iterator, Sequence

from tools import gloo_sources, horovod_wheel, object_cache, prerequisites
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
# The steps after .venv itself: all, and those that training on one process and on several needs.
EVERYTHING = ("runtime", "development", "horovod", "package")
ONE_PROCESS, SEVERAL = ("runtime", "package"), ("runtime", "horovod", "package")

# While this file exists, an installation into .venv runs or was interrupted. pip takes a half-copied package for an
# installed one, so the next set-up creates .venv anew.
INSTALLING = STAMPS / "installing"


def venv_version() -> str | None:
    """Returns the Python version of .venv, for example "3.11.7", or None if it is missing, broken or copied."""
    pip, config = VENV / "bin/pip", VENV / "pyvenv.cfg"
    if INSTALLING.exists() or not (pip.exists() and config.exists() and PYTHON.exists()):
        return None
    # Scripts name their interpreter by its full path, so the scripts of a moved folder run another one.
    if str(VENV) not in pip.read_text(encoding="utf-8").split("import", 1)[0]:
        return None
    settings = dict(line.split(" = ", 1) for line in config.read_text(encoding="utf-8").splitlines() if " = " in line)
    version = settings.get("version")
    chosen_by_hand = os.environ.get("PYTHON")
    return None if chosen_by_hand and version != running_version() else version


def running_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def compilers() -> list[str]:
    """Returns the programs that compile the custom ops for the CPU and for GPUs."""
    return [os.environ.get(name, default) for name, default in (("CXX", "g++"), ("NVCC", "nvcc"))]


def inputs_of(step: str, version: str) -> str:
    """Returns a digest, or a name, of all that the result of a step depends on."""
    if step == "horovod":
        tensorflow = horovod_wheel.pinned("tensorflow", ROOT / "requirements/runtime.txt")
        return horovod_wheel.cache_key(ROOT, tensorflow)
    texts = [version]
    if step == "package":
        wanted = [os.environ.get(name, "") for name in ("FUSEDREC_CUDA", "FUSEDREC_CUDA_ARCHS")]
        # FUSEDREC_CUDA=auto looks for the CUDA compiler and the GPU's driver, which may have come since.
        found = [shutil.which(name) or "" for name in (compilers()[1], "nvidia-smi")]
        texts = [inputs_of("runtime", version), *compilers(), *wanted, *found]
        texts += [gloo_sources.folder().name, str(len(gloo_sources.sources()))]
        files = [ROOT / name for name in ("setup.py", "pyproject.toml", "tf_fusedrec/__init__.py")]
        files += sorted(path for path in (ROOT / "custom_ops").rglob("*") if path.is_file())
    else:
        files = [ROOT / "requirements" / name for name in REQUIREMENTS[step]]
    total = hashlib.sha256()
    for text in texts:
        total.update(text.encode() + b"\0")
    for path in files:
        total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def is_done(step: str, version: str) -> bool:
    stamp = STAMPS / step
    stamped = stamp.exists() and stamp.read_text(encoding="utf-8") == inputs_of(step, version)
    return stamped and (step != "package" or LIBRARY.exists())


def is_complete(steps: Sequence[str] = EVERYTHING) -> bool:
    version = venv_version()
    return version is not None and all(is_done(step, version) for step in steps)


def make_venv() -> str:
    """Creates .venv unless a usable one exists, and returns its Python version."""
    version = venv_version()
    if version is not None:
        print(f".venv: up to date, Python {version}", flush=True)
    else:
        why = " (the existing one is unfinished, moved or for another Python)" if VENV.exists() else ""
        version = running_version()
        print(f".venv: creating it with Python {version}{why} ...", flush=True)
        shutil.rmtree(VENV, ignore_errors=True)
        # The base interpreter avoids a link into another virtual environment.
        base = getattr(sys, "_base_executable", sys.executable)
        run_logged([base, "-m", "venv", str(VENV)], LOGS / "venv.log", ROOT, dict(os.environ))
    STAMPS.mkdir(exist_ok=True)
    return version


@contextlib.contextmanager
def installing() -> Iterator[None]:
    INSTALLING.touch()
    yield
    INSTALLING.unlink()


def pip_install(arguments: list[str], log: str) -> float:
    """Runs pip inside .venv, and returns its seconds."""
    pip = [str(PYTHON), "-m", "pip", "install", "--no-input", "--no-deps", "--disable-pip-version-check"]
    return run_logged([*pip, *arguments], LOGS / log, ROOT, clean_environment(VENV))


def install(step: str, version: str) -> None:
    """Runs a step unless it is done, and stamps it."""
    name = {"horovod": "Horovod", "package": "this package with its custom ops"}.get(step, f"{step} requirements")
    if is_done(step, version):
        print(f"{name}: up to date", flush=True)
        return
    inputs, env, seconds = inputs_of(step, version), clean_environment(VENV), 0.0
    if step == "horovod":
        print(f"{name}: {inputs}", flush=True)
        built = horovod_wheel.wheel(ROOT, PYTHON, inputs, env)
        with installing():
            horovod_wheel.install(ROOT, PYTHON, built, env)
    elif step == "package":
        print(f"{name}: installing ...", flush=True)
        seconds = pip_install(["--verbose", "--no-build-isolation", "-e", "."], "package.log")
    else:
        print(f"{name}: installing (pip downloads what its cache lacks) ...", flush=True)
        files = [word for name in REQUIREMENTS[step] for word in ("-r", f"requirements/{name}")]
        with installing():
            seconds = pip_install(files, f"{step}.log")
        # The pins name every package, so pip resolved nothing. `pip check` tests that they are compatible.
        run_logged([str(PYTHON), "-m", "pip", "check"], LOGS / "check.log", ROOT, env)
    (STAMPS / step).write_text(inputs, encoding="utf-8")
    if seconds:
        print(f"      done in {seconds:.0f} s", flush=True)


@contextlib.contextmanager
def compile_beside(version: str) -> Iterator[None]:
    """Compiles the custom ops while the body runs, except what a clone of this machine has compiled."""
    if is_done("package", version):
        yield
        return
    print("custom ops: compiling what no clone here has compiled, beside the next steps ...", flush=True)
    command = [str(PYTHON), "setup.py", "build_ext", "--inplace"]
    with run_beside(command, LOGS / "ops.log", ROOT, clean_environment(VENV)):
        yield


def set_up(steps: Sequence[str]) -> None:
    """Runs the steps that are not done."""
    version = make_venv()
    install("runtime", version)
    if "horovod" in steps:
        try:
            gloo_sources.fetch(PYTHON, clean_environment(VENV))
        except StepFailed as error:
            print(f"without the exchange over Gloo, because its sources cannot be had: {error}", flush=True)
    with compile_beside(version):
        for step in steps[1:-1]:
            install(step, version)
    install("package", version)


def main() -> int:
    parser = argparse.ArgumentParser(description="Sets up .venv.")
    parser.add_argument("--train", metavar="N", help="only what training on N processes needs")
    given = parser.parse_args().train
    if given is not None and not (given.isdecimal() and int(given) > 0):
        print(f"error: NP must be a number of processes >= 1, got {given!r}.", file=sys.stderr)
        return 2
    steps = EVERYTHING if given is None else ONE_PROCESS if int(given) == 1 else SEVERAL
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        with object_cache.locked(LOGS / "lock", "another set-up of this clone runs; waiting ..."):
            if shutil.which(compilers()[0]) and is_complete(steps):
                print("set-up: .venv is up to date", flush=True)
                return 0
            fresh, cache = venv_version() is None, object_cache.cache_folder()
            if lacking := prerequisites.missing(ROOT, cache, fresh=fresh, horovod="horovod" in steps):
                print("\n".join(lacking), file=sys.stderr)
                return 1
            set_up(steps)
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues where this one stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
