"""The processes of a benchmark: children, ranks, and peers in other interpreters. They end with it, however it ends.

    processes.ask(case, rows=3)                                 case(rows=3) in a process of its own
    processes.ask_ranks(step, 2, rows=3)                        the same on two ranks; rank 0 answers
    with processes.Remote(python, peer, rows=3) as side: ...    peer(rows=3), which calls `serve`

A child imports the function by its module. Requests and answers are JSON. This module needs the standard library and
NumPy only, because the interpreter of a peer may have no TensorFlow.

SIGTERM and SIGHUP end a Python program at once: its children keep running and its network namespaces stay. In `program`
the signals raise SystemExit, so that every `with` block cleans up. The kernel sends SIGTERM to the children of a parent
that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from benchmarks.harness.harness import ROOT, CheckFailed

_GRACE_S = 10.0  # time for children to end after SIGTERM
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_MARK = "RESULT "  # separates an answer from lines that libraries print
_NOTHING: Mapping[str, str] = MappingProxyType({})


def program(main: Callable[[], object]) -> None:
    """Runs a main function. A failed check is printed and ends the process with code 1. A rank keeps its signals."""
    try:
        with contextlib.nullcontext() if "HOROVOD_RANK" in os.environ else signals_unwind():
            main()
    except CheckFailed as failure:
        print(f"CHECK FAILED: {failure}", file=sys.stderr, flush=True)
        sys.exit(1)


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP in the body into SystemExit with the code that shells report."""

    def leave(number: int, _: Any) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # nothing interrupts the cleanup
        sys.exit(128 + number)

    before = {one: signal.signal(one, leave) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a child. Ends the child and its descendants when the body is left. Takes the options of Popen."""
    with subprocess.Popen(
        command, encoding="utf-8", errors="replace", preexec_fn=_end_with_parent, **options
    ) as child:  # fmt: skip
        try:
            yield child
            child.wait()
        finally:
            _end(child)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(child: subprocess.Popen[str]) -> None:
    """Ends a running child and its descendants with SIGTERM, which horovodrun passes on, and then with SIGKILL."""
    if child.poll() is not None:
        return
    import psutil  # a machine with a GPU may lack it, and ends no ranks

    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(child.pid).children(recursive=True)
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    child.kill()


def environment() -> dict[str, str]:
    """Returns the environment of a child, which finds this repository and keeps TensorFlow quiet."""
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": python_path}


def command_of(python: str, function: Callable[..., Any], request: Mapping[str, Any]) -> list[str]:
    """Returns the command that runs function(**request) and prints what it returns, unless that is None."""
    spec = sys.modules["__main__"].__spec__ if function.__module__ == "__main__" else None
    name = f"{spec.name if spec else function.__module__}:{function.__qualname__}"
    return [python, "-m", "benchmarks.harness.processes", name, json.dumps(request)]


def _answer() -> None:
    """Runs the function of command_of. Of several ranks, the first one prints what it returns."""
    module, _, name = sys.argv[1].partition(":")
    answer = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    if answer is not None and os.environ.get("HOROVOD_RANK", "0") == "0":
        print(_MARK + json.dumps(answer), flush=True)


def ask(function: Callable[..., Any], *, variables: Mapping[str, str] = _NOTHING, **request: Any) -> Any:
    """Runs function(**request) in a new process, with environment `variables`, and returns its answer.

    Raises:
      CheckFailed: The process failed. The message ends with the last lines that it printed.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = command_of(sys.executable, function, request)
    with started(command, env={**environment(), **variables}, cwd=ROOT, **pipes) as child:
        stdout, stderr = child.communicate()
    results = [line for line in stdout.splitlines() if line.startswith(_MARK)]
    if child.returncode != 0 or not results:
        last = "\n".join((stdout + stderr).strip().splitlines()[-15:])
        raise CheckFailed(f"{function.__qualname__} with {request} ended with code {child.returncode}:\n{last}")
    return json.loads(results[-1].removeprefix(_MARK))


def ask_ranks(
    function: Callable[..., Any], ranks: int, *, inside: Sequence[str] = (), options: Sequence[str] = (),
    variables: Mapping[str, str] = _NOTHING, timeout_s: float = 3600, **request: Any,
) -> Any:  # fmt: skip
    """Runs function(**request) on new ranks. Returns rank 0's answer and prints its lines.

    Args:
      inside: Words before the command, as network.inside makes them, that run it in a namespace.
      options, variables: Options of horovodrun, such as its hosts; environment variables.

    Raises:
      CheckFailed: horovodrun is missing, or the ranks failed or exceeded timeout_s. The message ends with the last
        lines that they printed.
    """
    horovodrun = pathlib.Path(sys.executable).parent / "horovodrun"
    if not horovodrun.exists():
        raise CheckFailed(f"{ranks} ranks need horovodrun, but it is not beside {sys.executable}. Install Horovod.")
    command = [str(horovodrun), "-np", str(ranks), "--gloo", *options, *command_of(sys.executable, function, request)]
    last: deque[str] = deque(maxlen=30)
    result = None
    with started(
        [*inside, *command], env={**environment(), **variables}, cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
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
    if not in_time or job.returncode or result is None:
        how = f"ended with {job.returncode}" if in_time else f"did not end within {timeout_s} s"
        raise CheckFailed(f"{ranks} ranks of {function.__qualname__} {how}:\n" + "\n".join(last))
    return result


# horovodrun prefixes a rank's line with the rank and the stream. Its own lines have no prefix.
_RANK = re.compile(r"^(?:\[(\d+)\]<stdout>:)?(.*)")


def serve(
    variants: Mapping[str, Callable[[Any], Any]], check: Callable[[], Any], facts: Mapping[str, Any], *,
    prepare: Callable[[int], Any] = int, turn: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:  # fmt: skip
    """Runs the child of a Remote: sends `facts`, then answers requests until its input ends.

    Args:
      variants: step(prepare(n)) by name, where n counts its steps from 0.
      check: Its result answers Remote.check.
      prepare: Makes a step's argument, outside of the measured time.
      turn: A context of all steps of one request.
    """
    turns = dict.fromkeys(variants, 0)
    print(_MARK + json.dumps(facts), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            print(_MARK + json.dumps(check()), flush=True)
            continue
        variant, seconds = request["variant"], []
        with turn():
            for _ in range(request["steps"]):
                argument = prepare(turns[variant])
                begin = time.perf_counter(), time.process_time()
                variants[variant](argument)
                seconds.append([time.perf_counter() - begin[0], time.process_time() - begin[1]])
                turns[variant] += 1
        print(_MARK + json.dumps(seconds), flush=True)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process in the body, so that its idle threads take no part of a core."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Remote:
    """A child in some interpreter, which times its own steps on request. A context manager.

    It runs function(**request) with environment `variables`. The function calls `serve`. `facts` is its first answer.
    """

    def __init__(
        self, python: str, function: Callable[..., Any], *, variables: Mapping[str, str] = _NOTHING, **request: Any
    ):
        self._process = subprocess.Popen(
            command_of(python, function, request), env={**environment(), **variables}, cwd=ROOT, encoding="utf-8",
            errors="replace", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._python, self._name = python, f"{python}, {function.__module__}.{function.__qualname__}"
        self.facts = self._read()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def check(self) -> Any:
        return self._ask({})

    def check_libraries(self) -> None:
        """Raises CheckFailed if `facts` name a missing library."""
        if missing := self.facts["missing"]:
            raise CheckFailed(f"--peer {self._python} lacks a library: {missing}. Install it there.")

    def times(self, variant: str, count: int) -> list[list[float]]:
        """Returns the wall-clock seconds and the processor seconds of each step."""
        return self._ask({"variant": variant, "steps": count})

    def steps(self, variant: str, count: int) -> list[float]:
        """Returns the wall-clock seconds of each step."""
        return [wall for wall, _ in self.times(variant, count)]

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        for line in self._process.stdout or ():
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise CheckFailed(f"{self._name} ended with code {self._process.wait()}. Its errors are printed above.")


if __name__ == "__main__":
    program(_answer)
