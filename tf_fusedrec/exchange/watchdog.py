"""A thread that reports which collective waits for which rank, because a blocked collective cannot report itself.

Ops record the begin and end of each collective (ops.collective_marks). The thread of each rank reads these records and
publishes them on the board from time to time. It publishes at once when a collective waits for more than a moment. Rank
0 reads the states of all ranks and publishes a summary, which the waiting ranks read. A rank whose heartbeat does not
change is stopped or out of reach. The thread sleeps between polls and uses less than a thousandth of a core.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tf_fusedrec.ops import Mark, collective_marks, termination

_SCOPE = "tf_fusedrec.watchdog"
_TIMEOUT_S = 5.0


class Board:
    """Values by key, shared by all ranks.

    Args:
      address, port: Address and port of the store.
    """

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port

    @classmethod
    def of_job(cls) -> Board | None:
        """The board of this job; None if the launcher has no store, like mpirun."""
        address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
        return cls(address, int(port)) if address and port else None

    def put(self, key: str, value: Any) -> bool:
        """Writes a JSON value. Returns whether the store accepted it."""
        return self._request("PUT", key, json.dumps(value).encode())[0]

    def get(self, key: str) -> Any:
        """Reads the value of a key; None if the key is missing or the store does not answer."""
        found, body = self._request("GET", key)
        return json.loads(body) if found else None

    def report_failure(self, rank: int | None, cause: str) -> dict[str, Any]:
        """Reports the cause of a rank's failure. Returns {"rank", "cause"} of the first reported failure.

        Args:
          rank: The failed rank; None if it is not known which one failed.
          cause: One sentence.
        """
        first = self.first_failure()
        if first is None:
            first = {"rank": rank, "cause": cause}
            self.put("failure", first)
        return first

    def first_failure(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """The first reported failure, {"rank", "cause"}; None if no rank reports one within wait_s seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            first = self.get("failure")
            if first is not None or time.monotonic() >= deadline:
                return first
            time.sleep(0.2)

    def _request(self, method: str, key: str, body: bytes | None = None) -> tuple[bool, bytes]:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"/{_SCOPE}/{key}", body)
            answer = connection.getresponse()
            return answer.status == http.client.OK, answer.read()
        except (OSError, http.client.HTTPException):
            return False, b""
        finally:
            connection.close()


State = Mapping[str, Any]
_MAX_NAMED = 8  # ranks that a sentence names one by one


def summarize(states: Mapping[int, State], silent: Mapping[int, float]) -> dict[str, Any]:
    """The summary that rank 0 publishes.

    Args:
      states: Last state of each rank, by rank. A rank without a report is missing.
      silent: Seconds since the last sign of life, by rank, for ranks that gave none in time.

    Returns:
      waits: For each collective in which a rank waits, its name, call and ranks, and `missing`: the calls begun by each
        rank that has not arrived.
      silent: Seconds of silence, by rank.
      idle: Last collective of each idle rank, by rank.
      ended: Ranks whose program has ended.
    """
    waits: dict[Any, dict[str, Any]] = {}
    for state in states.values():
        for name, call, ranks in state["waits"]:
            begun = {rank: states[rank]["begun"].get(name, 0) if rank in states else 0 for rank in ranks}
            missing = {str(rank): count for rank, count in begun.items() if count < call}
            waits[name, call, tuple(ranks)] = {"name": name, "call": call, "ranks": ranks, "missing": missing}
    return {
        "waits": list(waits.values()),
        "silent": {str(rank): seconds for rank, seconds in silent.items()},
        "idle": {str(rank): state["idle"] for rank, state in states.items() if state["idle"]},
        "ended": sorted(rank for rank, state in states.items() if state["ended"]),
    }


def whom_it_waits_for(summary: Mapping[str, Any], rank: int, name: str, call: int) -> str:
    """Words for the ranks that `rank` waits for in a call of a collective, such as "for rank 1, which ..."."""
    known = (wait for wait in summary["waits"] if (wait["name"], wait["call"]) == (name, call))
    wait = next((wait for wait in known if rank in wait["ranks"]), None)
    if wait is None:
        wait = {"ranks": [int(silent) for silent in summary["silent"]], "missing": {}}
        if not wait["ranks"]:
            return "for other ranks; which ones is not known yet"
    late = [_of_rank(str(other), wait, summary) for other in wait["ranks"]]
    named = [text for text in late if text]
    if not named:
        return "although all ranks have arrived: the network is slow, or Horovod is busy with another collective"
    more = f"; and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return "for " + "; ".join(named[:_MAX_NAMED]) + more


