"""Turns of variants in different interpreters: each process times its own steps on request.

The parent writes one line of JSON per request, and the child answers with one line. This module imports only the
standard library, NumPy and psutil, because a child may run in an interpreter without TensorFlow.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import children, harness

_MARK = "ANSWER "  # separates the answer from lines that libraries print


def serve(variants: Mapping[str, Callable[[int], Any]], check: Callable[[], Any], facts: Mapping[str, Any]) -> None:
    """Runs the child: sends `facts`, then answers requests until its input ends.

    Args:
      variants: step(n) by name, where n counts the steps of each variant from 0.
      check: Function whose result answers the request "check".
      facts: First answer, such as versions or the name of a missing library.
    """
    turns = dict.fromkeys(variants, 0)
    print(_MARK + json.dumps(facts), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "check":
            answer = check()
        else:
            answer = []
            for _ in range(request["steps"]):
                begin = time.perf_counter()
                variants[request["variant"]](turns[request["variant"]])
                answer.append(time.perf_counter() - begin)
                turns[request["variant"]] += 1
        print(_MARK + json.dumps(answer), flush=True)


class Remote:
    """The parent's handle of a child whose module calls `serve`. A context manager.

    Args:
      python: Path of the interpreter.
      module: Name of a module of benchmarks/.
      request: First argument of the child, which must have a JSON form.

    Attributes:
      facts: First answer of the child.
    """

    def __init__(self, python: str, module: str, request: Mapping[str, Any]):
        self._name = f"{python} -m {module}"
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(request)], env=children.environment(), cwd=harness.ROOT,
            encoding="utf-8", errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.facts = self._answer()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **request: Any) -> Any:
        """Returns the child's answer to {"do": "check"} or {"do": "round", "variant": name, "steps": n}."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        for line in self._process.stdout or ():
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise harness.CheckFailed(f"{self._name} ended with code {self._process.wait()}. Its errors are printed above.")
