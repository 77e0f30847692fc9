"""A thread that reports which rank a blocked collective waits for, because the collective cannot report itself.

Ops record the begin and end of each collective (ops.mark_collective). The thread of each rank reads these records and
publishes them on the board from time to time, and at once when a collective waits for more than a moment. Rank 0 reads
the states of all ranks and publishes a summary, which the waiting ranks read. A rank without a new heartbeat is stopped
or unreachable. The thread sleeps between polls and uses less than a thousandth of a core.

The state of a rank is its report about itself:
  waits: [name, call, ranks] of each collective in which the rank waits; `ranks` are the participants.
  begun: number of begun calls of each collective, by name.
  idle: [name, call, seconds] of its last collective if the rank is in none, else None.
  ended: whether its program has ended.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_fusedrec.ops import Mark, collective_marks, termination

_SCOPE = "tf_fusedrec.watchdog"
_TIMEOUT_S = 5.0


class Board:
    """Key-value store of all ranks that works while collectives are blocked: the rendezvous store of horovodrun.

    The store is an HTTP server of the launcher. All hosts reach it, and it exists as long as the job.
    """

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port

    @classmethod
    def of_job(cls) -> Board | None:
        """None if the launcher has no store, like mpirun."""
        address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
        return cls(address, int(port)) if address and port else None

    def put(self, key: str, value: Any) -> bool:
        """Writes a JSON value. Returns whether the store accepted it."""
        return self._request("PUT", key, json.dumps(value).encode())[0]

    def get(self, key: str) -> Any:
        """Reads the value of a key; None if the key is missing or the store does not answer."""
        is_present, body = self._request("GET", key)
        return json.loads(body) if is_present else None

    def report_failure(self, rank: int | None, cause: str) -> dict[str, Any]:
        """Reports why a rank (None: unknown) failed. Returns {"rank", "cause"} of the first reported failure."""
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
GIVE_UP_AFTER = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_MAX_NAMED = 8  # ranks that a sentence names one by one


def summarize(states: Mapping[int, State], silent: Mapping[int, float]) -> dict[str, Any]:
    """The summary that rank 0 publishes, of the last state of each rank and of its seconds of silence.

    Returns:
      waits: For each collective in which a rank waits, its name, call and ranks, and `missing`: the number of calls
        begun by each rank that has not arrived.
      silent: Seconds of silence, by rank, for ranks that gave no sign of life in time.
      idle: Last collective of each idle rank, by rank.
      ended: Ranks with an ended program.
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
    same_call = (wait for wait in summary["waits"] if (wait["name"], wait["call"]) == (name, call))
    wait = next((wait for wait in same_call if rank in wait["ranks"]), None)
    if wait is None:
        wait = {"ranks": [int(silent) for silent in summary["silent"]], "missing": {}}
        if not wait["ranks"]:
            return "for other ranks; which ones is not known yet"
    late = [text for late_rank in wait["ranks"] if (text := _lateness(str(late_rank), wait, summary))]
    if not late:
        return "although all ranks have arrived: the network is slow, or Horovod is busy with a different collective"
    more = f"; and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
    return "for " + "; ".join(late[:_MAX_NAMED]) + more


