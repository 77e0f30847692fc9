"""Compiles custom_ops/**/*.cu for the emulation: g++ with AddressSanitizer and UndefinedBehaviorSanitizer.

A library has all ops, and a set of faults of mutants.py, which are off until a run turns one on.
"""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

from tests.cuda import mutants
from tests.support.setup_py import names_of_setup
from tools.object_cache import Output, describe_tensorflow, make_all
from tools.sanitizers import algorithms

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "custom_ops"
OPS = sorted({path.relative_to(SOURCES).parts[0] for path in SOURCES.rglob("*_cuda.h")})
# Sets of faults: their folders of sources, relative to ROOT, as are all paths of commands.
FAULTS = {"none": "custom_ops", "written": "build/emulation/custom_ops", "drawn": "build/emulation/drawn"}
DRAWN, SEED = 30, int(os.environ.get("FUSEDREC_FAULT_SEED", "1"))  # faults of each op
FLAGS = [
    "-std=c++17", "-Og", "-g1", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-omit-frame-pointer",
    "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-maybe-uninitialized",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DFUSEDREC_EMULATION",
]  # fmt: skip


def compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def mutants_of(faults: str) -> list[mutants.Mutant]:
    if faults == "drawn":
        return [mutant for op in OPS for mutant in mutants.drawn(SOURCES, op, DRAWN, SEED)]
    return mutants.MUTANTS if faults == "written" else []


def faults_of(op: str, faults: str) -> list[tuple[int, mutants.Mutant]]:
    """Returns the faults of an op and their numbers. Number 0 means no fault."""
    return [(number, mutant) for number, mutant in enumerate(mutants_of(faults), 1) if mutant.op == op]


def build_objects(faults: str = "written") -> list[pathlib.Path]:
    """Compiles the kernels of all ops and their launchers."""
    folder = pathlib.Path(FAULTS[faults])
    if faults != "none":
        mutants.write_sources(SOURCES, ROOT / folder, mutants_of(faults))
    # The slow sources first, so that no core waits for the last of them.
    sources = sorted((ROOT / folder).rglob("*.cu"), key=lambda path: ("jagged" not in str(path), path))
    command = [compiler(), *FLAGS, f"-I{folder}", "-Itests/cuda", "-c", "-x", "c++"]
    return make_all([Output(ROOT, command, [path.relative_to(ROOT)], ".o") for path in sources])


@functools.cache
def build(faults: str = "written") -> pathlib.Path:
    """Returns the library of the emulated kernels."""
    return Output(ROOT, [compiler(), *FLAGS, "-shared"], build_objects(faults), ".so").make()


def objects_of_algorithms() -> list[pathlib.Path]:
    """Returns the objects of the algorithms that the GPU kernels call. The op library hides their symbols."""
    setup_py = names_of_setup()
    version, compile_flags, _ = describe_tensorflow()
    objects = setup_py["op_objects"](version, compile_flags, gpu=False)
    return [objects[source] for source in algorithms()]


def build_op_kernels(faults: str = "written") -> pathlib.Path:
    """Compiles the GPU kernels as CPU kernels over the emulated launchers (emulation/op_kernels.cc)."""
    from tf_fusedrec._tf_compat import tf

    headers = [
        "-isystem" + flag[len("-I") :] if flag.startswith("-I") else flag for flag in tf.sysconfig.get_compile_flags()
    ]
    command = [compiler(), *headers, "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Icustom_ops", "-c"]
    source, version = pathlib.Path("tests/cuda/emulation/op_kernels.cc"), tf.version.VERSION
    objects = [Output(ROOT, command, [source], ".o", version).make(), *build_objects(faults), *objects_of_algorithms()]
    link_flags = tf.sysconfig.get_link_flags()
    return Output(ROOT, [compiler(), *FLAGS, "-shared"], objects, ".so", version, link_flags).make()


def under_sanitizers(module: str, *arguments: str, timeout: float = 1800) -> subprocess.CompletedProcess:
    """Runs a module in a new process with the runtime of the sanitizers."""
    runtime = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, encoding="utf-8", errors="replace", check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    env = {
        **os.environ, "TF_USE_LEGACY_KERAS": "1",  # OpKernels do not depend on the Keras
        "LD_PRELOAD": ":".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout,
    )  # fmt: skip


def run_checks(op: str, *arguments: str, faults: str = "written") -> subprocess.CompletedProcess:
    """Runs the checks of an op over the emulated library; "programs": the programs of tables over the OpKernels."""
    if op == "programs":
        return under_sanitizers("tests.cuda.run_op_kernels", str(build_op_kernels(faults)), *arguments)
    return under_sanitizers("tests.cuda.run_checks", op, "--library", str(build(faults)), *arguments)