def _of_rank(rank: str, wait: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    silence, made = summary["silent"].get(rank), wait["missing"].get(rank)
    if silence:
        after = f", after {made} of {wait['call']} calls" if made is not None else ""
        return f"rank {rank}, whose last sign of life came {silence:.0f} s ago{after} (stopped, or its host is lost)"
    if made is None:
        return ""
    text = f"rank {rank}, which has made {made} of {wait['call']} calls"
    others = [one["name"] for one in summary["waits"] if int(rank) in one["ranks"] and rank not in one["missing"]]
    idle = summary["idle"].get(rank)
    if others:
        return f"{text} and is in collective {others[0]!r}"
    return f"{text} and has been in no collective for {idle[2]:.0f} s" if idle else text


def left_behind(summary: Mapping[str, Any]) -> str | None:
    """Words that name an ended rank for which others wait forever; None if there is no such rank."""
    for wait in summary["waits"]:
        gone = [rank for rank in wait["missing"] if int(rank) in summary["ended"]]
        if gone:
            return (
                f"the program of rank {gone[0]} has ended after {wait['missing'][gone[0]]} calls of collective "
                f"{wait['name']!r}, and other ranks wait in call {wait['call']}. Usually the ranks' data ended "
                "at different steps, or the program raised SystemExit. Remedy: tf_fusedrec.schedules.PipelinedModel "
                "instead of keras.Model, which ends all ranks together, or the same steps_per_epoch on all ranks."
            )
    return None


def keeps_waiting(summary: Mapping[str, Any], rank: int) -> list[str]:
    """Names of the collectives in which other ranks wait for `rank`."""
    return [wait["name"] for wait in summary["waits"] if str(rank) in wait["missing"]]


_MOMENT_S = 2.0  # A collective that waits longer is published on the board.
_RANKS_PER_S = 100  # bound on the ranks that rank 0 reads per second, and on the readers of the board


class Watchdog:
    """Watches the collectives of this process.

    Args:
      rank, size: Rank of this process, and number of ranks.
      board: Board of the job; None: reports give the waiting time, but not the awaited ranks.
      report_after_s: Seconds after which a waiting collective is reported, and again after each doubling.
      gives_up_after_s: Seconds after which Horovod ends a job with a silent rank, for the message.
      members: Participating ranks of each collective that not all ranks join, by its name.
    """

    def __init__(
        self, rank: int, size: int, board: Board | None, *, report_after_s: float, gives_up_after_s: int,
        members: Mapping[str, tuple[int, ...]],
    ):  # fmt: skip
        self._rank, self._size, self._board, self._members = rank, size, board, members
        self._report_after_s, self._gives_up_after_s = report_after_s, gives_up_after_s
        self._moment_s = min(_MOMENT_S, report_after_s / 2)
        self._look_every_s = max(min(1.0, report_after_s / 4), size / _RANKS_PER_S)
        self._tell_every_s = max(report_after_s / 3, 2 * self._look_every_s)
        self._beat, self._told_at = 0, 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # last heartbeat of each rank, and the time when it was new
        self._next_report_s: dict[tuple[str, int], float] = {}  # of reported collectives, by name and call
        self._awake_since = time.monotonic()
        self._idle_report_s = report_after_s
        self._lock = threading.Lock()
        self.ended = False  # whether the program of this rank has ended
        # Called with the text of the exception that C++ ends this process for.
        self.on_termination: Callable[[str], None] | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="tf_fusedrec watchdog", daemon=True).start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self.ended:
            time.sleep(self._look_every_s)
            now = time.monotonic()
            if now - before > max(3 * self._look_every_s, self._report_after_s / 2):
                self.say(f"it stood still itself for {now - before:.0f} s")
                self._awake_since = now
            before = now
            self.look()

    def look(self) -> dict[str, Any]:
        """Polls once: publishes this rank's state, reads the summary, and prints due reports. Returns the summary."""
        if self.on_termination is not None and (thrown := termination()) is not None:
            say_why, self.on_termination = self.on_termination, None  # which looks again
            say_why(thrown)
        with self._lock:
            marks = collective_marks()
            waiting = self._waiting(marks)
            # When the program ends, a thread of the input pipeline may still wait in a collective that nobody needs.
            long = [] if self.ended else [wait for wait in waiting if wait[1] > self._moment_s]
            now = time.monotonic()
            if self.ended or long or now - self._told_at > self._tell_every_s:
                self._publish(marks, long)
                summary = self._exchange_summary()
            else:
                summary = {}
            self._report_ends(marks)
            if long:
                self._report(long, summary)
            elif summary:
                self._report_idle(marks, summary)
            return summary

    def _waiting(self, marks: list[Mark]) -> list[tuple[Mark, float]]:
        """Unfinished collectives with their waiting times in seconds, longest first."""
        awake_s = time.monotonic() - self._awake_since
        found = [(mark, min(mark.begun_ago_s, awake_s)) for mark in marks if mark.begun > mark.ended]
        return sorted(found, key=lambda wait: -wait[1])

    def _publish(self, marks: list[Mark], long: list[tuple[Mark, float]]) -> None:
        """Publishes this rank's state. `long`: the collectives that have waited for more than a moment."""
        everyone = list(range(self._size))
        last = min((mark for mark in marks if mark.ended), key=lambda mark: mark.ended_ago_s, default=None)
        idle = last is not None and not any(mark.begun > mark.ended for mark in marks)
        self._beat += 1
        self._told_at = time.monotonic()
        self._state = {
            "beat": self._beat,
            "waits": [[m.name, m.ended + 1, list(self._members.get(m.name, everyone))] for m, _ in long],
            "begun": {mark.name: mark.begun for mark in marks},
            "idle": [last.name, last.ended, last.ended_ago_s] if last is not None and idle else None,
            "ended": self.ended,
        }
        if self._board is not None and self._rank != 0:
            self._board.put(f"rank-{self._rank}", self._state)

    def _exchange_summary(self) -> dict[str, Any]:
        """Publishes the summary on rank 0 and reads it on the others; empty if there is none."""
        if self._board is None:
            return {}
        if self._rank == 0:
            states = {0: self._state, **self._states_of_others()}
            summary = summarize(states, self._silent())
            summary["beat"] = self._beat
            summary["over"] = len(summary["ended"]) == self._size
            self._board.put("summary", summary)
            return summary
        summary = self._board.get("summary") or {}
        if summary:
            self._note_beat(0, summary["beat"])
            summary["silent"].update({str(rank): seconds for rank, seconds in self._silent().items()})
        return summary

    def _states_of_others(self) -> dict[int, Any]:
        states = {}
        for rank in range(1, self._size):
            state = self._board.get(f"rank-{rank}") if self._board is not None else None
            if state is not None:
                states[rank] = state
            self._note_beat(rank, state["beat"] if state is not None else 0)
        return states

    def _note_beat(self, rank: int, beat: int) -> None:
        if self._seen.get(rank, (None, 0.0))[0] != beat:
            self._seen[rank] = beat, time.monotonic()

    def _silent(self) -> dict[int, float]:
        now, limit = time.monotonic(), self._tell_every_s + 2 * self._look_every_s
        ages = {rank: now - max(at, self._awake_since) for rank, (_, at) in self._seen.items()}
        return {rank: age for rank, age in ages.items() if age > limit}

    def _report(self, long: list[tuple[Mark, float]], summary: dict[str, Any]) -> None:
        reason = left_behind(summary) if summary else None
        if reason is not None:
            self.end_at_once(reason)
        mark, seconds = long[0]
        key = mark.name, mark.ended + 1
        if seconds < self._next_report_s.get(key, self._report_after_s):
            return
        self._next_report_s[key] = 2 * seconds
        text = whom_it_waits_for(summary, self._rank, *key) if summary else "for other ranks; which ones is not known"
        more = f" {len(long) - 1} more collectives wait." if len(long) > 1 else ""
        limit = ""
        if summary and summary["silent"]:
            limit = f" Horovod ends the job after {self._gives_up_after_s} s (HOROVOD_GLOO_TIMEOUT_SECONDS)."
        self.say(f"it has waited {seconds:.0f} s in collective {key[0]!r}, call {key[1]}, {text}.{more}{limit}")

    def _report_idle(self, marks: list[Mark], summary: dict[str, Any]) -> None:
        """Reports that others wait for this rank while it is in no collective, for example waiting for its input."""
        last = min((mark for mark in marks if mark.ended), key=lambda mark: mark.ended_ago_s, default=None)
        if last is None or any(mark.begun > mark.ended for mark in marks) or self.ended:
            return
        idle_s = min(last.ended_ago_s, time.monotonic() - self._awake_since)
        if idle_s < self._report_after_s:
            self._idle_report_s = self._report_after_s
        elif idle_s >= self._idle_report_s and (wanted := keeps_waiting(summary, self._rank)):
            self._idle_report_s = 2 * idle_s
            self.say(
                f"it has been in no collective for {idle_s:.0f} s, while others wait for it in {wanted[0]!r}; its last "
                f"one was {last.name!r}, call {last.ended}. It may be waiting for its input data."
            )

    def _report_ends(self, marks: list[Mark]) -> None:
        ended = {mark.name: mark.ended for mark in marks}
        for name, call in list(self._next_report_s):
            if ended[name] >= call:
                del self._next_report_s[name, call]
                self.say(f"it goes on: collective {name!r}, call {call}, has ended")

    def end_at_once(self, reason: str) -> None:
        """Ends this process with exit code 1, because the awaited rank will never arrive."""
        if self._board is not None:
            self._board.report_failure(self._rank, reason)
        self.say(f"failed: {reason}")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def say(self, text: str) -> None:
        """Prints one line with the number of this rank to stderr."""
        print(f"tf_fusedrec: rank {self._rank}: {text}", file=sys.stderr, flush=True)
