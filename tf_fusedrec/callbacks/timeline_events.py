"""Events of Horovod's timeline (exchanges) and TensorFlow's profiler (ops), and the parts of a step that they cover."""

from __future__ import annotations

import json
import pathlib
import re
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import XSpace

EXCHANGE, WAIT, TABLE, COMPUTE = "exchange", "wait", "table", "compute"

Interval = tuple[float, float]


class Event(NamedTuple):
    """An exchange or op with its begin and end, in seconds since the Unix epoch."""

    lane: str  # EXCHANGE; WAIT, an exchange that waits for other ranks; TABLE, an op of a table; COMPUTE, any other op
    name: str
    begin: float
    end: float
    thread: str


class StepTimes(NamedTuple):
    """Breakdown of one step's time, in milliseconds (TurboGR, table 6): compute + exposed + free = step."""

    number: int  # number of the step, counted from 0 at the start of training
    step_ms: float
    compute_ms: float  # at least one op ran, table ops included
    exchange_ms: float  # at least one exchange ran
    exposed_ms: float  # an exchange ran, but no op
    free_ms: float  # neither an op nor an exchange ran


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals into disjoint, ascending ones."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of `intervals` outside `others`. Both must be results of `union`."""
    remainder: list[Interval] = []
    for begin, end in intervals:
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                remainder.append((begin, other_begin))
            begin = max(begin, other_end)
        if end > begin:
            remainder.append((begin, end))
    return remainder


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def inside(events: Iterable[Event], begin: float, end: float) -> list[Event]:
    """The events clipped to [begin, end]. Events outside are dropped."""
    clipped = (event._replace(begin=max(event.begin, begin), end=min(event.end, end)) for event in events)
    return [event for event in clipped if event.end > event.begin]


def exposed(events: Iterable[Event]) -> list[Interval]:
    """The intervals in which an exchange ran and no op."""
    events = list(events)
    computing = union((e.begin, e.end) for e in events if e.lane in (TABLE, COMPUTE))
    return without(union((e.begin, e.end) for e in events if e.lane == EXCHANGE), computing)


def step_times(number: int, events: Sequence[Event], begin: float, end: float) -> StepTimes:
    """Times of the step that ran from `begin` to `end`, in seconds."""
    of_step = inside(events, begin, end)
    compute = seconds(union((e.begin, e.end) for e in of_step if e.lane in (TABLE, COMPUTE)))
    exchange = seconds(union((e.begin, e.end) for e in of_step if e.lane == EXCHANGE))
    unhidden = seconds(exposed(of_step))
    free = end - begin - compute - unhidden
    return StepTimes(number, 1e3 * (end - begin), 1e3 * compute, 1e3 * exchange, 1e3 * unhidden, 1e3 * free)


CLOCK = "fusedrec.clock"  # name of profiler events at known times

_OP = re.compile(r"^[^:]+:([A-Za-z_][\w>]*)$")  # "scope/name:Type"
# These ops only start other ops or wait for them. The other ops have their own events.
_NO_WORK = re.compile(
    r"^(Horovod.*|(Stateful)?PartitionedCall|(Stateless)?(If|While|Case)|_?IteratorGetNext.*|Queue.*)$"
)


def horovod_events(path: pathlib.Path, timeout_s: float = 10.0) -> list[Event]:
    """Exchanges in a stopped timeline, and their waits for other ranks. Horovod writes the file in the background."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            break
        except (FileNotFoundError, json.JSONDecodeError):
            if time.monotonic() > give_up:
                raise TimeoutError(f"Horovod did not finish {path} within {timeout_s} s.") from None
            time.sleep(0.05)
    epoch = next(e["args"]["start_time_since_epoch_in_micros"] for e in entries if "start_time" in str(e.get("args")))
    names: dict[int, str] = {}
    open_: dict[int, list[tuple[str, float]]] = {}
    events = []
    for entry in entries:
        if entry["ph"] == "M" and "name" in entry.get("args", {}):
            names[entry["pid"]] = entry["args"]["name"]
        elif entry["ph"] == "B":
            open_.setdefault(entry["pid"], []).append((entry["name"], entry["ts"]))
        elif entry["ph"] == "E" and open_.get(entry["pid"]):
            phase, begin = open_[entry["pid"]].pop()
            if open_[entry["pid"]]:  # a nested phase belongs to the outer one
                continue
            lane = WAIT if phase.startswith("NEGOTIATE_") else EXCHANGE
            name = f"{phase.removeprefix('NEGOTIATE_').lower()} {names[entry['pid']].rsplit('/', 1)[-1]}"
            events.append(Event(lane, name, 1e-6 * (epoch + begin), 1e-6 * (epoch + entry["ts"]), "horovod"))
    return events


def profiler_events(folder: pathlib.Path, clock: Sequence[Interval]) -> list[Event]:
    """Ops of the newest profile in a folder.

    `clock` has the times just before and just after the begin of each event CLOCK, in seconds since the Unix epoch.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    space = XSpace()
    space.ParseFromString(newest.read_bytes())
    spans: list[tuple[str, float, float, str]] = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                name = plane.event_metadata[event.metadata_id].name
                spans.append((name, begin, 1e-12 * event.duration_ps, line.name))
    begins = sorted(begin for name, begin, _, _ in spans if name == CLOCK)
    # The shortest reading is the most exact.
    _, shift = min((after - before, (before + after) / 2 - begin) for (before, after), begin in zip(clock, begins))
    events = []
    for name, begin, duration, thread in spans:
        op = _OP.match(name)
        if op and not _NO_WORK.match(op[1]):
            lane = TABLE if op[1].startswith("Fusedrec>Table") else COMPUTE
            events.append(Event(lane, name, begin + shift, begin + shift + duration, thread))
    return events
