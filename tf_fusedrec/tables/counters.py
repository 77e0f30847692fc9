"""The counters that rows need: a table's clock, and the step count and learning rates of its optimizer.

A clock is one number that only grows: changes << 32 | training lookups. Records refer to both counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SHIFT = 32


def pack(changes: int, lookups: int) -> int:
    return changes << _SHIFT | lookups


def unpack(clock: int) -> tuple[int, int]:
    """Changes and training lookups of a clock."""
    return clock >> _SHIFT, clock & ((1 << _SHIFT) - 1)


def latest(clocks: Iterable[int]) -> int:
    """The clock with the larger of each count over all `clocks`."""
    changes, lookups = zip(*map(unpack, clocks))
    return pack(max(changes), max(lookups))


def described(table: Any) -> dict[str, Any]:
    """The counters of a backend, JSON-able. None for what its optimizer does not count or restore."""
    iterations = getattr(table.optimizer, "iterations", None)
    return {
        "clock": int(table.clock),
        "iterations": None if iterations is None else int(iterations.numpy()),
        "learning_rate": getattr(table.optimizer, "rates", None),
    }


def restore(table: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Sets the counters of a backend from what `described` returned for each of its tables.

    The tables may have been in groups with different counters. The largest are taken: a row may seem older than it is,
    but never newer than the clock.
    """
    table.clock = latest(entry["clock"] for entry in saved)
    iterations = [entry["iterations"] for entry in saved if entry["iterations"] is not None]
    if iterations:
        table.optimizer.iterations.assign(max(iterations))
    rates = [entry["learning_rate"] for entry in saved if entry.get("learning_rate")]
    if rates:
        table.optimizer.restore_rates(rates)
