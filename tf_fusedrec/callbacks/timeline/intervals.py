"""Events of a step, and the parts of its time that they cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

EXCHANGE, WAIT, TABLE, COMPUTE = "exchange", "wait", "table", "compute"

Interval = tuple[float, float]


class Event(NamedTuple):
    """An exchange or op with its begin and end, in seconds since the Unix epoch."""

    kind: str  # EXCHANGE; WAIT, an exchange that waits for other ranks; TABLE, an op of a table; COMPUTE, any other op
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
    left: list[Interval] = []
    for begin, end in intervals:
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if end > begin:
            left.append((begin, end))
    return left


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def inside(events: Iterable[Event], begin: float, end: float) -> list[Event]:
    """The events clipped to [begin, end]. Events outside are dropped."""
    clipped = (event._replace(begin=max(event.begin, begin), end=min(event.end, end)) for event in events)
    return [event for event in clipped if event.end > event.begin]


def exposed(events: Iterable[Event]) -> list[Interval]:
    """The intervals in which an exchange ran and no op."""
    events = list(events)
    computing = union((e.begin, e.end) for e in events if e.kind in (TABLE, COMPUTE))
    return without(union((e.begin, e.end) for e in events if e.kind == EXCHANGE), computing)


def step_times(number: int, events: Sequence[Event], begin: float, end: float) -> StepTimes:
    """Times of the step that ran from `begin` to `end`, in seconds."""
    of_step = inside(events, begin, end)
    compute = seconds(union((e.begin, e.end) for e in of_step if e.kind in (TABLE, COMPUTE)))
    exchange = seconds(union((e.begin, e.end) for e in of_step if e.kind == EXCHANGE))
    alone = seconds(exposed(of_step))
    step = end - begin
    return StepTimes(number, 1e3 * step, 1e3 * compute, 1e3 * exchange, 1e3 * alone, 1e3 * (step - compute - alone))
