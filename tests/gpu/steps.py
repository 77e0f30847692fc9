"""Steps of a session on a GPU: the cheapest first, within a budget, each with a record that the next session finds.

    FOLDER/NAME.log    output of a step, while it runs
    FOLDER/NAME.json   its record, when it has ended

A step is a command in a process group of its own. The session ends a step that exceeds its limit, and names it. A step
that the budget cuts off gets no record, so the next session runs it. A record counts as long as the library is the
same that made it; without its folder, every step runs again. This module needs the standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
PASSED, FAILED, HUNG, LEFT_OUT = "passed", "failed", "hung", "left out"
LEFT_OUT_CODE = 77  # exit code of a step that does not apply to this machine
TAIL_BYTES = 4000  # of a step's output in its record
TO_END_S = 10.0  # seconds that a step has to end after SIGTERM, and again after SIGKILL


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of a session.

    Attributes:
      name: Unique name without spaces, which also names its files.
      command: Words of the command, which runs in the root of the repository.
      expected_s: Rough seconds that it takes. Steps run in this order, and none starts with less time left.
      limit_s: Seconds after which it counts as hung.
    """

    name: str
    command: tuple[str, ...]
    expected_s: float
    limit_s: float


def identity(library: pathlib.Path) -> str:
    """The first 16 digits of the library's SHA-256. Records of another library do not count."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def read_record(folder: pathlib.Path, name: str, library: str) -> dict | None:
    """The record of a step made with this library; None if there is none, or none that can be read."""
    try:
        record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("library") == library else None


def write_record(folder: pathlib.Path, record: dict) -> None:
    """Writes a record as a whole: a session that ends meanwhile leaves none or all of it."""
    path = folder / f"{record['step']}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _end(process: subprocess.Popen) -> None:
    """Ends the group of a process, which may outlive SIGKILL inside a driver."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TO_END_S)


def _tail(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def run_step(step: Step, folder: pathlib.Path, library: str, left_s: float) -> dict | None:
    """Runs a step, and writes and returns its record; None if left_s ended it before its limit did."""
    log, begin, limit_s = folder / f"{step.name}.log", time.monotonic(), min(step.limit_s, left_s)
    with log.open("wb") as out:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            code = None
        except BaseException:  # Ctrl-C goes to this process alone
            _end(process)
            raise
    if code is None and limit_s < step.limit_s:
        return None
    state = HUNG if code is None else {0: PASSED, LEFT_OUT_CODE: LEFT_OUT}.get(code, FAILED)
    record = {
        "step": step.name, "state": state, "seconds": round(time.monotonic() - begin, 2), "exit_code": code,
        "limit_s": step.limit_s, "library": library, "command": list(step.command), "output": _tail(log),
    }  # fmt: skip
    write_record(folder, record)
    return record


def options(description: str | None, folder: str) -> argparse.ArgumentParser:
    """The options of a session. `folder` is the default of --folder, under build/."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="budget of this session (default: 10)")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / folder, help="folder of the records")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="steps with one of these in their names")
    return parser


def session(steps: Sequence[Step], library: pathlib.Path, arguments: argparse.Namespace) -> int:
    """Runs a session and prints what it does. Failures stand at the end, those of earlier sessions included.

    Returns:
      The exit code: 1 if a step failed or hung, 3 if none did and some are left for a later session, else 0.

    Raises:
      ValueError: a part of --only is in no name.
    """
    only, folder, made_by = arguments.only, arguments.folder.resolve(), identity(library)
    unknown = [part for part in only if not any(part in step.name for step in steps)]
    if unknown:
        names = [step.name for step in steps]
        raise ValueError(f"--only {' '.join(unknown)}: no step has this in its name. Name one of {names}.")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in steps if not only or any(part in step.name for part in only)]
    end, ended, left = time.monotonic() + 60.0 * arguments.minutes, list[dict](), list[str]()
    for step in sorted(chosen, key=lambda step: step.expected_s):
        record, left_s = read_record(folder, step.name, made_by), end - time.monotonic()
        if record is None and left_s >= step.expected_s:
            record = run_step(step, folder, made_by, left_s)
        if record is None:
            left.append(step.name)
            continue
        reason = record["output"].strip().splitlines()[-1:] if record["state"] == LEFT_OUT else []
        print(" ".join([f"{step.name}: {record['state']} in {record['seconds']} s", *reason]), flush=True)
        ended.append(record)
    failed = [record for record in ended if record["state"] in (FAILED, HUNG)]
    for record in failed:
        log = folder / f"{record['step']}.log"
        print(f"\n{record['step']}: {record['state']}, exit code {record['exit_code']}, {log}\n{record['output']}")
    if left:
        print(f"left for the next session: {', '.join(left)}")
    if failed:
        print("failures: " + ", ".join(f"{record['step']} ({record['state']})" for record in failed))
    elif not left:
        print("all passed")
    return 1 if failed else 3 if left else 0
