"""Events of a step, and how much of the time they cover alone and together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

EXCHANGE, WAIT, TABLE, COMPUTE = "exchange", "wait", "table", "compute"

Interval = tuple[float, float]


class Event(NamedTuple):
    """Something that ran, in seconds since the epoch."""

    kind: str  # EXCHANGE; WAIT, an exchange that waits for other ranks; TABLE, an op of a table; COMPUTE, any other op
    name: str
    begin: float
    end: float
    thread: str


class StepTimes(NamedTuple):
    """Where one step's time went, in milliseconds (TurboGR, table 6).

    compute + exposed + free = step: computing, or exchanging and nothing else, or neither.
    """

    number: int  # of the step since training began, 0 first
    step_ms: float
    compute_ms: float  # some op ran, those of the tables among them
    exchange_ms: float  # some exchange ran
    exposed_ms: float  # an exchange ran, and no op
    free_ms: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in disjoint intervals, ascending."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Time of `intervals` that is in none of `others`; both as `union` returns them."""
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
    """The parts of events that lie between two moments."""
    clipped = (event._replace(begin=max(event.begin, begin), end=min(event.end, end)) for event in events)
    return [event for event in clipped if event.end > event.begin]


def exposed(events: Iterable[Event]) -> list[Interval]:
    """When an exchange ran, and no op."""
    events = list(events)
    computing = union((e.begin, e.end) for e in events if e.kind in (TABLE, COMPUTE))
    return without(union((e.begin, e.end) for e in events if e.kind == EXCHANGE), computing)


def step_times(number: int, events: Sequence[Event], begin: float, end: float) -> StepTimes:
    """Of the step between two moments."""
    mine = inside(events, begin, end)
    compute = seconds(union((e.begin, e.end) for e in mine if e.kind in (TABLE, COMPUTE)))
    exchange = seconds(union((e.begin, e.end) for e in mine if e.kind == EXCHANGE))
    alone = seconds(exposed(mine))
    step = end - begin
    return StepTimes(number, 1e3 * step, 1e3 * compute, 1e3 * exchange, 1e3 * alone, 1e3 * (step - compute - alone))
