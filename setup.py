"""Compiles custom_ops into tf_fusedrec/ops/_fusedrec_ops.so; most metadata are in pyproject.toml.

With nvcc, the device code (*.cu) becomes libfusedrec_cuda.so beside it, and the ops get their GPU form: FUSEDREC_CUDA
in their kernels, and the *.cc files below folders named `cuda`. Two libraries, because TensorFlow's own libraries
carry symbols of another CUDA runtime. The library with the device code does not link to TensorFlow, and it contains
and hides its CUDA runtime. FUSEDREC_CUDA is `auto` (the default: where nvcc and a GPU are), `0` or `1`.
FUSEDREC_CUDA_ARCHS names the GPUs to compile for, `80 90`.

The library is bound to the TensorFlow of the building environment. Its flags come from tf.sysconfig. The build writes
the versions of TensorFlow and of this package to tf_fusedrec/ops/_build_info.py, so that the loader can explain a
mismatch. A wheel's version has both, and it requires that TensorFlow: 0.1.0.2.21.0 is 0.1.0 for TensorFlow 2.21.0. A
package index takes such a version, unlike the local version 0.1.0+tf2.21.0, and pip finds the wheel of the TensorFlow
that a user asks for. A source distribution is 0.1.0, and allows all releases. tools/wheel.py makes a wheel of its own
of the libraries with GPU kernels. Each object is compiled once for all clones of a machine (tools/object_cache.py).
"""

from __future__ import annotations

import filecmp
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # pip leaves it out

from tools import gloo_sources, object_cache  # noqa: E402
from tools.object_cache import CompiledHeaders, Output  # noqa: E402

SOURCES = "custom_ops"
OBJECTS = pathlib.Path("build/custom_ops")  # relative to ROOT; holds the compiled headers
HEADERS = pathlib.Path("custom_ops/common/tensorflow.h")
LIBRARY = pathlib.Path("tf_fusedrec/ops/_fusedrec_ops.so")
BUILD_INFO = pathlib.Path("tf_fusedrec/ops/_build_info.py")
GLOO_LIBRARY = pathlib.Path("tf_fusedrec/ops/_fusedrec_gloo.so")
GLOO_SOURCES = pathlib.Path(SOURCES, "gloo_exchange")
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

ALLOWED_TENSORFLOW = ">=2.16.2,<2.23"
# Beside TensorFlow, which brings Keras 3; a release candidate brings keras-nightly in its place.
REQUIREMENTS = [
    "absl-py",
    "numpy",
    "pillow",
    "pyarrow<26",  # 26 refuses the NumPy 1 that TensorFlow 2.16 and 2.17 need
    "pyyaml",
    "tensorboard",  # of tf.summary; TensorFlow 2.21 does not bring it
    "xxhash",
]


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


