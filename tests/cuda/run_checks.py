"""Runs the checks of one op over one library: python -m tests.cuda.run_checks OP --library PATH [--memory torch].

Needs NumPy, and PyTorch for --memory torch; no TensorFlow. Over an emulated library, every check runs with threads in
order and then under fixed random schedules. Checks marked `once` run in order only. Checks marked `over_streams` run
again while the work of streams is deferred. With --faults, the faults of libraries.FAULTS are looked for instead.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import sys
import time
import types

from tests.cuda import faults, libraries
from tests.cuda.launchers import OPS, Launchers
from tests.cuda.memory import Kernels, NumpyMemory, TorchMemory

# Workers, probability of giving way at an atomic operation, seed.
SCHEDULES = [(1, 0.0, 0), (1, 0.3, 1), (2, 0.3, 2)]
# Probability that another stream runs a piece of its work at a call, seed.
ORDERS = [(0.0, 0), (0.6, 1)]


def run(op: str, checks: types.ModuleType, names: list[str], kernels: Kernels) -> None:
    """Runs checks; the first that fails raises."""
    emulated = isinstance(kernels.memory, NumpyMemory)
    argument = Launchers(kernels) if op in OPS else kernels
    for name in names:
        check = getattr(checks, name)
        schedules = len(SCHEDULES) if emulated and not getattr(check, "once", False) else 1
        for workers, preempt, seed in SCHEDULES[:schedules]:
            if emulated:
                set_options = kernels.library.emulation_options
                set_options(ctypes.c_int(workers), ctypes.c_double(preempt), ctypes.c_uint64(seed))
            started = time.monotonic()
            check(argument)
            print(f"{op}: {name} seed {seed}: {time.monotonic() - started:.2f} s", flush=True)
        for wander, seed in ORDERS if emulated and getattr(check, "over_streams", False) else ():
            started = time.monotonic()
            with kernels.memory.deferred(kernels.library, wander, seed):
                check(argument)
            print(f"{op}: {name} over streams, seed {seed}: {time.monotonic() - started:.2f} s", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op")
    parser.add_argument("--library", required=True)
    parser.add_argument("--memory", choices=["numpy", "torch"], default="numpy")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of the checks to run")
    parser.add_argument("--faults", metavar="SET", choices=libraries.FAULTS, help="look for faults (emulation)")
    options = parser.parse_args(arguments)
    checks = importlib.import_module(f"tests.cuda.checks.{options.op}")
    every = [name for name in dir(checks) if name.startswith("check_")]
    unknown = [part for part in options.only if not any(part in name for name in every)]
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: no check of {options.op} has this in its name. Name one of {every}.")
    kernels = Kernels(options.library, NumpyMemory() if options.memory == "numpy" else TorchMemory())
    if not options.faults:
        run(options.op, checks, [name for name in every if any(part in name for part in options.only)], kernels)
        return 0
    find = lambda mutant: run(options.op, checks, [name for name in every if mutant.only in name], kernels)  # noqa: E731
    return int(bool(faults.missed(libraries.faults_of(options.op, options.faults), kernels.library, find)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
