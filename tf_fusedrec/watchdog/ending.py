"""The end of a rank: all ranks end together, none with exit code 0 when another failed, and the cause stands last.

Horovod ends the collectives of all ranks when one rank ends, and every rank then dies under a traceback of Horovod's.
So a rank whose program has ended waits until the others have ended too, or until one waits for it in a collective,
which is an error of both. A rank that fails tells the others why before its end ends theirs.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
import types

from tf_fusedrec.watchdog.board import Board
from tf_fusedrec.watchdog.summary import left_behind
from tf_fusedrec.watchdog.watchdog import Watchdog

_CAUSE_S = 3.0  # that a rank waits for another rank's cause, when Horovod ended its collective
_OF_HOROVOD = re.compile(r"Horovod|gloo/")  # in messages of a collective that another rank's end has ended
_LONGEST_CAUSE = 600  # letters
# Lines of TensorFlow's messages that say where, not what.
_WHERE = ("Graph execution error", "Detected at node", "<stack traces unavailable>", "File ", "[[", "Traceback")


class Ending:
    """What this rank does when its program ends.

    Args:
      rank: of this process.
      board: of the job.
      watchdog: of this process.
      report_after_s: seconds after which a rank that waits for the others to end says so.
      gives_up_after_s: seconds after which it ends without them.
    """

    def __init__(
        self, rank: int, board: Board, watchdog: Watchdog, *, report_after_s: float, gives_up_after_s: float
    ):  # fmt: skip
        self._rank, self._board, self._watchdog = rank, board, watchdog
        self._report_after_s, self._gives_up_after_s = report_after_s, gives_up_after_s
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
        of_horovod = _OF_HOROVOD.search(str(value)) is not None
        first = self._board.first_failure(wait_s=_CAUSE_S if of_horovod else 0.0)
        if first is None:
            silence = self._silence() if of_horovod else ""
            first = self._board.tell_failure(self._rank, silence + cause_of(kind, value))
        if first["rank"] == self._rank or not of_horovod:
            self._before(kind, value, trace)
        print(f"tf_fusedrec: rank {first['rank']} failed first: {first['cause']}", file=sys.stderr, flush=True)

    def _silence(self) -> str:
        """Which rank stood still, when that is why Horovod ended the job; "" when none did."""
        silent = self._watchdog.look().get("silent", {})
        named = ", ".join(f"rank {rank} has given no sign of life for {age:.0f} s" for rank, age in silent.items())
        limit = f"Horovod waits {self._gives_up_after_s} s (HOROVOD_GLOO_TIMEOUT_SECONDS)"
        return f"{named}; {limit}. " if named else ""

    def _on_exit(self) -> None:
        if self._failed or os.getpid() != self._process:
            return
        self._watchdog.ended = True
        began, pause, reported = time.monotonic(), 0.05, False
        while self._board.put(f"ended-{self._rank}", True):  # else the launcher is gone
            summary = self._watchdog.look()
            waited_s = time.monotonic() - began
            if summary.get("over") or waited_s > self._gives_up_after_s:
                return
            first = self._board.first_failure()
            if first is not None:
                self._watchdog.end_at_once(f"rank {first['rank']} failed first: {first['cause']}")
            reason = left_behind(summary) if summary else None
            if reason is not None:
                self._watchdog.end_at_once(reason)
            if waited_s > self._report_after_s and not reported:
                reported = True
                self._watchdog.say(
                    f"its program has ended, and it waits for the other ranks: {summary.get('ended', [])} have ended. "
                    f"After {self._gives_up_after_s} s it leaves without them"
                )
            time.sleep(pause)
            pause = min(1.3 * pause, 1.0)


def cause_of(kind: type[BaseException], value: BaseException) -> str:
    """An exception in one line, without the lines that say where."""
    lines = [line.strip() for line in str(value).splitlines()]
    said = " ".join(line for line in lines if line and not line.startswith(_WHERE))
    return f"{kind.__name__}: {said}"[:_LONGEST_CAUSE]
