"""The op library under AddressSanitizer: an op call that reads or writes beyond its arrays ends the process.

It compiles the sources of custom_ops, except the GPU kernels, that no clone of this machine has compiled
(object_cache.py). That takes minutes, so `make soak` does it, and not the tests.

A process that was started with `environment` and calls `use` imports a copy of the package with that library.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

from tools import sanitizers
from tools.object_cache import Output, describe_tensorflow, make_all

# The checks that TensorFlow's headers allow. Its classes have no type information, which -fsanitize=undefined needs.
_CHECKS = "address,signed-integer-overflow,shift,bounds,integer-divide-by-zero"
LIBRARY = "_fusedrec_ops.so"
PACKAGES = sanitizers.BUILD / "packages"
KIND = sanitizers.Kind(
    "ops",
    "memory errors of op calls",
    (f"-fsanitize={_CHECKS}", "-fno-sanitize-recover=all", "-fPIC", "-fvisibility=hidden", "-DFUSEDREC_NO_CLONES"),
)


def build() -> pathlib.Path:
    """Compiles what has changed and copies the package; returns the library.

    Raises:
      sanitizers.Failed: The compilation failed; the message says why.
    """
    tensorflow = describe_tensorflow()
    command = [*sanitizers.compiler(KIND, tensorflow), "-c"]
    objects = [
        Output(sanitizers.ROOT, command, [source], ".o", tensorflow.version) for source in sanitizers.host_sources()
    ]
    linking = [command[0], "-shared", *KIND.flags]
    library = Output(
        sanitizers.ROOT, linking, make_all(objects), ".so", tensorflow.version, tensorflow.link_flags
    ).make()
    package = sanitizers.ROOT / PACKAGES / "tf_fusedrec"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(sanitizers.ROOT / "tf_fusedrec", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return pathlib.Path(shutil.copy(library, package / "ops" / LIBRARY))


def environment() -> dict[str, str]:
    """Returns the environment variables of a process that loads the library. The sanitizer is loaded first."""
    compiler = os.environ.get("CXX", "g++")
    # The sanitizer looks for the functions of the C++ library when it starts, before Python has loaded them.
    wanted = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, encoding="utf-8", check=True).stdout
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    options = "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1:max_allocation_size_mb=1024"
    preloaded = " ".join(path.strip() for path in wanted)
    return {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": options}


def use() -> None:
    """Makes this process import the copy of the package. Call it before the first import of the package."""
    sys.path.insert(0, str(sanitizers.ROOT / PACKAGES))
