"""Compiles custom_ops/**/*.cc into tf_fusedrec/ops/_fusedrec_ops.so; the metadata are in pyproject.toml.

The library is bound to the TensorFlow of the building environment: its flags come from
tf.sysconfig, and its version is written to tf_fusedrec/ops/_build_info.py, from which the loader
explains a mismatch. Objects are kept in build/custom_ops and compiled again only when their
source, a header that they include, or the compiler's command has changed.
"""

from __future__ import annotations

import concurrent.futures
import filecmp
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
SOURCES = "custom_ops"
OBJECTS = pathlib.Path("build/custom_ops")  # relative to ROOT, as are all paths given to g++
LIBRARY = pathlib.Path("tf_fusedrec/ops/_fusedrec_ops.so")
BUILD_INFO = pathlib.Path("tf_fusedrec/ops/_build_info.py")

# No -march: the library must run on every machine of the architecture (common/simd.h has what is compiled for several).
# Products and sums are rounded apart, so that all of these give the same bits.
COMPILE_FLAGS = [
    "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"
]  # fmt: skip

# A process of its own, because TensorFlow prints at import and would stay loaded in this one.
DESCRIBE_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps([tf.version.VERSION, tf.sysconfig.get_compile_flags(),
                  tf.sysconfig.get_link_flags()]))
"""


def describe_tensorflow() -> tuple[str, list[str], list[str]]:
    """Version, compile flags and link flags of the TensorFlow in this environment."""
    answer = subprocess.run(
        [sys.executable, "-c", DESCRIBE_TENSORFLOW],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(
            "error: the custom ops of tf_fusedrec are compiled against TensorFlow, but "
            f"{sys.executable} cannot import it ({reason}). Remedy: run `make setup` in the "
            "clone, or `pip install -r requirements/runtime.txt -r requirements/build.txt --no-deps` first."
        )
    version, compile_flags, link_flags = json.loads(answer.stdout.splitlines()[-1])
    # As system headers, TensorFlow's own warnings stay out of the output.
    compile_flags = ["-isystem" + flag[len("-I") :] if flag.startswith("-I") else flag for flag in compile_flags]
    return version, compile_flags, link_flags


def is_current(output: pathlib.Path, command: str, inputs: list[pathlib.Path]) -> bool:
    """Whether `output` was made by `command` and is younger than its inputs."""
    record = output.with_suffix(".command")
    if not output.exists() or not record.exists() or record.read_text() != command:
        return False
    made = output.stat().st_mtime
    return all(path.exists() and path.stat().st_mtime < made for path in inputs)


def dependencies(depfile: pathlib.Path) -> list[pathlib.Path]:
    """The source and headers of an object, as g++ -MMD listed them (`object: source header ...`)."""
    if not depfile.exists():
        return []
    words = shlex.split(depfile.read_text().replace("\\\n", " "))
    return [ROOT / word for word in words[1:]]


def run_compiler(command: list[str], output: pathlib.Path) -> None:
    """Runs g++ so that `output` appears only when it succeeded."""
    unfinished = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    started = time.time()
    done = subprocess.run([*command, "-o", str(unfinished)], cwd=ROOT)
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise SystemExit(f"error: this command failed: {shlex.join([*command, '-o', str(output)])}")
    # As old as the reading of its inputs: a file edited during the compilation is younger.
    os.utime(unfinished, (started, started))
    os.replace(unfinished, output)
    output.with_suffix(".command").write_text(shlex.join(command))


def compile_object(source: pathlib.Path, flags: list[str]) -> tuple[pathlib.Path, bool]:
    """The object of one source, and whether it had to be compiled. Paths are relative to ROOT."""
    stem = OBJECTS / source.relative_to(SOURCES).with_suffix("")
    output, depfile = ROOT / stem.with_suffix(".o"), stem.with_suffix(".d")
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [*flags, "-MMD", "-MF", str(depfile), "-MT", "object", "-c", str(source)]
    inputs = dependencies(ROOT / depfile)
    if inputs and is_current(output, shlex.join(command), inputs):
        return stem.with_suffix(".o"), False
    sys.stdout.write(f"compiling {source}\n")  # one write: the lines of the workers do not mix
    sys.stdout.flush()
    run_compiler(command, output)
    return stem.with_suffix(".o"), True


def build_library() -> tuple[pathlib.Path, str]:
    """Compiles and links what has changed. Returns the library and the TensorFlow version."""
    version, compile_flags, link_flags = describe_tensorflow()
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"error: the C++ compiler {compiler!r} is not on PATH. Remedy: install g++ "
            "(Debian: apt install g++) or name another one in CXX."
        )
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*.cc"))
    flags = [compiler, *compile_flags, *COMPILE_FLAGS, f"-I{SOURCES}"]
    workers = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        compiled = list(pool.map(lambda source: compile_object(source, flags), sources))
    objects = [str(path) for path, _ in compiled]
    command = [compiler, "-shared", *objects, *link_flags]
    library = ROOT / OBJECTS / LIBRARY.name
    inputs = [ROOT / path for path in objects]
    if any(fresh for _, fresh in compiled) or not is_current(library, shlex.join(command), inputs):
        print(f"linking {LIBRARY.name}", flush=True)
        run_compiler(command, library)
    return library, version


def put(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file in one stroke: a process that has the old library mapped keeps the old one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    shutil.copyfile(source, unfinished)
    os.replace(unfinished, target)


class BuildAfresh(build):
    """Drops the previous build, so that a module deleted since is not packed into the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildCustomOps(build_ext):
    """Builds the one library in place of the Python extension that setuptools expects."""

    def run(self) -> None:
        library, version = build_library()
        info = ROOT / OBJECTS / BUILD_INFO.name
        info.write_text(f'"""Written by setup.py with the library beside it."""\n\nTENSORFLOW_VERSION = "{version}"\n')
        for source, target in ((library, LIBRARY), (info, BUILD_INFO)):
            put(source, (ROOT if self.inplace else pathlib.Path(self.build_lib)) / target)

    def get_outputs(self) -> list[str]:
        return [str(pathlib.Path(self.build_lib) / path) for path in (LIBRARY, BUILD_INFO)]

    def get_output_mapping(self) -> dict[str, str]:
        """Built file -> its place in the source tree, for an editable installation."""
        if not self.inplace:
            return {}
        return dict(zip(self.get_outputs(), (str(LIBRARY), str(BUILD_INFO))))


# The extension is named so that setuptools knows the wheel to be bound to a platform.
setup(
    ext_modules=[Extension("tf_fusedrec.ops._fusedrec_ops", sources=[])],
    cmdclass={"build": BuildAfresh, "build_ext": BuildCustomOps},
)
