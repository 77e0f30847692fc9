"""Cases that need processes of their own: other thread counts, memory given back, no rows left from another case.

A case is a module with `answer(main)` at its end: `main` takes what the parent sends and returns what it
gets, both JSON. On several ranks, all but one return None.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks import harness, processes

_MARK = "RESULT "  # libraries print lines of their own


def environment() -> dict[str, str]:
    """Of a child: it finds this repository, and TensorFlow keeps quiet."""
    python_path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": python_path}


def ask(module: str, *, variables: Mapping[str, str] = MappingProxyType({}), **request: Any) -> Any:
    """What `main(**request)` of a module returns in a process of its own, with these environment variables set.

    Raises:
      CheckFailed: the process failed; the message ends with the last lines that it printed.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    done = processes.run(command, env={**environment(), **variables})
    results = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not results:
        last = (done.stdout + done.stderr).strip().splitlines()[-15:]
        raise harness.CheckFailed(f"{module} with {request} ended with code {done.returncode}:\n" + "\n".join(last))
    return json.loads(results[-1].removeprefix(_MARK))


def ask_ranks(module: str, ranks: int, *, inside: Sequence[str] = (), timeout_s: float, **request: Any) -> Any:
    """What `main(**request)` of a module returns on one of so many new ranks. Shows what rank 0 prints meanwhile.

    Args:
      inside: what goes before a command that runs elsewhere, as network.inside makes it.

    Raises:
      CheckFailed: the ranks failed, with the last lines that they printed; or did not end within timeout_s seconds.
    """
    horovodrun = str(pathlib.Path(sys.executable).parent / "horovodrun")
    child = [sys.executable, "-m", module, json.dumps(request)]
    last: deque[str] = deque(maxlen=30)
    result = None
    with processes.started(
        [*inside, horovodrun, "-np", str(ranks), "--gloo", *child], env=environment(), cwd=harness.ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        alarm = threading.Timer(timeout_s, job.terminate)  # horovodrun then ends its ranks
        alarm.start()
        for line in job.stdout or ():
            rank, said = _RANK.match(line).groups()  # type: ignore[union-attr]
            if said.startswith(_MARK):
                result = json.loads(said.removeprefix(_MARK))
                continue
            if line.startswith("["):  # of a rank; what horovodrun itself says at the end is long and says less
                last.append(line.rstrip())
            if rank == "0":
                print(f"  {said}", flush=True)
        in_time = alarm.is_alive()
        alarm.cancel()
    if not in_time:
        raise harness.CheckFailed(f"{ranks} ranks of {module} did not end within {timeout_s} s:\n" + "\n".join(last))
    if job.returncode or result is None:
        raise harness.CheckFailed(f"{ranks} ranks of {module} ended with {job.returncode}:\n" + "\n".join(last))
    return result


# horovodrun tells which rank said a line and where; without it, or for lines of its own, there is no rank.
_RANK = re.compile(r"^(?:\[(\d+)\]<stdout>:)?(.*)")


def answer(main: Callable[..., Any]) -> None:
    """The child's side of `ask` and `ask_ranks`."""

    def told() -> None:
        result = main(**json.loads(sys.argv[1]))
        if result is not None:
            print(_MARK + json.dumps(result), flush=True)

    harness.run(told)
