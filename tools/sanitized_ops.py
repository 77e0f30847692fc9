"""The op library under AddressSanitizer: what a wrong op call reads or writes beyond its arrays ends the process.

All of custom_ops but the kernels for GPUs is compiled into build/sanitizers/ops; what has not changed is not compiled
again. It takes minutes, so `make soak` does it, and not the tests.

    python -m tools.sanitized_ops        # compiles, and prints the path of the library

A process that was started with `environment` and calls `use` imports a copy of the package with that library.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

from tools import sanitizers

# What TensorFlow's headers bear: its classes have no type information, so no -fsanitize=undefined as a whole.
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
      sanitizers.Failed: it cannot be compiled; the message says why.
    """
    compile_flags, link_flags = sanitizers.tensorflow_flags()
    compiler = [os.environ.get("CXX", "g++"), *compile_flags, *sanitizers.FLAGS, *KIND.flags, "-Icustom_ops"]
    objects = [sanitizers.compilation(KIND, compiler, source) for source in sanitizers.host_sources()]
    library = KIND.folder() / LIBRARY
    linked = [compiler[0], "-shared", *KIND.flags, *(str(step.output) for step in objects), *link_flags]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sanitizers.run_all(objects, pool)
        sanitizers.run_all([sanitizers.Step(library, linked)], pool)
    package = sanitizers.ROOT / PACKAGES / "tf_fusedrec"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(sanitizers.ROOT / "tf_fusedrec", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return pathlib.Path(shutil.copy(sanitizers.ROOT / library, package / "ops"))


def environment() -> dict[str, str]:
    """Variables of a process that loads the library: the sanitizer comes before all else."""
    compiler = os.environ.get("CXX", "g++")
    # The sanitizer looks for the C++ library's functions when it starts, and Python has not loaded them then.
    wanted = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, encoding="utf-8", check=True).stdout
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    options = "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1:max_allocation_size_mb=1024"
    preloaded = " ".join(path.strip() for path in wanted)
    return {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": options, "TF_USE_LEGACY_KERAS": "1"}


def use() -> None:
    """Makes this process import the copy of the package; comes before its first import."""
    sys.path.insert(0, str(sanitizers.ROOT / PACKAGES))


def main() -> int:
    try:
        print(build())
    except sanitizers.Failed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
