"""Checks, benchmarks and compute-sanitizer on a machine with a GPU and PyTorch, without TensorFlow, in ten minutes.

    python -m tests.gpu.session [--minutes 10] [--folder FOLDER] [--only NAME ...]

The library is built elsewhere, on any machine with TensorFlow, nvcc and this checkout:

    FUSEDREC_CUDA=1 python setup.py build_ext --inplace

It writes tf_fusedrec/ops/libfusedrec_cuda.so, which needs neither TensorFlow nor the CUDA toolkit. Copy it with the
tracked files, at the same place in the checkout. FUSEDREC_CUDA_ARCHS=90 compiles for sm_90 alone, a smaller library in
half the time. compute-sanitizer of the CUDA toolkit, Triton and CuPy are used where they are.

Order: checks of each op, quick benchmarks, benchmarks, memcheck, racecheck. Each step has a log and a record in FOLDER,
build/gpu_session by default; a benchmark also has NAME.results.json there, which grows case by case. The next call goes
on with the steps that have no record (steps.py). Exit codes: 0 all passed, 1 failures, 2 something is missing, 3 steps
are left.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import sys
from collections.abc import Sequence

from benchmarks.ops.gpu import CASES
from tests.gpu import steps
from tests.gpu.steps import ROOT, Step

LIBRARY = ROOT / "tf_fusedrec/ops/libfusedrec_cuda.so"
SOURCES = ROOT / "custom_ops"
OPS = sorted({path.relative_to(SOURCES).parts[0] for path in SOURCES.rglob("*_cuda.h")})
TOOLS = ("memcheck", "racecheck")
BENCHMARKS = tuple(CASES)  # of benchmarks.ops
# Rough seconds, for the order and the end of a session; and the limits, after which a step counts as hung.
EXPECTED_S = {"checks": 10.0, "quick": 15.0, "benchmarks": 45.0, "memcheck": 60.0, "racecheck": 61.0}
LIMIT_S = {"checks": 120.0, "quick": 60.0, "benchmarks": 180.0, "memcheck": 240.0, "racecheck": 240.0}


def lacking() -> str | None:
    """Returns what is missing for a session; None when nothing is."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return None if LIBRARY.exists() else f"{LIBRARY.name} is not built"


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer")


def _step(kind: str, name: str, *command: str) -> Step:
    return Step(f"{kind}.{name}", command, EXPECTED_S[kind], LIMIT_S[kind])


def check(op: str, tool: str | None = None) -> Step:
    """The checks of an op, under a tool of compute-sanitizer if one is named."""
    prefix = [] if tool is None else [str(sanitizer()), "--tool", tool, "--error-exitcode", "9"]
    checks = [sys.executable, "-m", "tests.cuda.run_checks", op, "--library", str(LIBRARY), "--memory", "torch"]
    return _step(tool or "checks", op, *prefix, *checks)


def benchmark(name: str, folder: pathlib.Path, *, quick: bool) -> Step:
    """A benchmark, whose results go into the folder."""
    kind = "quick" if quick else "benchmarks"
    results = str(folder / f"{kind}.{name}.results.json")
    command = [sys.executable, "-m", "benchmarks.ops", name, "--device", "gpu", "--json", results]
    return _step(kind, name, *command, *["--quick"] * quick)


def steps_of(folder: pathlib.Path) -> list[Step]:
    """All steps that this machine can run."""
    found = [check(op) for op in OPS]
    found += [benchmark(name, folder, quick=quick) for quick in (True, False) for name in BENCHMARKS]
    if sanitizer() is not None:
        found += [check(op, tool) for tool in TOOLS for op in OPS]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = steps.options(__doc__, "gpu_session")
    options = parser.parse_args(arguments)
    missing = lacking()
    if missing is not None:
        print(f"error: no session on a GPU: {missing}. Remedy: see `--help`.", file=sys.stderr)
        return 2
    if sanitizer() is None:
        print("left out: compute-sanitizer is not on PATH")
    try:
        return steps.session(steps_of(options.folder.resolve()), LIBRARY, options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
