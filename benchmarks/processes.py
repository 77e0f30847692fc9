"""Processes that a benchmark starts: none outlives it, whether it ends by itself, by an error, or by a signal.

SIGTERM and SIGHUP would end a Python program on the spot, with its children left running and its network namespaces in
place. Inside `signals_unwind` they raise SystemExit instead, so that every `with` block is left. A child that cannot be
ended so, because its parent was killed, gets SIGTERM from the kernel.
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

_GRACE_S = 10.0  # that children have to end after SIGTERM
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the body by SystemExit with the code that shells report."""

    def leave(number: int, _: Any) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # the way out is not interrupted
        sys.exit(128 + number)

    before = {one: signal.signal(one, leave) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A running child, and an end to it and to all that it started when the body is left. Options as Popen's."""
    with subprocess.Popen(
        command, encoding="utf-8", errors="replace", preexec_fn=_end_with_parent, **options
    ) as child:  # fmt: skip
        try:
            yield child
            child.wait()
        finally:
            _end(child)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run(check=False), with the two streams captured unless options say where they go."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, **{**pipes, **options}) as child:
        stdout, stderr = child.communicate()
    return subprocess.CompletedProcess(list(command), child.returncode, stdout, stderr)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(child: subprocess.Popen[str]) -> None:
    """Ends a child that still runs, with its descendants: by SIGTERM, which horovodrun passes on, then by SIGKILL."""
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
