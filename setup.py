"""Compiles custom_ops into tf_fusedrec/ops/_fusedrec_ops.so; most metadata are in pyproject.toml.

With nvcc, the device code (*.cu) becomes libfusedrec_cuda.so beside it, and the ops get their GPU form: the *.cc files
below folders named `cuda`. Two libraries, because TensorFlow's own libraries carry symbols of another CUDA runtime. The
library with the device code does not link to TensorFlow, and it contains and hides its CUDA runtime. FUSEDREC_CUDA is
`auto` (the default: where nvcc and a GPU are), `0` or `1`. FUSEDREC_CUDA_ARCHS names the GPUs to compile for, `80 90`.

The library is bound to the TensorFlow of the building environment. Its flags come from tf.sysconfig. The build writes
the versions of TensorFlow and of this package to tf_fusedrec/ops/_build_info.py, so that the loader can explain a
mismatch. A wheel has both in its version, as 0.1.0+tf2.21.0, and requires that TensorFlow; a source distribution allows
all releases. tools/wheel.py makes a wheel of its own of the libraries with GPU kernels. The build keeps objects in
build/custom_ops and compiles them again only when their source, an included header, or the command has changed.
"""

from __future__ import annotations

import concurrent.futures
import filecmp
import importlib.metadata
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
SOURCES = "custom_ops"
OBJECTS = pathlib.Path("build/custom_ops")  # relative to ROOT, as are all paths given to g++
HEADERS = pathlib.Path("custom_ops/common/tensorflow.h")
LIBRARY = pathlib.Path("tf_fusedrec/ops/_fusedrec_ops.so")
BUILD_INFO = pathlib.Path("tf_fusedrec/ops/_build_info.py")
CUDA_LIBRARY = pathlib.Path("tf_fusedrec/ops/libfusedrec_cuda.so")

# No -march: the library must run on every machine of the architecture. common/simd.h compiles some functions for
# several instruction sets. Products and sums are rounded apart, so that all of them give the same bits.
COMPILE_FLAGS = [
    "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"
]  # fmt: skip

# -fmad=false: as above.
CUDA_FLAGS = [
    "-std=c++17", "-O3", "-fmad=false", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"
]  # fmt: skip
CUDA_ARCHS = "80 90"  # compute capabilities of A100 and of H100/H200
# The CUDA runtime inside, and none of its names outside.
CUDA_LINK_FLAGS = [
    "-shared", "-cudart", "static", "-Xlinker",
    f"--exclude-libs=ALL,-z,defs,--version-script={SOURCES}/common/cuda_api.map,-soname={CUDA_LIBRARY.name}",
]  # fmt: skip

# Beside TensorFlow and tf-keras, whose numbers must be equal.
ALLOWED_TENSORFLOW, ALLOWED_KERAS = ">=2.16.2,<2.22", ">=2.16,<2.22"
REQUIREMENTS = [
    "absl-py",
    "numpy",
    "pillow",
    "pyarrow<26",  # 26 refuses the NumPy 1 that TensorFlow 2.16 and 2.17 need
    "pyyaml",
    "tensorboard",  # of tf.summary; TensorFlow 2.21 does not bring it
    "xxhash",
]

# A process of its own, because TensorFlow prints at import and would stay loaded in this one.
DESCRIBE_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps([tf.version.VERSION, tf.sysconfig.get_compile_flags(),
                  tf.sysconfig.get_link_flags()]))
"""


def describe_tensorflow() -> tuple[str, list[str], list[str]]:
    """Returns version, compile flags and link flags of the TensorFlow in this environment."""
    answer = subprocess.run(
        [sys.executable, "-c", DESCRIBE_TENSORFLOW],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
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


def has_gpu() -> bool:
    """Returns whether NVIDIA's driver lists a GPU here."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, encoding="utf-8", errors="replace").stdout
    return listed.startswith("GPU ")


