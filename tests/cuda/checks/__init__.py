"""Checks of the GPU kernels, by op: functions `check_*`. Those of tables take the kernels (tests.cuda.memory.Kernels).

Others take an object with the ops as methods: Launchers here, or the ops in TensorFlow (tests/support/small_ops.py).
`check_launcher_*` need Launchers.
"""

from __future__ import annotations

from typing import Any


def once(check: Any) -> Any:
    """Marks a check that runs with threads in order only, because random schedules add nothing (run_checks.py)."""
    check.once = True
    return check


def over_streams(check: Any) -> Any:
    """Marks a check that runs again with work that waits in the queues of streams (emulation/streams.h)."""
    check.over_streams = True
    return check
