"""Cases that need a process of their own: other thread counts, memory given back, no rows left from another case.

A case is a module with `answer(main)` at its end: `main` takes what the parent sends and returns what it
gets, both JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import harness

_MARK = "RESULT "  # libraries print lines of their own


def environment() -> dict[str, str]:
    """Of a child: it finds this repository, and TensorFlow keeps quiet."""
    python_path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": python_path}


def ask(module: str, **request: Any) -> Any:
    """What `main(**request)` of a module returns in a process of its own.

    Raises:
      CheckFailed: the process failed; the message ends with the last lines that it printed.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    done = subprocess.run(
        command, env=environment(), encoding="utf-8", errors="replace", capture_output=True, check=False
    )
    results = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not results:
        last = (done.stdout + done.stderr).strip().splitlines()[-15:]
        raise harness.CheckFailed(f"{module} with {request} ended with code {done.returncode}:\n" + "\n".join(last))
    return json.loads(results[-1].removeprefix(_MARK))


def answer(main: Callable[..., Any]) -> None:
    """The child's side of `ask`."""
    harness.run(lambda: print(_MARK + json.dumps(main(**json.loads(sys.argv[1]))), flush=True))
