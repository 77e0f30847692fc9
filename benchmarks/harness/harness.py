"""The base of every benchmark: command line, interleaved timing, checks that end the run, table, JSON.

A benchmark checks its result, then measures, then prints. Its variants take turns inside every repeat, so that a
disturbance of the machine hits all of them. It reports medians and 90th percentiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import processes
from benchmarks.harness.machine import describe

ROOT = pathlib.Path(__file__).resolve().parents[2]
_RANK_PREFIX = re.compile(r"^\[\d+\]<(stdout|stderr)>:")


class CheckFailed(Exception):
    """A variant's result differs from the expected one, so that nothing is measured."""


class Arguments(NamedTuple):
    """The command line of every benchmark."""

    quick: bool
    json: pathlib.Path | None


class Timing(NamedTuple):
    """Wall-clock times of one variant, in seconds."""

    median_s: float
    p90_s: float


def parse_arguments(description: str, argv: Sequence[str] | None = None) -> Arguments:
    """Reads --quick and --json FILE."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results to FILE")
    parsed = parser.parse_args(argv)
    return Arguments(quick=parsed.quick, json=parsed.json)


def run(main: Callable[[], None]) -> None:
    """Runs a benchmark's main; a failed check is printed and ends the process with exit code 1.

    A process that starts ranks leaves by SystemExit after SIGTERM (processes.py). A rank keeps the default.
    """
    is_rank = "HOROVOD_RANK" in os.environ
    try:
        with contextlib.nullcontext() if is_rank else processes.signals_unwind():
            main()
    except CheckFailed as failure:
        print(f"CHECK FAILED: {failure}", file=sys.stderr, flush=True)
        sys.exit(1)


def on_ranks(module: str, ranks: int) -> bool:
    """Returns True on a rank. A plain process starts the ranks instead and exits with their exit code.

    Args:
      module: Name of the benchmark's module, which every rank runs.
      ranks: Number of ranks.

    Raises:
      CheckFailed: horovodrun launched another number of processes, or horovodrun is missing.
    """
    launched = os.environ.get("HOROVOD_SIZE")
    if launched is not None:
        if int(launched) != ranks:
            raise CheckFailed(f"{module} needs {ranks} processes, got {launched}. Run it without horovodrun.")
        return True
    horovodrun = pathlib.Path(sys.executable).parent / "horovodrun"
    if not horovodrun.exists():
        raise CheckFailed(f"{module} needs {ranks} processes, but horovodrun is not beside {sys.executable}.")
    command = [str(horovodrun), "-np", str(ranks), "--gloo", sys.executable, "-m", module, *sys.argv[1:]]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    path = os.pathsep.join([str(horovodrun.parent), os.environ.get("PATH", "")])
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with processes.started(
        command, env={**quiet, "PATH": path, "PYTHONPATH": python_path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        for line in job.stdout or ():
            print(_RANK_PREFIX.sub("", line), end="", flush=True)
    sys.exit(job.returncode)


def timing(seconds: Sequence[float]) -> Timing:
    """Returns median and 90th percentile."""
    return Timing(float(np.median(seconds)), float(np.percentile(seconds, 90)))


def measure(variants: Mapping[str, Callable[[], object]], *, warmup: int, repeats: int) -> dict[str, Timing]:
    """Times the variants in turns. Each repeat starts with another variant."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-warmup, repeats):
        for turn in range(len(names)):
            name = names[(repeat + turn) % len(names)]
            begin = time.perf_counter()
            variants[name]()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: timing(values) for name, values in seconds.items()}


def check_equal(what: str, got: Any, want: Any) -> None:
    """Raises CheckFailed, naming the first difference, unless arrays are equal in shape and in every entry."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise CheckFailed(f"{what}: shape {got.shape}, want {want.shape}.")
    if not np.array_equal(got, want):
        at = tuple(int(i) for i in np.argwhere(got != want)[0])
        raise CheckFailed(f"{what}: {np.sum(got != want)} entries differ, at {at} got {got[at]}, want {want[at]}.")


def check_close(what: str, got: Any, want: Any, *, relative: float, reason: str) -> None:
    """Raises CheckFailed unless max |got - want| <= relative * max |want|. `reason` justifies the tolerance."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise CheckFailed(f"{what}: shape {got.shape}, want {want.shape}.")
    error, limit = np.abs(got - want), relative * np.max(np.abs(want), initial=0.0)
    if not np.all(error <= limit):  # NaN fails too
        at = tuple(int(i) for i in np.argwhere(~(error <= limit))[0])
        raise CheckFailed(f"{what}: {got[at]} at {at}, want {want[at]}; the difference may be {limit:.3g} ({reason}).")


def memcpy_bytes_per_s(megabytes: int = 256, repeats: int = 7) -> float:
    """Bytes read plus written per second when one thread copies a buffer larger than the caches; the best repeat."""
    source = np.ones(megabytes << 17, np.int64)  # 2^20 bytes are 2^17 numbers
    target = np.empty_like(source)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / min(seconds)


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    if not re.fullmatch(r"[0-9a-f]{4,40}", commit):
        return "not committed"
    return f"{commit}, with changes" if git("status", "--porcelain") else commit


def environment() -> dict[str, Any]:
    """Returns the machine and the commit of a measurement. A high `load_average` reveals other work."""
    return {
        "machine": describe(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows of equal keys under their keys."""
    print(f"\n{title}")
    if not rows:
        print("  nothing was measured")
        return
    cells = [list(rows[0]), *[[_cell(value) for value in row.values()] for row in rows]]
    widths = [max(len(row[c]) for row in cells) for c in range(len(cells[0]))]
    for row in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


def write_json(path: pathlib.Path | None, results: Mapping[str, Any]) -> None:
    """Writes the results and the environment. Does nothing when path is None."""
    if path is not None:
        path.write_text(json.dumps({**results, **environment()}, indent=2) + "\n", encoding="utf-8")


def report(title: str, cases: Sequence[Mapping[str, Any]], arguments: Arguments) -> None:
    """Prints the cases of an op's benchmark, one line each, and writes them as {"cases": [...]}."""
    where = environment()
    print_table(title, cases)
    print(f"  on {where['machine']}, load {where['load_average']}, commit {where['commit']}")
    write_json(arguments.json, {"benchmark": title, "cases": list(cases)})
