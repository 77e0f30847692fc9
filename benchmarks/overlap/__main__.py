"""Question: how much of the exchanges does each schedule hide under dense compute when the network is slow?

    python -m benchmarks.overlap [--quick] [--json FILE]

Two ranks train a GRM. A network namespace limits their loop-back to 1 Gbit/s, where dense compute takes about as long
as the exchange. A slower and a quicker network make it half and twice as long. Namespaces need root, and without root
the fields are null. All variants take turns with the dense part alone and the exchange alone.

    exposed = (step - dense only) / (exchange only)

"dense only" reads rows from a variable and averages no gradients. "exchange only" is lookup and update with their
all-to-alls. Variants with 2d have two groups of one rank (rule gradient_sync): no rows travel, and gradients go to both
replicas. Variants with a file keep most rows in the second tier. Its pages leave memory before every step, and the
baseline of these variants is sync_file.

The table shows the median of a few recorded steps of rank 0. Its columns are the times of compute, of exchange, of
exchange without compute, and of neither (TurboGR, table 6). Other processes record these steps, since Horovod's
timeline takes part of a core. The fields are those at compute : exchange = 1. --quick measures all variants there, and
QUICK_ELSEWHERE at the other two ratios.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.clustering import bytes_sent
from benchmarks.harness import children, harness, network
from benchmarks.overlap.model import SIZE, Size
from benchmarks.overlap.ranks import RANKS, TIMEOUT_S, VARIANTS

RATES = {1.0: "1gbit", 0.5: "450mbit", 2.0: "2500mbit"}  # by the ratio compute : exchange that they approach
REPEATS, QUICK_REPEATS = 14, 4
RECORDED, QUICK_RECORDED = 3, 1  # recorded steps of each variant
QUICK_ELSEWHERE = ("sync", "frozen_M4", "nested_M4")  # variants of --quick at the other ratios
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
    """Runs two ranks in a namespace, to time all phases, and two more to record them.

    Args:
      size: Size of a rank's step.
      phases: The argument of ranks.main.

    Returns:
      `ms` and `table` of each phase.

    Raises:
      CheckFailed: The ranks failed or exceeded the time limit.
    """

    def ask(wanted: Sequence[Mapping[str, Any]], recording: bool) -> list[dict[str, Any]]:
        if not wanted:
            return []
        with network.slow_loopback(wanted[0]["rate"]) as name, tempfile.TemporaryDirectory() as folder:
            return children.ask_ranks(
                "benchmarks.overlap.ranks", RANKS, inside=network.inside(name, []), timeout_s=TIMEOUT_S,
                size=dataclasses.asdict(size), phases=list(wanted), folder=folder, recording=recording,
            )  # fmt: skip

    timed = ask(phases, recording=False)
    tables = iter(ask([phase for phase in phases if phase["recorded"]], recording=True))
    return [{"ms": ms, "table": next(tables) if phase["recorded"] else {}} for phase, ms in zip(phases, timed)]


def case(ratio: float, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of one phase: medians in ms, and the exposed part of the exchange."""
    ms = {name: float(np.median(values)) for name, values in answer["ms"].items()}
    dense, exchange = ms["dense_only"], ms["exchange_only"]
    names = [name for name in VARIANTS if name in ms]
    return {
        "wanted_ratio": ratio,
        "ratio": dense / exchange,
        "ms": ms,
        "exposed_ms": {name: ms[name] - dense for name in names},
        "exposed_ratio": {name: (ms[name] - dense) / exchange for name in names},
        "speedup": {name: ms[VARIANTS[name].baseline] / ms[name] for name in names},
        "exposed_allreduce_ms": ms["dense_with_allreduce"] - dense,
        "table": answer["table"],
    }


def fields(one: dict[str, Any] | None) -> dict[str, float | None]:
    """Returns FIELDS of the case with as much compute as exchange, or None for each without root."""
    found = {name: None if one is None else one[figure][variant] for name, (figure, variant) in FIELDS.items()}
    return {**found, "exposed_allreduce_ms": None if one is None else one["exposed_allreduce_ms"]}


def show(one: dict[str, Any]) -> None:
    rows = []
    for name, ms in one["ms"].items():
        figures = {"exposed ratio": one["exposed_ratio"], "times sync": one["speedup"]}
        row = {"variant": name, "ms": ms, **{title: of.get(name, "-") for title, of in figures.items()}}
        if one["table"]:
            recorded = one["table"][name]
            row |= {"step": recorded["step_ms"], "compute": recorded["compute_ms"]}
            row |= {"exchange": recorded["exchange_ms"], "not overlapped": recorded["exposed_ms"]}
            row |= {"free": recorded["free_ms"]}
        rows.append(row)
    title = f"compute : exchange {one['ratio']:.2f}; the columns from `step` on show one recorded step of rank 0, ms"
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
            names = QUICK_ELSEWHERE if few else list(VARIANTS)
            phases.append({"rate": rate, "variants": names, "repeats": repeats, "recorded": 0 if few else recorded})
        cases = [case(*of_phase) for of_phase in zip(RATES, run_ranks(SIZE, phases))]
        for one in cases:
            show(one)
    else:
        print(f"not measured: {reason}")
    even = next((one for one in cases if one["wanted_ratio"] == 1), None)
    clustered = bytes_sent.headline(1 if arguments.quick else 4)
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
