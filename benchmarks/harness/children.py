"""Cases that run in processes of their own: with other thread counts, fresh memory and no rows of another case.

The module of a case ends with `answer(main)`. `main` takes the fields of the parent's request and returns the answer,
both JSON. On several ranks, one rank returns the answer and the others return None.
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

from benchmarks.harness import harness, processes

_MARK = "RESULT "  # separates the answer from lines that libraries print


def environment() -> dict[str, str]:
    """Returns the environment of a child, which finds this repository and keeps TensorFlow quiet."""
    python_path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": python_path}


def ask(module: str, *, variables: Mapping[str, str] = MappingProxyType({}), **request: Any) -> Any:
    """Runs `main(**request)` of a module in a new process and returns its answer.

    Args:
      module: Name of the module.
      variables: Environment variables of the process.
      request: Arguments of `main`.

    Raises:
      CheckFailed: The process failed. The message ends with the last lines that it printed.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    done = processes.run(command, env={**environment(), **variables})
    results = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not results:
        last = (done.stdout + done.stderr).strip().splitlines()[-15:]
        raise harness.CheckFailed(f"{module} with {request} ended with code {done.returncode}:\n" + "\n".join(last))
    return json.loads(results[-1].removeprefix(_MARK))


def ask_ranks(
    module: str,
    ranks: int,
    *,
    inside: Sequence[str] = (),
    options: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float,
    **request: Any,
) -> Any:
    """Runs `main(**request)` of a module on new ranks and returns its one answer. Prints the lines of rank 0.

    Args:
      module: Name of the module.
      ranks: Number of ranks.
      inside: Words before the command, as network.inside makes them, that run it in a namespace.
      options: Options of horovodrun, such as its hosts.
      variables: Environment variables of the command.
      timeout_s: Time limit in seconds.
      request: Arguments of `main`.

    Raises:
      CheckFailed: The ranks failed or exceeded timeout_s. The message ends with the last lines that they printed.
    """
    horovodrun = str(pathlib.Path(sys.executable).parent / "horovodrun")
    child = [sys.executable, "-m", module, json.dumps(request)]
    last: deque[str] = deque(maxlen=30)
    result = None
    with processes.started(
        [*inside, horovodrun, "-np", str(ranks), "--gloo", *options, *child],
        env={**environment(), **variables}, cwd=harness.ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        alarm = threading.Timer(timeout_s, job.terminate)  # horovodrun then ends its ranks
        alarm.daemon = True  # a signal leaves this function, and the process must not wait for the alarm
        alarm.start()
        for line in job.stdout or ():
            rank, said = _RANK.match(line).groups()  # type: ignore[union-attr]
            if said.startswith(_MARK):
                result = json.loads(said.removeprefix(_MARK))
                continue
            if line.startswith("["):  # a rank's line; horovodrun's own last lines are long and say less
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


# horovodrun prefixes a rank's line with the rank and the stream. Its own lines have no prefix.
_RANK = re.compile(r"^(?:\[(\d+)\]<stdout>:)?(.*)")


def answer(main: Callable[..., Any]) -> None:
    """Runs `main` on the request of `ask` or `ask_ranks`, as the last statement of the child's module."""

    def reply() -> None:
        result = main(**json.loads(sys.argv[1]))
        if result is not None:
            print(_MARK + json.dumps(result), flush=True)

    harness.run(reply)