def _lateness(rank: str, wait: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Words for a silent rank, or one that has not begun the awaited call; "" for a rank that has arrived."""
    silence, calls = summary["silent"].get(rank), wait["missing"].get(rank)
    if silence:
        after = f", after {calls} of {wait['call']} calls" if calls is not None else ""
        return f"rank {rank}, with its last sign of life {silence:.0f} s ago{after} (stopped, or its host is lost)"
    if calls is None:
        return ""
    text = f"rank {rank}, which has made {calls} of {wait['call']} calls"
    for late_wait in summary["waits"]:
        if int(rank) in late_wait["ranks"] and rank not in late_wait["missing"]:
            return f"{text} and is in collective {late_wait['name']!r}"
    idle = summary["idle"].get(rank)
    return f"{text} and has been in no collective for {idle[2]:.0f} s" if idle else text


def left_behind(summary: Mapping[str, Any]) -> str | None:
    """Words that name an ended rank that other ranks wait for; None if there is none."""
    for wait in summary["waits"]:
        for rank, calls in wait["missing"].items():
            if int(rank) in summary["ended"]:
                return (
                    f"the program of rank {rank} has ended after {calls} calls of collective {wait['name']!r}, and "
                    f"other ranks wait in call {wait['call']}. Usually the ranks' data ended at different steps, or "
                    "the program raised SystemExit. Use tf_fusedrec.schedules.PipelinedModel instead of keras.Model, "
                    "which ends all ranks together, or the same steps_per_epoch on all ranks."
                )
    return None


def circle_of_waits(summary: Mapping[str, Any], rank: int, name: str, call: int) -> str | None:
    """Words for a circle of ranks that wait for the next one, from `rank` in this call; None if there is none.

    For a short time this is usual: micro-batches have several collectives under way.
    """
    waits = [
        wait for wait in summary["waits"] if (wait["name"], wait["call"]) == (name, call) and rank in wait["ranks"]
    ]
    paths, reached = [[(rank, wait)] for wait in waits], {*summary["silent"]}
    while paths:
        path = paths.pop(0)
        for late in path[-1][1]["missing"].keys() - reached:
            if int(late) == rank:
                return _circle(path)
            reached.add(late)
            waits = [wait for wait in summary["waits"] if int(late) in wait["ranks"] and late not in wait["missing"]]
            paths += [[*path, (int(late), wait)] for wait in waits]
    return None


def _circle(path: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    (_, first), *between, (last, wait) = path
    ranks = [*(rank for rank, _ in between), last]
    words = [f"it waits for rank {ranks[0]} in collective {first['name']!r}, call {first['call']}"]
    for (rank, of_rank), following in zip(between, ranks[1:]):
        words.append(f"rank {rank} waits for rank {following} in {of_rank['name']!r}, call {of_rank['call']}")
    return (
        f"{', '.join(words)}, and rank {last} waits for it in {wait['name']!r}, call {wait['call']}. Usually a "
        "callback has set stop_training on one rank only, or the programs differ. Use callbacks.Interrupt after that "
        "callback, or one program."
    )


def _last_of_idle(marks: Sequence[Mark]) -> Mark | None:
    """The last collective of a process that is in none; None in a collective, or before the first."""
    if any(mark.begun > mark.ended for mark in marks):
        return None
    return min((mark for mark in marks if mark.ended), key=lambda mark: mark.ended_ago_s, default=None)


_MOMENT_S = 2.0  # A collective that waits longer is published on the board.
_RANKS_PER_S = 100  # bound on the ranks that rank 0 reads per second, and on the readers of the board


class Watchdog:
    """Watches the collectives of this process.

    Args:
      rank, size: Rank of this process, and number of ranks.
      board: None: reports have the waiting time, but not the awaited ranks.
      report_after_s: Seconds after which a waiting collective is reported, and again after each doubling.
      gives_up_after_s: Seconds after which Horovod ends a job with a silent rank, for the message, and after which this
        rank ends if it waits for one that waits for it, also in a longer circle.
      members: Ranks of each collective that not all ranks run, by its name.
    """

    def __init__(
        self, rank: int, size: int, board: Board | None, *, report_after_s: float, gives_up_after_s: int,
        members: Mapping[str, tuple[int, ...]],
    ):  # fmt: skip
        self._rank, self._size, self._board, self._members = rank, size, board, members
        self._report_after_s, self._gives_up_after_s = report_after_s, gives_up_after_s
        self._moment_s = min(_MOMENT_S, report_after_s / 2)
        self._look_every_s = max(min(1.0, report_after_s / 4), size / _RANKS_PER_S)
        self._publish_every_s = max(report_after_s / 3, 2 * self._look_every_s)
        self._lost_after_s = gives_up_after_s + 5 + 2 * self._publish_every_s
        self._beat, self._published_at = 0, 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # last heartbeat of each rank, and the time when it was new
        self._next_report_s: dict[tuple[str, int], float] = {}  # of reported collectives, by name and call
        self._awake_since = self._looked_at = time.monotonic()
        self._stopped_s = 0.0
        self._idle_report_s = report_after_s
        self._lock, self._printing = threading.Lock(), threading.Lock()
        self._cause_is_printed = False
        self.ended = False  # whether the program of this rank has ended
        # Called with the text of the exception that C++ ends this process for.
        self.on_termination: Callable[[str], None] | None = None
        self.own_failure: Callable[[], str | None] | None = None  # see Ending.install

    def start(self) -> None:
        threading.Thread(target=self._run, name="tf_fusedrec watchdog", daemon=True).start()

    def _run(self) -> None:
        while not self.ended:
            time.sleep(self._look_every_s)
            now = time.monotonic()
            if now - self._looked_at > max(3 * self._look_every_s, self._report_after_s / 2):
                self._stopped_s = now - self._looked_at
                self.say(f"this rank itself was stopped for {self._stopped_s:.0f} s")
                self._awake_since = now
            self._looked_at = now
            self.look()

    def stopped_s(self) -> float:
        """Seconds for which this rank itself was stopped, at the last time."""
        return max(self._stopped_s, time.monotonic() - self._looked_at)

    def look(self) -> dict[str, Any]:
        """Polls once: publishes this rank's state, reads the summary, and prints due reports. Returns the summary."""
        if self.on_termination is not None and (thrown := termination()) is not None:
            on_termination, self.on_termination = self.on_termination, None  # the call polls again
            on_termination(thrown)
        if self.own_failure is not None and self._board is not None and (failure := self.own_failure()) is not None:
            self.own_failure = None
            self._board.report_failure(self._rank, failure)
        with self._lock:
            marks, now, summary = collective_marks(), time.monotonic(), {}
            waits = [(m, min(m.begun_ago_s, now - self._awake_since)) for m in marks if m.begun > m.ended]
            # After the program's end, a thread of the input pipeline may still wait in a collective that is not needed.
            long = [] if self.ended else sorted((w for w in waits if w[1] > self._moment_s), key=lambda wait: -wait[1])
            if self.ended or long or now - self._published_at > self._publish_every_s:
                self._publish(marks, long)
                summary = self._exchange_summary()
            ended = {mark.name: mark.ended for mark in marks}
            for name, call in list(self._next_report_s):
                if ended[name] >= call:
                    del self._next_report_s[name, call]
                    self.say(f"it goes on: collective {name!r}, call {call}, has ended")
            if long:
                self._report(long, summary)
            elif summary:
                self._report_idle(marks, summary)
            return summary

    def _publish(self, marks: list[Mark], long: list[tuple[Mark, float]]) -> None:
        """Publishes this rank's state. `long`: collectives that wait for more than a moment, with their seconds."""
        everyone = list(range(self._size))
        last = _last_of_idle(marks)
        self._beat += 1
        self._published_at = time.monotonic()
        self._state = {
            "beat": self._beat,
            "waits": [[m.name, m.ended + 1, list(self._members.get(m.name, everyone))] for m, _ in long],
            "begun": {mark.name: mark.begun for mark in marks},
            "idle": [last.name, last.ended, last.ended_ago_s] if last is not None else None,
            "ended": self.ended,
        }
        if self._board is not None and self._rank != 0:
            self._board.put(f"rank-{self._rank}", self._state)

    def _exchange_summary(self) -> dict[str, Any]:
        """Publishes the summary on rank 0 and reads it on the others; empty if there is none."""
        if self._board is None:
            return {}
        if self._rank == 0:
            states = {0: self._state}
            for rank in range(1, self._size):
                if (state := self._board.get(f"rank-{rank}")) is not None:
                    states[rank] = state
                self._note_beat(rank, state["beat"] if state is not None else 0)
            summary = {**summarize(states, self._silent()), "beat": self._beat}
            summary["over"] = len(summary["ended"]) == self._size
            self._board.put("summary", summary)
            return summary
        summary = self._board.get("summary") or {}
        if summary:
            self._note_beat(0, summary["beat"])
            summary["silent"].pop(str(self._rank), None)  # this rank is alive
            summary["silent"].update({str(rank): seconds for rank, seconds in self._silent().items()})
        return summary

    def _note_beat(self, rank: int, beat: int) -> None:
        if self._seen.get(rank, (None, 0.0))[0] != beat:
            self._seen[rank] = beat, time.monotonic()

    def _silent(self) -> dict[int, float]:
        now, limit = time.monotonic(), self._publish_every_s + 2 * self._look_every_s
        ages = {rank: now - max(at, self._awake_since) for rank, (_, at) in self._seen.items()}
        return {rank: age for rank, age in ages.items() if age > limit}

    def _report(self, long: list[tuple[Mark, float]], summary: dict[str, Any]) -> None:
        reason = left_behind(summary) if summary else None
        if reason is not None:
            self.end_at_once(reason)
        # An engine may not notice; Horovod ends the job earlier.
        for rank, silence in summary.get("silent", {}).items():
            if silence > self._lost_after_s:
                limit = f"the limit is {self._gives_up_after_s} s ({GIVE_UP_AFTER})"
                self.end_at_once(f"rank {rank} has given no sign of life for {silence:.0f} s; {limit}")
        for mark, seconds in long if summary else []:
            if seconds > self._gives_up_after_s:
                circle = circle_of_waits(summary, self._rank, mark.name, mark.ended + 1)
                if circle is not None:
                    self.end_at_once(f"{circle} The limit is {self._gives_up_after_s} s ({GIVE_UP_AFTER})")
        mark, seconds = long[0]
        key = mark.name, mark.ended + 1
        if seconds < self._next_report_s.get(key, self._report_after_s):
            return
        self._next_report_s[key] = 2 * seconds
        text = whom_it_waits_for(summary, self._rank, *key) if summary else "for other ranks; which ones is not known"
        more = f" {len(long) - 1} more collectives wait." if len(long) > 1 else ""
        limit = ""
        if summary and summary["silent"]:
            limit = f" Horovod ends the job after {self._gives_up_after_s} s ({GIVE_UP_AFTER})."
        self.say(f"it has waited {seconds:.0f} s in collective {key[0]!r}, call {key[1]}, {text}.{more}{limit}")

    def _report_idle(self, marks: list[Mark], summary: dict[str, Any]) -> None:
        """Reports that others wait for this rank while it is in no collective, for example waiting for its input."""
        last = _last_of_idle(marks)
        if last is None or self.ended:
            return
        idle_s = min(last.ended_ago_s, time.monotonic() - self._awake_since)
        if idle_s < self._report_after_s:
            self._idle_report_s = self._report_after_s
            return
        awaiting = [wait["name"] for wait in summary["waits"] if str(self._rank) in wait["missing"]]
        if idle_s >= self._idle_report_s and awaiting:
            self._idle_report_s = 2 * idle_s
            self.say(
                f"it has been in no collective for {idle_s:.0f} s, while others wait for it in {awaiting[0]!r}; its "
                f"last one was {last.name!r}, call {last.ended}. It may be waiting for its input data."
            )

    def end_at_once(self, reason: str) -> None:
        """Ends this process with exit code 1, because the awaited rank will never arrive."""
        if self._board is not None:
            self._board.report_failure(self._rank, reason)
        self.say_last(f"rank {self._rank}: failed: {reason}")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def say(self, text: str) -> None:
        """Prints one line with the number of this rank to stderr, unless the cause of its end is printed."""
        self._print(f"rank {self._rank}: {text}")

    def say_last(self, cause: str) -> None:
        """Prints why this process ends. No line follows, because other threads may live for some more seconds."""
        self._print(cause, is_last=True)

    def _print(self, text: str, is_last: bool = False) -> None:
        with self._printing:
            if not self._cause_is_printed:
                print(f"tf_fusedrec: {text}", file=sys.stderr, flush=True)
            self._cause_is_printed |= is_last