def find_nvcc() -> str | None:
    """Returns the CUDA compiler to build with, or None to build without."""
    wanted = os.environ.get("FUSEDREC_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"error: FUSEDREC_CUDA must be auto, 0 or 1, got {wanted!r}.")
    nvcc = os.environ.get("NVCC", "nvcc")
    if wanted == "0" or (wanted == "auto" and not has_gpu()):
        return None
    if shutil.which(nvcc) is not None:
        return nvcc
    if wanted == "1":
        raise SystemExit(
            f"error: FUSEDREC_CUDA=1, but the CUDA compiler {nvcc!r} is not on PATH. Remedy: install the CUDA toolkit "
            "(12.3 or later), name its compiler in NVCC, or build without GPU kernels: FUSEDREC_CUDA=0."
        )
    return None


def cuda_architectures() -> list[str]:
    """Returns nvcc's flags: machine code for each GPU wanted, and PTX from which the driver compiles for later GPUs."""
    wanted = os.environ.get("FUSEDREC_CUDA_ARCHS", CUDA_ARCHS)
    numbers = wanted.split()
    if not numbers or not all(re.fullmatch(r"[1-9]\d+", number) for number in numbers):
        raise SystemExit(
            f"error: FUSEDREC_CUDA_ARCHS must be compute capabilities without their dot, such as {CUDA_ARCHS!r}, "
            f"got {wanted!r}."
        )
    newest = max(numbers, key=int)
    codes = [*((number, f"sm_{number}") for number in numbers), (newest, f"compute_{newest}")]
    return [word for number, code in codes for word in ("-gencode", f"arch=compute_{number},code={code}")]


def newest(paths: list[pathlib.Path]) -> float:
    """Returns the time of the last change of files, which is infinite while one of them or all are missing."""
    try:
        return max(path.stat().st_mtime for path in paths)
    except (FileNotFoundError, ValueError):
        return math.inf


def is_current(output: pathlib.Path, command: list[str], changed: float) -> bool:
    """Returns whether `command` made `output` after the last change of its inputs."""
    record = output.with_suffix(".command")
    if not output.exists() or not record.exists() or record.read_text(encoding="utf-8") != shlex.join(command):
        return False
    return changed < output.stat().st_mtime


def dependencies(depfile: pathlib.Path) -> list[pathlib.Path]:
    """Returns source and headers of an object, as the compiler's -MMD listed them (`object: source header ...`)."""
    if not depfile.exists():
        return []
    _, _, listed = depfile.read_text(encoding="utf-8").replace("\\\n", " ").partition(":")
    return [ROOT / word for word in shlex.split(listed)]


def run_compiler(command: list[str], output: pathlib.Path) -> None:
    """Runs a compiler. `output` appears only when the compiler succeeds."""
    unfinished = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    started = time.time()
    done = subprocess.run([*command, "-o", str(unfinished)], cwd=ROOT)
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise SystemExit(f"error: this command failed: {shlex.join([*command, '-o', str(output)])}")
    # The output gets the time at which its inputs were read, so that a file edited meanwhile is younger.
    os.utime(unfinished, (started, started))
    os.replace(unfinished, output)
    output.with_suffix(".command").write_text(shlex.join(command), encoding="utf-8")


class Object(NamedTuple):
    """One source and how it is compiled. Paths are relative to ROOT."""

    source: pathlib.Path
    output: pathlib.Path
    command: list[str]
    changed: float  # time of the last change of an input

    def is_current(self) -> bool:
        return is_current(ROOT / self.output, self.command, self.changed)

    def compile(self) -> None:
        (ROOT / self.output).parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.write(f"compiling {self.source}\n")  # one write: the lines of the workers do not mix
        sys.stdout.flush()
        run_compiler(self.command, ROOT / self.output)


def object_of(source: pathlib.Path, flags: list[str], headers: Object | None = None) -> Object:
    """Returns how to compile one source.

    Args:
      source: Path relative to ROOT.
      flags: The compiler and its flags.
      headers: The compiled HEADERS, for a source that begins with them.
    """
    stem = OBJECTS / source.relative_to(SOURCES).with_suffix("")
    output, depfile = stem.with_suffix(".h.gch" if source == HEADERS else ".o"), stem.with_suffix(".d")
    # -MD lists TensorFlow's headers, too, so that those of another TensorFlow are compiled.
    form = ["-x", "c++-header", "-MD"] if source == HEADERS else ["-MMD"]
    if headers is not None:
        form += ["-include", str(headers.output.with_suffix(""))]  # the compiler looks for this name and .gch
    command = [*flags, *form, "-MF", str(depfile), "-MT", "object", "-c", str(source)]
    changed = newest(dependencies(ROOT / depfile))
    return Object(source, output, command, changed if headers is None else max(changed, headers.changed))


def compile_objects(
    sources: list[pathlib.Path], flags: list[str], behind_headers: Callable[[pathlib.Path], bool] = lambda source: False
) -> tuple[list[str], bool]:
    """Compiles sources if needed. Returns their objects, and whether any was compiled.

    Args:
      sources: Paths relative to ROOT.
      flags: The compiler and its flags.
      behind_headers: Whether a source begins with the compiled HEADERS, which are compiled if such a source is.
    """
    headers = object_of(HEADERS, flags)
    first = [object_of(source, flags) for source in sources if not behind_headers(source)]
    later = [object_of(source, flags, headers) for source in sources if behind_headers(source)]
    stale_first, stale_later = ([one for one in group if not one.is_current()] for group in (first, later))
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        needed = pool.submit(headers.compile) if stale_later and not headers.is_current() else None
        running = [pool.submit(one.compile) for one in stale_first]
        if needed is not None:
            needed.result()
        running += [pool.submit(one.compile) for one in stale_later]
    for compilation in running:
        compilation.result()
    return sorted(str(one.output) for one in (*first, *later)), bool(running)


def link(name: str, command: list[str], objects: list[str], fresh: bool) -> pathlib.Path:
    library = ROOT / OBJECTS / name
    if fresh or not is_current(library, command, newest([ROOT / path for path in objects])):
        print(f"linking {name}", flush=True)
        run_compiler(command, library)
    return library


def build_cuda_library(nvcc: str) -> pathlib.Path:
    """Compiles the changed device code and links it."""
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*.cu"))
    objects, fresh = compile_objects(sources, [nvcc, *CUDA_FLAGS, *cuda_architectures(), f"-I{SOURCES}"])
    return link(CUDA_LIBRARY.name, [nvcc, *CUDA_LINK_FLAGS, *objects], objects, fresh)


def build_library(with_cuda: bool) -> tuple[pathlib.Path, str]:
    """Compiles the changed sources of the ops and links them. Returns the library and the TensorFlow version."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:  # before TensorFlow's import, which takes seconds
        raise SystemExit(
            f"error: the C++ compiler {compiler!r} is not on PATH. Remedy: install g++ "
            "(Debian: apt install g++) or name another one in CXX."
        )
    version, compile_flags, link_flags = describe_tensorflow()
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*.cc"))
    cuda_flags = []
    if with_cuda:
        # The op library finds it beside itself, before TensorFlow's libraries.
        cuda_flags = [f"-L{OBJECTS}", f"-l:{CUDA_LIBRARY.name}", "-Wl,-rpath,$ORIGIN"]
    else:
        sources = [path for path in sources if "cuda" not in path.parts]
    flags = [compiler, *compile_flags, *COMPILE_FLAGS, f"-I{SOURCES}"]
    objects, fresh = compile_objects(sources, flags, lambda source: source.stem.endswith(("_op", "_kernel")))
    command = [compiler, "-shared", *objects, *cuda_flags, *link_flags]
    return link(LIBRARY.name, command, objects, fresh), version


def put(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file atomically. A process that has the old library mapped keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    shutil.copyfile(source, unfinished)
    os.replace(unfinished, target)


class BuildAfresh(build):
    """Removes the previous build, so that the wheel does not contain a module deleted since."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildCustomOps(build_ext):
    """Builds the libraries instead of the Python extension that setuptools expects."""

    def run(self) -> None:
        nvcc = find_nvcc()
        built = {} if nvcc is None else {CUDA_LIBRARY: build_cuda_library(nvcc)}
        built[LIBRARY], version = build_library(with_cuda=nvcc is not None)
        built[BUILD_INFO] = ROOT / OBJECTS / BUILD_INFO.name
        built[BUILD_INFO].write_text(
            '"""Written by setup.py with the library beside it."""\n\n'
            f'TENSORFLOW_VERSION = "{version}"\nVERSION = "{VERSION}"\n',
            encoding="utf-8",
        )
        folder = ROOT if self.inplace else pathlib.Path(self.build_lib)
        for target, source in built.items():
            put(source, folder / target)
        if nvcc is None:  # the wheel would contain the library of an earlier build
            (folder / CUDA_LIBRARY).unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        libraries = [LIBRARY, BUILD_INFO] if find_nvcc() is None else [LIBRARY, BUILD_INFO, CUDA_LIBRARY]
        return [str(pathlib.Path(self.build_lib) / path) for path in libraries]

    def get_output_mapping(self) -> dict[str, str]:
        """Returns built file -> its place in the source tree, for an editable installation."""
        if not self.inplace:
            return {}
        return {path: str(pathlib.Path(path).relative_to(self.build_lib)) for path in self.get_outputs()}


def version_and_requirements() -> tuple[str, list[str]]:
    """Returns version and requirements: of a wheel for the TensorFlow here, or of a source distribution."""
    source = (ROOT / "tf_fusedrec/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    tensorflow, keras = ALLOWED_TENSORFLOW, ALLOWED_KERAS
    if "sdist" not in sys.argv:
        try:
            built_for = importlib.metadata.version("tensorflow")
        except importlib.metadata.PackageNotFoundError:  # build_ext says so, with its remedy
            pass
        else:
            version += f"+tf{built_for}"
            tensorflow, keras = f"=={built_for}", f"=={built_for.rpartition('.')[0]}.*"
    return version, [*REQUIREMENTS, f"tensorflow{tensorflow}", f"tf-keras{keras}"]


VERSION, REQUIRED = version_and_requirements()

# The extension tells setuptools that the wheel is bound to a platform.
setup(
    version=VERSION,
    install_requires=REQUIRED,
    ext_modules=[Extension("tf_fusedrec.ops._fusedrec_ops", sources=[])],
    cmdclass={"build": BuildAfresh, "build_ext": BuildCustomOps},
)
