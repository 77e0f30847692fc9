"""Question: how much of the exchanges and lookups does each schedule hide, as on an accelerator, over unequal links?

    python -m benchmarks.overlap [--quick] [--json FILE]

Four ranks run as 2 x 2: two network namespaces are hosts with two ranks each. A cable joins them, limited to 1 Gbit/s
each way. Namespaces need root, and without root the fields are null. THE DENSE PART IS NOT COMPUTED. It is a stream of
ops that take time and no core (device.py). The cores are free for tables and exchanges, as they are beside an
accelerator. It takes the times of a real GRM on one core (real_model.py). One factor divides them and makes the
compute RATIO times as long as the exchange of sync. The factor is printed. Tables, exchanges and schedules are real.

Lookups of the variants *_lookup25 and *_lookup45 take that part of the step of sync. They wait for a slow memory, a
throttle of so much time per id on a stream of its own. A file would share its disk with the whole machine.

    exposed ratio = time in which some exchange runs and the device stream does not / exchange alone
    floor         = the step that the schedule's dependencies allow, from parts measured alone (figures.py)

"exchange alone" is the same variant with a device and a memory that take no time. Ops and collectives record their own
times. A wait for another rank counts as exchange, from the time when this rank asks. "free" is time in which no
exchange, device or memory runs: work of the host that nothing hides. The last columns are processor time, as evidence
that cores are free. floor_ratio_worst is the largest step / floor of all variants.

Then, at SLOW_RATE, the device is slower, too, so that compute again is
RATIO times as long as the exchange: the same step in slow motion, for which four ranks have more of the two cores. The
fields that end with SLOW_RATE show it. Weak scaling follows, over 1, 2, 4 and 8 ranks that share the cable. Last comes
the contended case (real_model.py), in which two ranks compute on their own cores. --quick measures QUICK_VARIANTS at
the first rate and nothing else; the other fields are null.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import harness, network, processes
from benchmarks.overlap import figures, ranks, real_model
from benchmarks.overlap.device import DeviceSize, compiled
from benchmarks.overlap.real_model import SIZE
from benchmarks.overlap.variants import VARIANTS
from benchmarks.papers.clustering import headline

DEVICE_SIZE = DeviceSize(users=64, tokens_per_user=128, dim=512)
RANKS, RATE, RATIO = 4, "1gbit", 1.4
OTHER_VARIANTS = ("sync", "frozen_M4", "nested_M8", "semi_async")
SLOW_RATE = "250mbit"
SCALING_RANKS, SCALING_VARIANTS = (1, 2, 8), ("sync", "nested_M8")
QUICK_VARIANTS = ("sync", "frozen_M4", "nested_M8", "dual", "semi_async", "2d", "sync_lookup45", "dual_lookup45")
REPEATS, QUICK_REPEATS = 5, 2
BARE, QUICK_BARE = 3, 1
TIMEOUT_S = 1500


def measured_compute(quick: bool) -> dict[str, Any]:
    """Returns the fields of device.Compute from the real model."""
    return processes.ask(real_model.compute_times, size=dataclasses.asdict(SIZE), repeats=3 if quick else 9)


def phase(rate: str | None, variants: Sequence[str], repeats: int, bare: int, **pace: float | None) -> dict[str, Any]:
    """Returns a phase of ranks.main. `pace` sets `ratio` or `device`; none: the pace of the phase before."""
    given = {"rate": rate, "variants": list(variants), "repeats": repeats, "bare": bare}
    return {**given, "ratio": None, "device": None, **pace}


def run_ranks(
    count: int, size: DeviceSize, compute: Mapping[str, Any], phases: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the case of each phase. One rank has no cable, and an even number of ranks is spread over two hosts."""
    compiled()  # once, before the ranks ask for it
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(network.spread(count)) if count > 1 else {}
        answers = processes.ask_ranks(
            ranks.on_rank, count, **where, timeout_s=TIMEOUT_S, size=dataclasses.asdict(size), compute=dict(compute),
            phases=list(phases),
        )  # fmt: skip
    return [figures.case(one, answer, size.layers, count) for one, answer in zip(phases, answers)]


def weak_scaling(size: DeviceSize, compute: Mapping[str, Any], main: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the step of SCALING_VARIANTS by number of ranks, with the pace of the main case."""
    cases = [main]
    for count in SCALING_RANKS:
        one = phase(RATE if count > 1 else None, SCALING_VARIANTS, REPEATS, BARE, device=1 / main["device_cores"])
        cases += run_ranks(count, size, compute, [one])
    cases.sort(key=lambda one: one["ranks"])
    alone = cases[0]["variants"]
    return [
        {
            "ranks": one["ranks"],
            **{f"ms_{variant}": one["variants"][variant]["ms"] for variant in SCALING_VARIANTS},
            **{
                f"efficiency_{variant}": alone[variant]["ms"] / one["variants"][variant]["ms"]
                for variant in SCALING_VARIANTS
            },
            "cores": one["variants"]["nested_M8"]["cores"],
        }
        for one in cases
    ]


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    quick, reason = arguments.quick, network.why_not()
    cases: list[dict[str, Any]] = []
    scaling: list[dict[str, Any]] = []
    compute, own_cores = None, None
    if reason is None:
        compute = measured_compute(quick)
        repeats, bare = (QUICK_REPEATS, QUICK_BARE) if quick else (REPEATS, BARE)
        phases = [phase(RATE, QUICK_VARIANTS if quick else list(VARIANTS), repeats, bare, ratio=RATIO)]
        if not quick:
            phases.append(phase(SLOW_RATE, OTHER_VARIANTS, repeats, bare, ratio=RATIO))
        cases = run_ranks(RANKS, DEVICE_SIZE, compute, phases)
        for one in cases:
            figures.show(one)
        if not quick:
            scaling = weak_scaling(DEVICE_SIZE, compute, cases[0])
            harness.print_table(f"weak scaling: ranks on two hosts that share {RATE}", scaling)
            own_cores = real_model.contended(SIZE, list(real_model.SCHEDULES), REPEATS)
            harness.print_fields("contended: 2 ranks compute on their cores, ms", own_cores["ms"])
    else:
        print(f"not measured: {reason}")
    clustered = headline(1 if quick else 4)
    shown = {
        **figures.fields(cases[0] if cases else None),
        **figures.fields_at(SLOW_RATE, cases),
        **real_model.contended_fields(own_cores),
        "bytes_ratio_clustered": None if clustered is None else clustered["ratio"],
        "clustering_ms": None if clustered is None else clustered["clustering_ms"],
    }
    harness.print_fields("fields", shown)
    results = {
        **shown, "clustering": clustered, "not_measured": reason, "size": dataclasses.asdict(DEVICE_SIZE),
        "real_model": dataclasses.asdict(SIZE), "compute": compute, "cases": cases, "weak_scaling": scaling,
        "contended": own_cores,
    }  # fmt: skip
    harness.write_json(arguments.json, results)


if __name__ == "__main__":
    processes.program(main)
