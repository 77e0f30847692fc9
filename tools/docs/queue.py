"""The cost of Horovod's queue in docs/topology.md, by the latency between hosts: benchmarks.papers.horovod_queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCHEDULES = {"sync": '`"sync"`', "nested": "`Nested(8)`"}


def block(results: Mapping[str, Any]) -> str:
    """Returns a table with a row for each latency: one all-to-all in parts, and the steps of two schedules."""
    cases = results["horovod_queue"]["cases"]
    head = ["latency", "negotiation / splits", "blocked by an all-reduce"]
    for name in _SCHEDULES.values():
        head += [f"step of {name}", "due to latency / to splits"]
    rows = [[f"{case['latency_ms']:g} ms", *_cells(case)] for case in cases]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _cells(case: Mapping[str, Any]) -> list[str]:
    cells = [f"{case['negotiation_ms']:.1f} / {case['splits_ms']:.1f} ms", f"{case['blocked_ms']:.0f} ms"]
    for name in _SCHEDULES:
        parts = [f"{100 * case[f'{part}_part_{name}']:.1f}" for part in ("latency", "splits")]
        cells += [f"{case[f'step_ms_{name}']:.0f} ms", f"{' / '.join(parts)} %"]
    return cells
