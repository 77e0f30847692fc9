"""Measures the time from nothing to the first training step, of a first and of a second clone.

    python -m tools.first_step --np 1

It clones this repository into an empty folder, with an empty home and empty caches. It runs `make train` there until
the first step is done. The second clone finds the caches of the first one. Every line of the set-up is printed behind
its time in seconds. pip's settings of this machine stay.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Keras' progress after the first step of an epoch, for example "1/63 [......".
FIRST_STEP = re.compile(r"\b1/\d+ \[")
WORDS = re.compile(r"[\r\n]")


def seconds_to_first_step(clone: pathlib.Path, home: pathlib.Path, processes: int) -> float:
    """Runs `make train` in a clone, ends it at the first step, and returns the seconds until then.

    Raises:
      RuntimeError: The command ended before.
    """
    env = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "PIP_CACHE_DIR": str(home / "pip")}
    began = time.monotonic()
    process = subprocess.Popen(
        ["make", "train", f"NP={processes}"], cwd=clone, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        return _read(process.stdout, began)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        while process.stdout.read(65536):  # until the ranks have ended, too
            pass
        process.stdout.close()
        process.wait()


def _read(output: IO[bytes], began: float) -> float:
    """Prints the lines of the output with their seconds until the first step, and returns the seconds of that."""
    pending = ""
    while block := os.read(output.fileno(), 65536):
        *lines, pending = WORDS.split(pending + block.decode(errors="replace"))
        now = time.monotonic() - began
        for line in filter(str.strip, lines):
            print(f"{now:7.1f}  {line}", flush=True)
        if any(FIRST_STEP.search(line) for line in (*lines, pending)):
            return now
    raise RuntimeError("make train ended before its first step; its output is above.")


def measure(folder: pathlib.Path, processes: int) -> list[float]:
    """Returns the seconds of a first and of a second clone in `folder`."""
    home, found = folder / "home", []
    home.mkdir()
    for name in ("first", "second"):
        print(f"{name} clone", flush=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / name)], check=True)
        found.append(seconds_to_first_step(folder / name, home, processes))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the time from nothing to the first training step.")
    parser.add_argument("--np", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            first, second = measure(pathlib.Path(folder), arguments.np)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(f"first step after {first:.0f} s in the first clone, after {second:.0f} s in the second one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