def cxx() -> str:
    """Returns the C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"error: the C++ compiler {compiler!r} is not on PATH. Remedy: install g++ "
            "(Debian: apt install g++) or name another one in CXX."
        )
    return compiler


def cuda_library(nvcc: str) -> pathlib.Path:
    """Compiles and links the device code."""
    command = [nvcc, *CUDA_FLAGS, *cuda_architectures(), f"-I{SOURCES}", "-c"]
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*.cu"))
    host = object_cache.version(cxx())  # nvcc calls this compiler
    outputs = [Output(ROOT, command, [source], ".o", host) for source in sources]
    objects = object_cache.make_all(outputs, print_sources=True)
    return Output(ROOT, [nvcc, *CUDA_LINK_FLAGS], objects, ".so", host).make()


def op_objects(version: str, compile_flags: list[str], gpu: bool) -> dict[pathlib.Path, pathlib.Path]:
    """Compiles the ops, with their GPU form if wanted. Returns source -> object."""
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*.cc"))
    sources = [path for path in sources if gpu or "cuda" not in path.parts]
    sources = [path for path in sources if path.parent != GLOO_SOURCES]
    of_tensorflow = [path for path in sources if path.stem.endswith(("_op", "_kernel"))]
    others = [path for path in sources if path not in of_tensorflow]
    flags = [cxx(), *compile_flags, *COMPILE_FLAGS, f"-I{SOURCES}"]
    headers = CompiledHeaders(ROOT, flags, HEADERS, OBJECTS, version)
    with_gpu = ["-DFUSEDREC_CUDA"] if gpu else []
    plain = [
        Output(ROOT, [*flags, *(with_gpu if "cuda" in path.parts else []), "-c"], [path], ".o", version)
        for path in others
    ]
    with_headers = [headers.object(path, with_gpu) for path in of_tensorflow]
    objects = object_cache.make_all([*plain, *with_headers], print_sources=True)
    return dict(zip([*others, *of_tensorflow], objects))


def op_library(kernels: pathlib.Path | None) -> tuple[Output, str]:
    """Compiles the ops. Returns how they are linked, and the TensorFlow version.

    Args:
      kernels: The library of the device code; None: without GPU kernels.
    """
    compiler = cxx()  # before TensorFlow's import, which takes seconds
    version, compile_flags, link_flags = object_cache.describe_tensorflow()
    objects = list(op_objects(version, compile_flags, gpu=kernels is not None).values())
    # The op library finds that of the kernels beside itself, before TensorFlow's libraries.
    beside = [] if kernels is None else [str(kernels), "-Wl,-rpath,$ORIGIN"]
    return Output(ROOT, [compiler, "-shared"], objects, ".so", version, [*beside, *link_flags]), version


def gloo_library() -> Output | None:
    """Compiles the exchange over Gloo, with Gloo inside and hidden; None without Gloo's sources (gloo_sources.py)."""
    gloo = gloo_sources.sources()
    if not gloo:
        print(f"without the exchange over Gloo: its sources are not wanted, or not in {gloo_sources.folder()}")
        return None
    version, compile_flags, link_flags = object_cache.describe_tensorflow()
    folder = str(gloo_sources.folder())
    # Errors of Gloo name a line of its sources; the path must not name the cache.
    older = ["-include", str(GLOO_SOURCES / "older_runtimes.h")]
    flags = [cxx(), *compile_flags, *COMPILE_FLAGS, f"-fmacro-prefix-map={folder}/=", "-isystem", folder, *older]
    outputs = [Output(ROOT, [*flags, "-w", "-c"], [path], ".o", version) for path in gloo]
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / GLOO_SOURCES).glob("*.cc"))
    sources.append(pathlib.Path(SOURCES, "common/older_runtimes.cc"))
    outputs += [Output(ROOT, [*flags, f"-I{SOURCES}", "-c"], [path], ".o", version) for path in sources]
    objects = object_cache.make_all(outputs, print_sources=True)
    hidden = f"-Wl,--version-script={SOURCES}/common/cuda_api.map"
    return Output(ROOT, [cxx(), "-shared", hidden], objects, ".so", version, link_flags)


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
        (ROOT / OBJECTS).mkdir(parents=True, exist_ok=True)
        try:
            built = {} if nvcc is None else {CUDA_LIBRARY: cuda_library(nvcc)}
            ops, version = op_library(built.get(CUDA_LIBRARY))
            built[LIBRARY] = ops.make()
            if (gloo := gloo_library()) is not None:
                built[GLOO_LIBRARY] = gloo.make()
        except object_cache.Failed as error:
            raise SystemExit(str(error)) from None
        built[BUILD_INFO] = ROOT / OBJECTS / BUILD_INFO.name
        built[BUILD_INFO].write_text(
            '"""Written by setup.py with the library beside it."""\n\n'
            f'TENSORFLOW_VERSION = "{version}"\nVERSION = "{VERSION}"\n',
            encoding="utf-8",
        )
        folder = ROOT if self.inplace else pathlib.Path(self.build_lib)
        for target, source in built.items():
            put(source, folder / target)
        for library in {CUDA_LIBRARY, GLOO_LIBRARY} - built.keys():  # the wheel would contain that of an earlier build
            (folder / library).unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        libraries = [LIBRARY, BUILD_INFO]
        libraries += [CUDA_LIBRARY] if find_nvcc() is not None else []
        libraries += [GLOO_LIBRARY] if gloo_sources.sources() else []
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
    tensorflow = ALLOWED_TENSORFLOW
    if "sdist" not in sys.argv:
        try:
            built_for = importlib.metadata.version("tensorflow")
        except importlib.metadata.PackageNotFoundError:  # build_ext says so, with its remedy
            pass
        else:
            version, tensorflow = f"{version}.{built_for}", f"=={built_for}"
    return version, [*REQUIREMENTS, f"tensorflow{tensorflow}"]


VERSION, REQUIRED = version_and_requirements()

# The extension tells setuptools that the wheel is bound to a platform.
setup(
    version=VERSION,
    install_requires=REQUIRED,
    ext_modules=[Extension("tf_fusedrec.ops._fusedrec_ops", sources=[])],
    cmdclass={"build": BuildAfresh, "build_ext": BuildCustomOps},
)
