"""Compiles custom_ops/**/*.cu for the emulation: g++ with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
FLAGS = [
    "-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-omit-frame-pointer",
    "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-maybe-uninitialized",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DFUSEDREC_EMULATION",
]  # fmt: skip


def source_of(op: str, custom_ops: pathlib.Path) -> pathlib.Path:
    return custom_ops / op / f"{op}_cuda.cu"


def build(op: str, folder: pathlib.Path, custom_ops: pathlib.Path = ROOT / "custom_ops") -> pathlib.Path:
    """The emulated library of one op, compiled again when something that it read is younger."""
    library, depfile = folder / f"{op}.so", folder / f"{op}.d"
    command = [os.environ.get("CXX", "g++"), *FLAGS, f"-I{custom_ops}", f"-I{HERE}", "-MMD", "-MF", str(depfile)]
    command += ["-MT", "library", "-x", "c++", str(source_of(op, custom_ops)), "-o", str(library)]
    if library.exists() and depfile.exists():
        read = shlex.split(depfile.read_text().replace("\\\n", " "))[1:]
        made = library.stat().st_mtime
        if all(pathlib.Path(path).exists() and pathlib.Path(path).stat().st_mtime < made for path in read):
            return library
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)
    return library


def run_checks(op: str, library: pathlib.Path, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess:
    """Runs the checks of an op over an emulated library, in a process of its own with the sanitizers' runtime."""
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    env = {**os.environ, "LD_PRELOAD": ":".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cuda.run_checks", op, "--library", str(library), *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
