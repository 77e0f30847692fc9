"""Parses an experiment's schedule: sync, dual_buffer, semi_async, frozen_window(4), nested(4) or pipelined(6)."""

from __future__ import annotations

import re
from collections.abc import Callable

from tf_fusedrec import schedules

_PLAIN: dict[str, Callable[[], schedules.Schedule]] = {
    "sync": schedules.Sync,
    "dual_buffer": schedules.DualBuffer,
    "semi_async": schedules.SemiAsync,
}
_NUMBERED: dict[str, Callable[[int], schedules.Schedule]] = {
    "frozen_window": schedules.FrozenWindow,
    "nested": schedules.Nested,
    "pipelined": schedules.Pipelined,
}


def schedule_of(text: str) -> schedules.Schedule:
    """Returns the schedule of a name with the number of micro-batches or of batches in flight in parentheses.

    Raises:
      ValueError: The name is unknown, or its number is missing, unexpected or out of range.
    """
    found = re.fullmatch(r"(\w+)(?:\((\d+)\))?", text)
    name, number = found.groups() if found else (None, None)
    if name in _PLAIN and number is None:
        return _PLAIN[name]()
    if name in _NUMBERED and number is not None:
        return _NUMBERED[name](int(number))
    forms = [*_PLAIN, *(f"{name}(N)" for name in _NUMBERED)]
    raise ValueError(f"a schedule must be one of {forms} with a whole number N, got {text!r}.")


def micro_batches_of(text: str) -> int:
    """Returns the micro-batches into which the schedule of a name cuts a batch; 1 if it cuts none. Raises likewise."""
    return getattr(schedule_of(text), "micro_batches", 1)
