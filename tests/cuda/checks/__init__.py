"""What the kernels for GPUs must do, by op: functions `check_*` of the kernels (tests.cuda.memory.Kernels)."""

from __future__ import annotations

from typing import Any


def once(check: Any) -> Any:
    """A check that random schedules add nothing to: it runs with threads in order alone (run_checks.py)."""
    check.once = True
    return check
