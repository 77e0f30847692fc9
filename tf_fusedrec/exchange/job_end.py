"""The end of a rank. All ranks end together, no rank exits with 0 if another failed, and the cause is printed last.

Horovod aborts the collectives of all ranks when one rank ends, and every other rank then fails with a traceback of
Horovod's. A rank whose program has ended therefore waits until the others have ended, too. If another rank waits for it
in a collective, both end with an error. A failing rank first reports its cause to the others. Threads of Horovod and
TensorFlow may block the exit of a failing rank for ever, so an alarm ends it.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from tf_fusedrec.exchange.watchdog import Board, Watchdog, left_behind
from tf_fusedrec.ops import watch_termination

_EXIT_WITHIN_S = 60  # time that a failing rank has for its exit handlers
_CAUSE_WAIT_S = 3.0  # wait for another rank's cause after Horovod aborted a collective
_HOROVOD_ABORT = re.compile(r"Horovod|gloo/")  # matches errors of a collective aborted by another rank's end
# Matches the abort alone, whose text blames no rank. If no rank reports a cause, one could not.
_RANK_LOST = re.compile(r"Horovod has been shut down|gloo/")
_LOST = (
    "a rank ended without naming a cause. It was killed, as Linux does when memory runs out, or its host or network "
    "was lost. Remedy: look for the rank's last lines above, and for killed processes in the log of its host's kernel "
    "(dmesg)."
)
_MAX_CAUSE = 600  # characters
_TERMINATED_WITHIN_S = 20.0  # limit on on_termination, for example where another thread keeps Python's lock
# Lines of TensorFlow's messages that give the place of an error, not its cause.
_PLACES = ("Graph execution error", "Detected at node", "<stack traces unavailable>", "File ", "[[", "Traceback")


class Ending:
    """Exit handlers of this rank.

    Args:
      rank: Rank of this process.
      board: Board of the job.
      watchdog: Watchdog of this process.
      report_after_s: Seconds after which an ended rank reports that it waits for the others to end.
      gives_up_after_s: Seconds after which an ended rank leaves without the others.
      exit_within_s: Seconds after which a failing rank that has reported its cause is ended by SIGALRM.
    """

    def __init__(
        self, rank: int, board: Board, watchdog: Watchdog, *, report_after_s: float, gives_up_after_s: float,
        exit_within_s: int = _EXIT_WITHIN_S,
    ):  # fmt: skip
        self._rank, self._board, self._watchdog = rank, board, watchdog
        self._report_after_s, self._gives_up_after_s = report_after_s, gives_up_after_s
        self._exit_within_s = exit_within_s
        self._process, self._failed, self._before = os.getpid(), False, sys.excepthook
        self._exit: list[Any] = []  # the argument of the sys.exit that ends the program

    def install(self) -> None:
        """Installs the handlers. Call it after hvd.init, so that Horovod's own exit handler runs after these."""
        sys.excepthook = self._on_exception
        # Python tells its exit handlers no exit code.
        sys.exit = self._on_sys_exit
        atexit.register(self._on_exit)
        self._watchdog.on_termination = self._on_termination
        watch_termination(self._rank, _TERMINATED_WITHIN_S)

    def _on_termination(self, thrown: str) -> None:
        """Says why Horovod's thread ends this process, and ends it. Runs in the watchdog's thread.

        Where there are sets of ranks, the thread ends so when it loses a rank, and no collective returns an error.
        """
        first = self._board.first_failure(wait_s=_CAUSE_WAIT_S)
        if first is None:
            said = f"rank {self._rank}: Horovod has lost its connection to another rank, and ends this process. "
            said += f"{self._silence()}It said: {thrown}. Remedy: the rank that ended first says why, or it was killed."
        else:
            said = _told(first)
        print(f"tf_fusedrec: {said}", file=sys.stderr, flush=True)
        os._exit(1)

    def _on_exception(self, kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        self._failed = os.getpid() == self._process
        if not self._failed or issubclass(kind, KeyboardInterrupt):
            self._before(kind, value, trace)
            return
        text = _text(value)
        aborted = _HOROVOD_ABORT.search(text) is not None
        first = self._board.first_failure(wait_s=_CAUSE_WAIT_S if aborted else 0.0)
        if first is None:
            silence = self._silence() if aborted else ""
            if _RANK_LOST.search(text) and not silence:
                first = self._board.report_failure(None, _LOST)
            else:
                first = self._board.report_failure(self._rank, silence + cause_of(kind, value))
        if first["rank"] == self._rank or not aborted:
            self._before(kind, value, trace)
        print(f"tf_fusedrec: {_told(first)}", file=sys.stderr, flush=True)
        self._limit_exit()

    def _limit_exit(self) -> None:
        """Lets the kernel end this process after a while: its threads may hold Python's lock or wait for each other."""
        if threading.current_thread() is threading.main_thread():  # Python allows no other thread to set a handler.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(self._exit_within_s)

    def _silence(self) -> str:
        """Words that name the silent ranks for which Horovod ended the job; "" if no rank is silent."""
        silent = self._watchdog.look().get("silent", {})
        named = ", ".join(f"rank {rank} has given no sign of life for {age:.0f} s" for rank, age in silent.items())
        limit = f"Horovod waits {self._gives_up_after_s} s (HOROVOD_GLOO_TIMEOUT_SECONDS)"
        return f"{named}; {limit}. " if named else ""

    def _on_sys_exit(self, status: Any = None) -> NoReturn:
        raise _Exit(status, self._exit)

    def _on_exit(self) -> None:
        if self._failed or os.getpid() != self._process:
            return
        if self._exit and self._exit[-1] not in (None, 0):
            cause = f"its program called sys.exit({_text(self._exit[-1])})."
            told = _told(self._board.report_failure(self._rank, cause))
            print(f"tf_fusedrec: {told}", file=sys.stderr, flush=True)
            self._limit_exit()
            return
        self._watchdog.ended = True
        began, pause, reported = time.monotonic(), 0.05, False
        while self._board.put(f"ended-{self._rank}", True):  # A failing put means that the launcher is gone.
            summary = self._watchdog.look()
            waited_s = time.monotonic() - began
            if summary.get("over") or waited_s > self._gives_up_after_s:
                return
            first = self._board.first_failure()
            if first is not None:
                self._watchdog.end_at_once(_told(first))
            reason = left_behind(summary) if summary else None
            if reason is not None:
                self._watchdog.end_at_once(reason)
            if waited_s > self._report_after_s and not reported:
                reported = True
                self._watchdog.say(
                    f"its program has ended, and it waits for the other ranks; ranks {summary.get('ended', [])} have "
                    f"ended. It leaves without them after {self._gives_up_after_s} s"
                )
            time.sleep(pause)
            pause = min(1.3 * pause, 1.0)


class _Exit(SystemExit):
    """Adds its argument to a list when it ends the program. A program that catches it goes on, and the list is empty.

    Python drops the exception when it ends the main program, after the last frame of the program and before the exit
    handlers. Whoever catches it does so in a frame.
    """

    def __init__(self, status: Any, ends: list[Any]):
        super().__init__(status)
        self._ends = ends

    def __del__(self) -> None:
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            self._ends.append(self.code)


def _text(value: Any) -> str:
    """The text of an exception, also of one that has none."""
    try:
        return str(value)
    except Exception as error:
        return f"its __str__ raises {type(error).__name__}"


def _told(first: Mapping[str, Any]) -> str:
    """The sentence about the first failure of a job, as the board holds it."""
    return first["cause"] if first["rank"] is None else f"rank {first['rank']} failed first: {first['cause']}"


def cause_of(kind: type[BaseException], value: BaseException) -> str:
    """An exception in one line, without the lines that give its place."""
    lines = [line.strip() for line in _text(value).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith(_PLACES))
    return f"{kind.__name__}: {message}"[:_MAX_CAUSE]


REPORT_AFTER_S = 60.0
GIVE_UP_AFTER_S = 600  # Horovod's own default of 30 s would end a job with a slow disk.
_REPORT_AFTER = "FUSEDREC_REPORT_AFTER_SECONDS"
_GIVE_UP_AFTER = "HOROVOD_GLOO_TIMEOUT_SECONDS"


def start_watchdog(
    size: int, members: Mapping[str, tuple[int, ...]], report_after_s: float | None, give_up_after_s: int | None
) -> Ending | None:
    """Starts the watchdog. Call it before hvd.init, so that it reports a rank that does not join.

    Args:
      size: Number of ranks.
      members: See Watchdog.
      report_after_s, give_up_after_s: See collectives.init.

    Returns:
      Exit handlers to install after hvd.init; None for a job without a board.

    Raises:
      ValueError: a limit is not positive.
    """
    if give_up_after_s is not None:
        os.environ[_GIVE_UP_AFTER] = str(give_up_after_s)
    gives_up = int(os.environ.setdefault(_GIVE_UP_AFTER, str(GIVE_UP_AFTER_S)))
    if report_after_s is None:
        report_after_s = float(os.environ.get(_REPORT_AFTER, REPORT_AFTER_S))
    if report_after_s <= 0 or gives_up <= 0:
        raise ValueError(
            f"report_after_s and give_up_after_s must be positive, got {report_after_s} and {gives_up}. To silence the "
            "reports, use a large number of seconds."
        )
    rank, board = int(os.environ["HOROVOD_RANK"]), Board.of_job()
    watchdog = Watchdog(
        rank, size, board, report_after_s=report_after_s, gives_up_after_s=gives_up, members=members
    )  # fmt: skip
    watchdog.start()
    if board is None:
        return None
    return Ending(rank, board, watchdog, report_after_s=report_after_s, gives_up_after_s=gives_up)
