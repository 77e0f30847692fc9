"""Searches for unknown faults with fresh seeds until the time is over.

    python -m tests.soak --seconds 3600
    python -m tests.soak tables --seed 1234      # one seed again: the same examples

Four parts take turns: `tables` and `exports` (random operations of a job, compared with a dictionary), `files` (damaged
files of every kind) and `ops` (wrong op calls under AddressSanitizer). Each turn is a separate process, so that a crash
is a violation too. The exit code is 1 after a violation, and the output has the command that repeats it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import secrets
import subprocess
import sys
import time

from tools import sanitized_ops

# Seconds of one turn. Parts with more possible faults get more.
TURNS = {"tables": 180, "exports": 120, "files": 60, "ops": 60}
LONGEST_SEED_S = 900  # Limit beyond a turn, because hypothesis shrinks an example for up to 5 minutes.
_COUNTS = "soak counts: "


def one_turn(part: str, seed: int | None, seconds: float) -> None:
    """Runs fresh seeds until the time is over, or the given one. Prints the seeds and, last, the counts."""
    if part == "ops":
        sanitized_ops.use()
    from tests.soak.parts import PARTS

    counts: collections.Counter = collections.Counter()
    end = time.monotonic() + seconds
    while not counts or (seed is None and time.monotonic() < end):
        current = secrets.randbits(32) if seed is None else seed
        print(f"seed {current}", flush=True)
        counts += PARTS[part](current)
        counts["seeds"] += 1
    print(_COUNTS + json.dumps(counts), flush=True)


def turn_of(part: str, seconds: float) -> tuple[collections.Counter, str]:
    """Runs a turn in a separate process. Returns its counts and, after a failure, the end of its output."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "tests.soak", part, "--seconds", str(seconds)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=seconds + LONGEST_SEED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0] + f"\nno end within {seconds + LONGEST_SEED_S:.0f} s"
    lines = output.rstrip().splitlines()
    if process.returncode == 0 and lines and lines[-1].startswith(_COUNTS):
        return collections.Counter(json.loads(lines[-1][len(_COUNTS) :])), ""
    seeds = [line.split()[1] for line in lines if line.startswith("seed ")]
    again = f"python -m tests.soak {part} --seed {seeds[-1]}" if seeds else f"python -m tests.soak {part}"
    return (
        collections.Counter(),
        f"{output[-8000:]}\nVIOLATION in {part} (exit code {process.returncode}). Again: {again}",
    )


def soak(seconds: float) -> int:
    """Runs all parts in turns and returns the number of violations."""
    print("soak: compiling the op library for AddressSanitizer, unless it is there ...", flush=True)
    sanitized_ops.build()
    end, violations = time.monotonic() + seconds, 0
    totals: dict[str, collections.Counter] = {part: collections.Counter() for part in TURNS}
    share = min(1.0, seconds / sum(TURNS.values()))  # Every part gets a turn in a short soak too.
    while time.monotonic() < end:
        for part, wanted in TURNS.items():
            counts, failure = turn_of(part, min(wanted * share, max(end - time.monotonic(), 1)))
            totals[part] += counts
            violations += bool(failure)
            print(failure or f"soak: {part}: {counts['seeds']} seeds without a violation", flush=True)
    for part, counts in totals.items():
        print(f"soak: {part}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    print(f"soak: {violations} violations in {seconds:.0f} s")
    return violations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument(
        "part", nargs="?", choices=list(TURNS), help="one part in this process; all in turns without it"
    )
    parser.add_argument("--seed", type=int, help="one seed again")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    if arguments.part is None:
        return 1 if soak(arguments.seconds) else 0
    if arguments.part == "ops" and "LD_PRELOAD" not in os.environ:
        sanitized_ops.build()
        command = [sys.executable, "-m", "tests.soak", *sys.argv[1:]]
        os.execve(command[0], command, {**os.environ, **sanitized_ops.environment()})
    one_turn(arguments.part, arguments.seed, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
