"""Question: how far is the choice of fr.plan from the best choice, found by trying all?

    python -m benchmarks.planner [--quick] [--json FILE]

Twelve workloads (workloads.py): three sizes of a step on four networks. Four ranks on two hosts train each choice, with
a device stream in place of dense compute, as in benchmarks.overlap. fr.plan gets the same model in one process, with
the rate of the cable and the measured time of one message. It knows nothing of the runs.

    regret       = step of fr.plan's choice over the quickest step that was measured, less 1
    error        = forecast over measured step of fr.plan's choice, less 1
    bytes error  = forecast over counted bytes of a step of sync, less 1

After two rounds, only choices within 30 % of the best are measured on.

Needs root; without root the fields are null. --quick tries a few choices for one size on two networks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import children, harness, network
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap import device_stream
from benchmarks.overlap.device_model import DeviceSize
from benchmarks.planner.workloads import CHOICES, NETWORKS, QUICK_CHOICES, RANKS, SIZES, Network

REPEATS, QUICK_REPEATS = 7, 2
WITHIN = 0.05
TIMEOUT_S = 1800


def run(
    size: DeviceSize, compute: dict[str, Any], networks: Sequence[Network], names: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Returns the case of each network: measured and forecast steps of all choices.

    Raises:
      CheckFailed: The ranks or the planner failed.
    """
    asked: dict[str, Any] = {"size": dataclasses.asdict(size), "compute": compute, "names": list(names)}
    device_stream.compiled()  # once, before the ranks ask for it
    with network.spread(RANKS) as where:
        measured = children.ask_ranks(
            "benchmarks.planner.ranks", RANKS, **where, timeout_s=TIMEOUT_S, networks=networks, repeats=repeats, **asked
        )
    paces = [{**answer, "bytes_per_s": one.bytes_per_s} for answer, one in zip(measured, networks)]
    forecasts = children.ask("benchmarks.planner.choose", paces=paces, **asked)
    return [case(one, *parts) for one, *parts in zip(networks, measured, forecasts)]


def case(one: Network, measured: dict[str, Any], forecasts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of one workload."""
    ms, chosen = measured["ms"], forecasts[0]
    of_sync = next(forecast for forecast in forecasts if forecast["choice"] == "sync")
    best = min(ms, key=lambda name: ms[name])
    return {
        **one._asdict(),
        "message_ms": 1e3 * measured["message_s"],
        "best": best,
        "best_ms": ms[best],
        "chosen": chosen["choice"],
        "chosen_ms": ms[chosen["choice"]],
        "forecast_ms": chosen["ms"],
        "regret": ms[chosen["choice"]] / ms[best] - 1,
        "error": chosen["ms"] / ms[chosen["choice"]] - 1,
        "bytes_error": of_sync["bytes"] / measured["bytes"]["sync"] - 1,
        "measured_ms": ms,
        "forecasts_ms": {forecast["choice"]: forecast["ms"] for forecast in forecasts},
    }


def fields(cases: Sequence[dict[str, Any]]) -> dict[str, float | int | None]:
    """Returns the figures over all workloads, None for each without root."""
    if not cases:
        return dict.fromkeys(("workloads", "within_5_percent", "worst_regret", "median_error", "worst_bytes_error"))
    return {
        "workloads": len(cases),
        "within_5_percent": sum(one["regret"] <= WITHIN for one in cases),
        "worst_regret": max(one["regret"] for one in cases),
        "median_error": float(np.median([abs(one["error"]) for one in cases])),
        "worst_bytes_error": max(abs(one["bytes_error"]) for one in cases),
    }


def main() -> None:
    arguments = harness.parse_arguments(__doc__.splitlines()[0])
    quick, reason = arguments.quick, network.why_not()
    cases: list[dict[str, Any]] = []
    if reason is None:
        compute = overlap.measured_compute(quick)
        sizes = dict([next(iter(SIZES.items()))]) if quick else SIZES
        networks = NETWORKS[:2] if quick else NETWORKS
        names, repeats = (QUICK_CHOICES, QUICK_REPEATS) if quick else (CHOICES, REPEATS)
        for name, size in sizes.items():
            cases += [{"size": name, **one} for one in run(size, compute, networks, names, repeats)]
        hidden = ("measured_ms", "forecasts_ms", "bytes_per_s")
        shown = [{key: value for key, value in one.items() if key not in hidden} for one in cases]
        harness.print_table("the choice of fr.plan and the best choice", shown)
        for one in cases:
            rows = [
                {"choice": name, "measured ms": ms, "forecast ms": one["forecasts_ms"].get(name, "-")}
                for name, ms in one["measured_ms"].items()
            ]
            harness.print_table(f"{one['size']}, {one['rate']}, compute : exchange {one['ratio']}", rows)
    else:
        print(f"not measured: {reason}")
    found = fields(cases)
    harness.print_table("fields", [{"field": name, "value": value} for name, value in found.items()])
    harness.write_json(arguments.json, {**found, "not_measured": reason, "cases": cases})


if __name__ == "__main__":
    harness.run(main)
