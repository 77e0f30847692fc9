"""The processes that a benchmark starts. They end with the benchmark, however it ends.

SIGTERM and SIGHUP end a Python program at once: its children keep running and its network namespaces stay. Inside
`signals_unwind` the signals raise SystemExit, so that every `with` block cleans up. The kernel sends SIGTERM to the
children of a parent that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

_GRACE_S = 10.0  # time for children to end after SIGTERM
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


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


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command as subprocess.run(check=False) does. Captures both streams unless the options redirect them."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, **{**pipes, **options}) as child:
        stdout, stderr = child.communicate()
    return subprocess.CompletedProcess(list(command), child.returncode, stdout, stderr)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(child: subprocess.Popen[str]) -> None:
    """Ends a running child and its descendants with SIGTERM, which horovodrun passes on, and then with SIGKILL."""
    if child.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(child.pid).children(recursive=True)
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    child.kill()
