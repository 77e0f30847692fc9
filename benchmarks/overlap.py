"""Question: how much of the exchanges does each schedule hide under dense compute when the network is slow?

    python -m benchmarks.overlap [--quick] [--json FILE]

Two ranks of GRM whose loop-back is limited to 1 Gbit/s in a network namespace, which needs root; without it the fields
are null. There dense compute takes about as long as the exchange; a slower and a quicker network make it half and
twice as long. All contenders take turns: the step of every arm, its dense part alone and its exchange alone.

    exposed = (step - dense only) / (exchange only)

Dense only has rows that are there and averages no gradients; exchange only is lookup and update with their all2alls.
Arms with 2d have two groups of one rank (rule gradient_sync): no rows travel, and gradients go to both replicas. Arms
with a file keep most rows in the second tier, whose pages are taken from memory before every step; they are compared
with sync_file. The table says for the median of a few recorded steps of rank 0 how long it computed, exchanged,
exchanged with nothing else to do, and did neither (TurboGR, table 6). Processes of their own record them, since
Horovod's timeline takes part of a core from all steps. Fields without a suffix are those of compute :
exchange = 1. --quick has all arms there, and sync and frozen_M4 at the other two.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import children, clustering, harness, network
from benchmarks.overlap_model import Size
from benchmarks.overlap_ranks import ARMS, RANKS

TIMEOUT_S = 1500
SIZE = Size(users=64, history=120, exposures=8, dim=512, heads=6)
RATES = {1.0: "1gbit", 0.5: "450mbit", 2.0: "2500mbit"}  # by compute : exchange that they come near to
REPEATS, QUICK_REPEATS = 14, 4
RECORDED, QUICK_RECORDED = 3, 1  # steps of each contender for the table
QUICK_ELSEWHERE = ("sync", "frozen_M4", "nested_M4")  # arms of --quick where compute : exchange is not 1
FIELDS = {
    "exposed_ratio_sync": ("exposed_ratio", "sync"),
    "exposed_ratio_frozen_M4": ("exposed_ratio", "frozen_M4"),
    "exposed_ratio_nested_M4": ("exposed_ratio", "nested_M4"),
    "exposed_ms_2d": ("exposed_ms", "2d"),
    "exposed_ms_nested": ("exposed_ms", "nested_M4"),
    "exposed_ms_nested_2d": ("exposed_ms", "nested_2d"),
    "speedup_frozen": ("speedup", "frozen_M4"),
    "speedup_dual": ("speedup", "dual"),
    "speedup_dual_file": ("speedup", "dual_file"),
    "speedup_nested": ("speedup", "nested_M4"),
    "speedup_semi_async": ("speedup", "semi_async"),
    "speedup_2d": ("speedup", "2d"),
}


def run_ranks(size: Size, phases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each phase its `ms` and its `table`, each from two processes of their own in a namespace.

    Raises:
      CheckFailed: they failed, or did not end in time.
    """

    def ask(meant: Sequence[Mapping[str, Any]], recording: bool) -> list[dict[str, Any]]:
        if not meant:
            return []
        with network.slow_loopback(meant[0]["rate"]) as name, tempfile.TemporaryDirectory() as folder:
            return children.ask_ranks(
                "benchmarks.overlap_ranks", RANKS, inside=network.inside(name, []), timeout_s=TIMEOUT_S,
                size=dataclasses.asdict(size), phases=list(meant), folder=folder, recording=recording,
            )  # fmt: skip

    timed = ask(phases, recording=False)
    tables = iter(ask([phase for phase in phases if phase["recorded"]], recording=True))
    return [{"ms": ms, "table": next(tables) if phase["recorded"] else {}} for phase, ms in zip(phases, timed)]


def case(ratio: float, answer: dict[str, Any]) -> dict[str, Any]:
    """One run as figures: medians in ms, and what is exposed of the exchange."""
    ms = {name: float(np.median(values)) for name, values in answer["ms"].items()}
    dense, exchange = ms["dense_only"], ms["exchange_only"]
    arms = [name for name in ARMS if name in ms]
    return {
        "wanted_ratio": ratio,
        "ratio": dense / exchange,
        "ms": ms,
        "exposed_ms": {name: ms[name] - dense for name in arms},
        "exposed_ratio": {name: (ms[name] - dense) / exchange for name in arms},
        "speedup": {name: ms[ARMS[name].reference] / ms[name] for name in arms},
        "exposed_allreduce_ms": ms["dense_with_allreduce"] - dense,
        "table": answer["table"],
    }


def fields(one: dict[str, Any] | None) -> dict[str, float | None]:
    """The figures that are asked for by name, of the case with as much compute as exchange; None without root."""
    found = {name: None if one is None else one[figure][arm] for name, (figure, arm) in FIELDS.items()}
    return {**found, "exposed_allreduce_ms": None if one is None else one["exposed_allreduce_ms"]}


def show(one: dict[str, Any]) -> None:
    rows = []
    for name, ms in one["ms"].items():
        figures = {"exposed ratio": one["exposed_ratio"], "times sync": one["speedup"]}
        row = {"contender": name, "ms": ms, **{title: of.get(name, "-") for title, of in figures.items()}}
        if one["table"]:
            went = one["table"][name]
            row |= {"step": went["step_ms"], "compute": went["compute_ms"], "exchange": went["exchange_ms"]}
            row |= {"not overlapped": went["exposed_ms"], "free": went["free_ms"]}
        rows.append(row)
    title = f"compute : exchange {one['ratio']:.2f}; from `step` on: one recorded step of rank 0, ms"
    harness.print_table(title, rows)


def main() -> None:
    arguments = harness.parse_arguments(__doc__.splitlines()[0])
    reason = network.why_not()
    cases = []
    if reason is None:
        phases = []
        for ratio, rate in RATES.items():
            few = arguments.quick and ratio != 1
            repeats, recorded = (QUICK_REPEATS, QUICK_RECORDED) if arguments.quick else (REPEATS, RECORDED)
            arms = QUICK_ELSEWHERE if few else list(ARMS)
            phases.append({"rate": rate, "arms": arms, "repeats": repeats, "recorded": 0 if few else recorded})
        cases = [case(*of_phase) for of_phase in zip(RATES, run_ranks(SIZE, phases))]
        for one in cases:
            show(one)
    else:
        print(f"not measured: {reason}")
    even = next((one for one in cases if one["wanted_ratio"] == 1), None)
    clustered = clustering.headline(1 if arguments.quick else 4)
    results: dict[str, Any] = {
        **fields(even),
        "bytes_ratio_clustered": None if clustered is None else clustered["ratio"],
        "clustering_ms": None if clustered is None else clustered["clustering_ms"],
        "clustering": clustered,
        "not_measured": reason,
        "rates": {str(ratio): rate for ratio, rate in RATES.items()},
        "size": dataclasses.asdict(SIZE),
        "cases": cases,
    }
    shown = [*fields(even), "bytes_ratio_clustered", "clustering_ms"]
    harness.print_table("fields", [{"field": name, "value": results[name]} for name in shown])
    harness.write_json(arguments.json, results)


if __name__ == "__main__":
    harness.run(main)
