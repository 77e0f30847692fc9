"""Compiles custom_ops/**/*.cu for the emulation: g++ with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterable

from tools.sanitizers import algorithms

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
OPS = sorted(path.parents[1].name for path in (ROOT / "custom_ops").glob("*/cuda/*_cuda.cuh"))
FLAGS = [
    "-std=c++17", "-O1", "-g1", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-omit-frame-pointer",
    "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-maybe-uninitialized",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DFUSEDREC_EMULATION",
]  # fmt: skip


def sources_of(op: str, custom_ops: pathlib.Path) -> list[pathlib.Path]:
    return sorted((custom_ops / op).rglob("*.cu"))


def run_compiler(output: pathlib.Path, inputs: list[str], custom_ops: pathlib.Path, *more: str) -> None:
    """Compiles or links, unless `output` is younger than all files that were read for it."""
    depfile = output.with_suffix(".d")
    command = [os.environ.get("CXX", "g++"), *FLAGS, *more, f"-I{custom_ops}", f"-I{HERE}"]
    command += ["-MMD", "-MF", str(depfile), "-MT", "output"] if "-c" in more else []
    read = shlex.split(depfile.read_text(encoding="utf-8").replace("\\\n", " "))[1:] if depfile.exists() else inputs
    if output.exists():
        made = output.stat().st_mtime
        if all(pathlib.Path(path).exists() and pathlib.Path(path).stat().st_mtime < made for path in read):
            return
    subprocess.run([*command, *inputs, "-o", str(output)], check=True)


def build(op: str, folder: pathlib.Path, custom_ops: pathlib.Path = ROOT / "custom_ops", *more: str) -> pathlib.Path:
    """Compiles changed sources and returns the emulated library of one op. `more`: Further flags of the compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{op}.lock").open("w", encoding="utf-8") as lock:  # another process may build it, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(op, folder, custom_ops, *more)


def _build(op: str, folder: pathlib.Path, custom_ops: pathlib.Path, *more: str) -> pathlib.Path:
    objects = {folder / f"{op}.{source.stem}.o": source for source in sources_of(op, custom_ops)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        compile_one = lambda item: run_compiler(item[0], ["-x", "c++", str(item[1])], custom_ops, "-c", *more)  # noqa: E731
        list(pool.map(compile_one, objects.items()))
    library = folder / f"{op}.so"
    run_compiler(library, [str(path) for path in objects], custom_ops, "-shared")
    return library


def objects_of_algorithms() -> list[str]:
    """Returns the objects of the algorithms that the GPU kernels call. The op library hides their symbols."""
    objects = [ROOT / "build" / source.with_suffix(".o") for source in algorithms()]
    missing = [str(path) for path in objects if not path.exists()]
    assert not missing, f"{missing} are not there. Remedy: python setup.py build_ext --inplace"
    return [str(path) for path in objects]


def build_op_kernels(folder: pathlib.Path, launchers: Iterable[pathlib.Path]) -> pathlib.Path:
    """Compiles the GPU kernels as CPU kernels over the emulated launchers (emulation/op_kernels.cc)."""
    from tf_fusedrec._tf_compat import tf

    launchers = [build("common", folder), *launchers]
    library, source = folder / "op_kernels.so", HERE / "emulation/op_kernels.cc"
    headers = [
        "-isystem" + flag[len("-I") :] if flag.startswith("-I") else flag for flag in tf.sysconfig.get_compile_flags()
    ]
    command = [os.environ.get("CXX", "g++"), *headers, "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    command += [
        f"-I{ROOT / 'custom_ops'}",
        "-shared",
        str(source),
        *objects_of_algorithms(),
        "-o",
        str(library),
        f"-L{folder}",
    ]
    command += [
        *(f"-l:{path.name}" for path in launchers),
        "-Wl,-rpath,$ORIGIN,-z,defs",
        *tf.sysconfig.get_link_flags(),
    ]
    subprocess.run(command, check=True)
    return library


def under_sanitizers(module: str, *arguments: str, timeout: float = 1200) -> subprocess.CompletedProcess:
    """Runs a module in a new process with the runtime of the sanitizers."""
    runtime = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, encoding="utf-8", errors="replace", check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    env = {**os.environ, "LD_PRELOAD": ":".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout,
    )  # fmt: skip


def run_checks(op: str, library: pathlib.Path, *arguments: str, timeout: float = 1200) -> subprocess.CompletedProcess:
    """Runs the checks of an op over an emulated library."""
    return under_sanitizers("tests.cuda.run_checks", op, "--library", str(library), *arguments, timeout=timeout)
