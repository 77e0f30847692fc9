"""The end of a rank: all ranks end together, none with exit code 0 when another failed, and the cause stands last.

Horovod ends the collectives of all ranks when one rank ends, and every rank then dies under a traceback of Horovod's.
So a rank whose program has ended waits until the others have ended too, or until one waits for it in a collective,
which is an error of both. A rank that fails tells the others why before its end ends theirs.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import types
from typing import Any

from tf_fusedrec.watchdog.board import Board
from tf_fusedrec.watchdog.summary import left_behind
from tf_fusedrec.watchdog.watchdog import Watchdog

_CAUSE_S = 3.0  # that a rank waits for another rank's cause, when Horovod ended its collective
_LONGEST_CAUSE = 600  # letters
# Lines of TensorFlow's messages that say where, not what.
_WHERE = ("Graph execution error", "Detected at node", "<stack traces unavailable>", "File ", "[[", "Traceback")


class Ending:
    """What this rank does when its program ends.

    Args:
      rank: of this process.
      board: of the job.
      watchdog: of this process.
      patience_s: seconds after which a silent rank is not waited for any more.
    """

    def __init__(self, rank: int, board: Board, watchdog: Watchdog, *, patience_s: float):
        self._rank, self._board, self._watchdog, self._patience_s = rank, board, watchdog, patience_s
        self._process, self._failed, self._before = os.getpid(), False, sys.excepthook

    def install(self) -> None:
        """Call it when Horovod has joined: its own end must come behind this one."""
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def _on_exception(self, kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        self._failed = os.getpid() == self._process
        if not self._failed or issubclass(kind, KeyboardInterrupt):
            self._before(kind, value, trace)
            return
        first = self._first_failure(wait_s=_CAUSE_S if "Horovod" in str(value) else 0.0)
        if first is None:
            first = {"rank": self._rank, "cause": cause_of(kind, value)}
            self._board.put("failure", first)
        if first["rank"] == self._rank or "Horovod" not in str(value):
            self._before(kind, value, trace)
        print(f"tf_fusedrec: rank {first['rank']} failed first: {first['cause']}", file=sys.stderr, flush=True)

    def _first_failure(self, wait_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + wait_s
        while True:
            first = self._board.get("failure")
            if first is not None or time.monotonic() >= deadline:
                return first
            time.sleep(0.2)

    def _on_exit(self) -> None:
        if self._failed or os.getpid() != self._process:
            return
        self._watchdog.ended = True
        pause, silent_since = 0.05, None
        while self._board.put(f"ended-{self._rank}", True):  # else the launcher is gone
            summary = self._watchdog.look()
            if summary.get("over"):
                return
            first = self._board.get("failure")
            if first is not None:
                self._watchdog.end_at_once(f"rank {first['rank']} failed first: {first['cause']}")
            reason = left_behind(summary) if summary else None
            if reason is not None:
                self._watchdog.end_at_once(reason)
            if summary and not summary["silent"]:
                silent_since = None
            elif silent_since is None:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > self._patience_s:
                return
            time.sleep(pause)
            pause = min(1.3 * pause, 1.0)


def cause_of(kind: type[BaseException], value: BaseException) -> str:
    """An exception in one line, without the lines that say where."""
    lines = [line.strip() for line in str(value).splitlines()]
    said = " ".join(line for line in lines if line and not line.startswith(_WHERE))
    return f"{kind.__name__}: {said}"[:_LONGEST_CAUSE]
