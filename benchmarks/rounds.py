"""Contenders in different interpreters that still take turns: each process times its own steps when it is asked to.

The parent writes one line of JSON per request, the child answers with one. Standard library and NumPy only: a child may
run in an interpreter that has none of this project's libraries.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import children, harness

_MARK = "ANSWER "  # libraries print lines of their own


def serve(contenders: Mapping[str, Callable[[int], Any]], check: Callable[[], Any], about: Mapping[str, Any]) -> None:
    """The child: says `about`, then answers until its input ends.

    Args:
      contenders: step(n) by name, n counting from 0 for each.
      check: what the request "check" answers.
      about: the first answer.
    """
    turns = dict.fromkeys(contenders, 0)
    print(_MARK + json.dumps(about), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "check":
            answer = check()
        else:
            answer = []
            for _ in range(request["steps"]):
                begin = time.perf_counter()
                contenders[request["contender"]](turns[request["contender"]])
                answer.append(time.perf_counter() - begin)
                turns[request["contender"]] += 1
        print(_MARK + json.dumps(answer), flush=True)


class Remote:
    """The parent's handle of a child that runs a module which ends in `serve`. A context manager.

    Args:
      python: the interpreter.
      module: of benchmarks/.
      request: JSON-able, the child's first argument.

    Attributes:
      about: the child's first answer.
    """

    def __init__(self, python: str, module: str, request: Mapping[str, Any]):
        self._name = f"{python} -m {module}"
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(request)], env=children.environment(), cwd=harness.ROOT,
            encoding="utf-8", errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.about = self._answer()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **request: Any) -> Any:
        """The child's answer to {"do": "check"} or {"do": "round", "contender": name, "steps": n}."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        for line in self._process.stdout or ():
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise harness.CheckFailed(f"{self._name} ended with code {self._process.wait()}; its errors stand above.")
