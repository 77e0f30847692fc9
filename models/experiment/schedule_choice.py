"""Parses an experiment's schedule: sync, dual_buffer(lead=3), semi_async, frozen_window(4), nested(8, lead=3) ..."""

from __future__ import annotations

import re

from tf_fusedrec import schedules

_SCHEDULES: dict[str, type[schedules.Schedule]] = {
    "sync": schedules.Sync,
    "dual_buffer": schedules.DualBuffer,
    "semi_async": schedules.SemiAsync,
    "frozen_window": schedules.FrozenWindow,
    "nested": schedules.Nested,
    "pipelined": schedules.Pipelined,
}
_FORMS = "sync, dual_buffer(lead=N), semi_async, frozen_window(N), nested(N, lead=N), pipelined(N)"


def schedule_of(text: str) -> schedules.Schedule:
    """Returns the schedule of a name with its arguments, whole numbers, in parentheses.

    Raises:
      ValueError: The name is unknown, or an argument is missing, unexpected or out of range.
    """
    found = re.fullmatch(r"(\w+)(?:\(([^()]+)\))?", text)
    name, given = found.groups() if found else ("", None)
    arguments = [re.fullmatch(r"\s*(?:(\w+)\s*=\s*)?(\d+)\s*", part) for part in given.split(",")] if given else []
    numbers = [(one[1], int(one[2])) for one in arguments if one]
    if name in _SCHEDULES and len(numbers) == len(arguments):
        positional = [number for keyword, number in numbers if keyword is None]
        named = {keyword: number for keyword, number in numbers if keyword is not None}
        try:
            return _SCHEDULES[name](*positional, **named)
        except TypeError:  # a missing or an unexpected argument
            pass
    raise ValueError(
        f"a schedule must be one of {_FORMS}, with whole numbers N, of which a lead may be left out, got {text!r}."
    )


def micro_batches_of(text: str) -> int:
    """Returns the micro-batches into which the schedule of a name cuts a batch; 1 if it cuts none. Raises likewise."""
    return getattr(schedule_of(text), "micro_batches", 1)
