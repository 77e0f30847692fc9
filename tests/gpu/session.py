"""Runs everything that needs a machine with a GPU, in one call: checks, compute-sanitizer, benchmarks.

    python -m tests.gpu.session

Needs PyTorch with a GPU, NumPy and libfusedrec_cuda.so (FUSEDREC_CUDA=1 python setup.py build_ext --inplace, on any
machine with nvcc); no TensorFlow, no pytest. Results: benchmarks/results/gpu_*.json. It runs everything, and ends with
1 when anything failed.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "tf_fusedrec/ops/libfusedrec_cuda.so"
OPS = sorted(path.parents[1].name for path in (ROOT / "custom_ops").glob("*/cuda/*_cuda.cuh"))
TOOLS = ("memcheck", "racecheck")
BENCHMARKS = sorted(path.parent.name for path in (ROOT / "benchmarks").glob("gpu_*/__main__.py"))
TIMEOUT_S = 600.0


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


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S)


def check(op: str, tool: str | None = None) -> subprocess.CompletedProcess:
    """Runs the checks of an op, under a tool of compute-sanitizer if one is named."""
    prefix = [] if tool is None else [str(sanitizer()), "--tool", tool, "--error-exitcode", "9"]
    checks = [sys.executable, "-m", "tests.cuda.run_checks", op, "--library", str(LIBRARY), "--memory", "torch"]
    return run([*prefix, *checks])


def main() -> int:
    missing = lacking()
    if missing is not None:
        print(f"error: no session on a GPU: {missing}.", file=sys.stderr)
        return 2
    steps = {f"checks of {op}": lambda op=op: check(op) for op in OPS}
    if sanitizer() is not None:
        steps.update({f"{tool} of {op}": lambda op=op, tool=tool: check(op, tool) for tool in TOOLS for op in OPS})
    else:
        print("compute-sanitizer is not on PATH: left out")
    for name in BENCHMARKS:
        steps[f"benchmarks.{name}"] = lambda name=name: run([sys.executable, "-m", f"benchmarks.{name}"])
    failed = []
    for name, step in steps.items():
        print(f"== {name}", flush=True)
        done = step()
        print(done.stdout, flush=True)
        if done.returncode != 0:
            print(done.stderr, flush=True)
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
