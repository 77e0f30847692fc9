"""The end of a rank: all ranks end together, none exits with 0 if another failed, and the cause is printed last.

Horovod aborts the collectives of all ranks when one rank ends, and the others then fail with a traceback of Horovod. An
ended program therefore waits until the others have ended. If another rank waits for it in a collective,
both end with an error. A failing rank first reports its cause to the others. Threads of Horovod and TensorFlow may hang
the exit of a failing rank, so an alarm ends it.
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
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tf_fusedrec.exchange.watchdog import GIVE_UP_AFTER, Board, Watchdog, left_behind
from tf_fusedrec.ops import watch_termination

_EXIT_WITHIN_S = 60  # time that a failing rank has for its exit handlers
_CAUSE_WAIT_S = 3.0  # wait for another rank's cause after Horovod aborted a collective
_CAUSE_OF_RUNNING_S = 60.0  # the same if that rank runs, and ended the exchange before its program heard of the failure
# Matches errors of a collective aborted by another rank's end. Gloo's errors name its files.
_HOROVOD_ABORT = re.compile(r"Horovod|gloo/")
# Matches an abort that blames no rank. If no rank reports a cause, one was unable to.
_RANK_LOST = re.compile(r"Horovod has been shut down|gloo/")
_RUNNING = re.compile(r"it has said so itself \(gloo/")
_LOST_RANK = re.compile(r"the exchange has ended at rank (\d+)")  # of the engine Gloo
_LOST = (
    "{} ended without naming a cause. It was killed, as Linux does when memory runs out, or its host or network "
    "was lost. Look for the rank's last lines above, and for killed processes in the kernel log of its host (dmesg)."
)
_MAX_CAUSE = 600  # characters
_TERMINATED_WITHIN_S = 20.0  # limit on on_termination, for example where another thread keeps the GIL
# Lines of TensorFlow's messages that give the place of an error, not its cause.
_PLACES = ("Graph execution error", "Detected at node", "<stack traces unavailable>", "File ", "[[", "Traceback")


class Ending:
    """Exit handlers of this rank.

    An ended rank reports after report_after_s that it waits for the others, and exits without them after
    gives_up_after_s. SIGALRM ends a failing rank exit_within_s after it has reported its cause.
    """

    def __init__(
        self, rank: int, board: Board, watchdog: Watchdog, *, report_after_s: float, gives_up_after_s: float,
        exit_within_s: int = _EXIT_WITHIN_S,
    ):  # fmt: skip
        self._rank, self._board, self._watchdog = rank, board, watchdog
        self._report_after_s, self._gives_up_after_s = report_after_s, gives_up_after_s
        self._exit_within_s = exit_within_s
        self._process, self._failed, self._previous_hook = os.getpid(), False, sys.excepthook
        self._exit: list[Any] = []  # the argument of the sys.exit that ends the program

    def install(self, own_failure: Callable[[], str | None] | None = None) -> None:
        """Installs the handlers. Call it after hvd.init, so that Horovod's exit handler runs after these.

        own_failure: Returns why the engine of this rank has ended the exchange of all ranks, or None. The step that
        failed may go on, with a collective of Horovod that the other ranks do not join.
        """
        self._watchdog.own_failure = own_failure
        sys.excepthook = self._on_exception
        sys.exit = self._on_sys_exit  # exit handlers get no exit code
        atexit.register(self._on_exit)
        self._watchdog.on_termination = self._on_termination
        watch_termination(self._rank, _TERMINATED_WITHIN_S)

    def _on_termination(self, thrown: str) -> None:
        """Prints why Horovod's thread ends this process, and ends it. Runs in the watchdog's thread.

        With process sets, the thread ends this way when it loses a rank, and no collective returns an error.
        """
        first = self._board.first_failure(wait_s=_CAUSE_WAIT_S)
        if first is None:
            message = (
                f"rank {self._rank}: Horovod has lost its connection to another rank, and ends this process. "
                f"{self._silence(self._silent())}It said: {thrown}. Look for the lines of the rank that ended first, "
                "or was killed."
            )
        else:
            message = _sentence(first)
        self._watchdog.say_last(message)
        os._exit(1)

    def _on_exception(self, type_: Any, error: BaseException, trace: types.TracebackType | None) -> None:
        self._failed = os.getpid() == self._process
        if not self._failed or issubclass(type_, KeyboardInterrupt):
            self._previous_hook(type_, error, trace)
            return
        text = _text(error)
        aborted = _HOROVOD_ABORT.search(text) is not None
        wait_s = _CAUSE_OF_RUNNING_S if _RUNNING.search(text) else _CAUSE_WAIT_S if aborted else 0.0
        first = self._board.first_failure(wait_s)
        if first is None:
            lost, stopped_s = _LOST_RANK.search(text), self._watchdog.stopped_s()
            silent = self._silent() if aborted else {}
            if lost:  # a busy host may delay the heartbeats of others
                silent = {rank: age for rank, age in silent.items() if rank == lost[1] or age > self._gives_up_after_s}
            if lost and stopped_s > self._gives_up_after_s:  # the other ranks have ended meanwhile
                cause = f"it was stopped for {stopped_s:.0f} s; the limit is {self._gives_up_after_s} s."
                first = self._board.report_failure(self._rank, cause)
            # A rank that was killed is silent, too. One that has lost a silent rank may be the next to end.
            elif _RANK_LOST.search(text) and (not silent or (lost and lost[1] in silent)):
                first = self._board.report_failure(None, _LOST.format(f"rank {lost[1]}" if lost else "a rank"))
            else:
                first = self._board.report_failure(self._rank, self._silence(silent) + cause_of(error))
        if first["rank"] == self._rank or not aborted:
            self._previous_hook(type_, error, trace)
        self._fail(first)

    def _fail(self, first: Mapping[str, Any]) -> None:
        """Prints the first failure. The kernel ends this process after a while: its threads may deadlock."""
        self._watchdog.say_last(_sentence(first))
        if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(self._exit_within_s)

    def _silent(self) -> Mapping[str, float]:
        """Seconds without a sign of life, by rank, of the silent ranks."""
        return self._watchdog.look().get("silent", {})

    def _silence(self, silent: Mapping[str, float]) -> str:
        """Words that name the silent ranks for which Horovod ended the job; "" if no rank is silent."""
        named = ", ".join(f"rank {rank} has given no sign of life for {age:.0f} s" for rank, age in silent.items())
        limit = f"Horovod waits {self._gives_up_after_s} s ({GIVE_UP_AFTER})"
        return f"{named}; {limit}. " if named else ""

    def _on_sys_exit(self, status: Any = None) -> NoReturn:
        raise _Exit(status, self._exit)

    def _on_exit(self) -> None:
        if self._failed or os.getpid() != self._process:
            return
        if self._exit and self._exit[-1] not in (None, 0):
            cause = f"its program called sys.exit({_text(self._exit[-1])})."
            self._fail(self._board.report_failure(self._rank, cause))
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
                self._watchdog.end_at_once(_sentence(first))
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
    """Adds its argument to a list when it ends the program. If the program catches it, the list stays empty.

    Python drops an exception that ends the main program after the last frame and before the exit handlers. A caught
    exception is dropped inside a frame.
    """

    def __init__(self, status: Any, ends: list[Any]):
        super().__init__(status)
        self._ends = ends

    def __del__(self) -> None:
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            self._ends.append(self.code)


def _text(value: Any) -> str:
    """The text of an exception, even if its __str__ raises."""
    try:
        return str(value)
    except Exception as error:
        return f"its __str__ raises {type(error).__name__}"


def _sentence(first: Mapping[str, Any]) -> str:
    """The sentence about the first failure of a job, as on the board."""
    return first["cause"] if first["rank"] is None else f"rank {first['rank']} failed first: {first['cause']}"


def cause_of(error: BaseException) -> str:
    """An exception in one line, without the lines that give its place."""
    lines = [line.strip() for line in _text(error).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith(_PLACES))
    return f"{type(error).__name__}: {message}"[:_MAX_CAUSE]


def start_watchdog(
    size: int, members: Mapping[str, tuple[int, ...]], report_after_s: float | None, give_up_after_s: int | None
) -> Ending | None:
    """Starts the watchdog before the ranks join, so that it reports a rank that does not join. See collectives.init.

    Returns:
      Exit handlers to install after the ranks have joined; None for a job without a board.
    """
    if give_up_after_s is not None:
        os.environ[GIVE_UP_AFTER] = str(give_up_after_s)
    # Horovod's default of 30 s would end a job with a slow disk.
    gives_up = int(os.environ.setdefault(GIVE_UP_AFTER, "600"))
    if report_after_s is None:
        report_after_s = float(os.environ.get("FUSEDREC_REPORT_AFTER_SECONDS", 60.0))
    if report_after_s <= 0 or gives_up <= 0:
        raise ValueError(
            f"report_after_s and give_up_after_s must be positive, got {report_after_s} and {gives_up}. Use a large "
            "number of seconds to silence the reports."
        )
    rank, board = int(os.environ["HOROVOD_RANK"]), Board.of_job()
    limits: Any = {"report_after_s": report_after_s, "gives_up_after_s": gives_up}
    watchdog = Watchdog(rank, size, board, members=members, **limits)
    watchdog.start()
    return None if board is None else Ending(rank, board, watchdog, **limits)
