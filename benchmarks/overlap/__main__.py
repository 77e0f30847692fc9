"""Question: how much of the exchanges and lookups does each schedule hide, as on an accelerator, over unequal links?

    python -m benchmarks.overlap [--quick] [--json FILE]

Four ranks run as 2 x 2: two network namespaces are hosts with two ranks each. A cable joins them, limited to 1 Gbit/s
each way. Namespaces need root; without root nothing is measured but clustering. THE DENSE PART IS NOT COMPUTED. It is a
stream of ops that take time and no core (device.py). The cores are free for tables and exchanges, as they are beside
an accelerator. It takes the times of a real GRM on one core (real_model.py). One factor divides them and makes the
compute RATIO times as long as the exchange of sync. The factor is printed. Tables, exchanges and schedules are real.

Lookups of the variants *_lookup25 and *_lookup45 take that part of the step of sync. They wait for a slow memory, a
throttle of so much time per id on a stream of its own. A file would share its disk with the whole machine.

    exposed ratio = time in which some exchange runs and the device stream does not / exchange alone
    floor         = the step that the schedule's dependencies allow, from parts measured alone (figures.py)

"exchange alone" is the same variant with a device and a memory that take no time. Ops and collectives record their own
times. A wait for another rank counts as exchange, from the time when this rank asks. "free" is time in which no
exchange, device or memory runs: work of the host that nothing hides. The last columns are processor time, as evidence
that cores are free. floor_ratio_worst is the largest step / floor of all variants.

Then, at SLOW_RATE, the device is slower, too, so that compute again is RATIO times as long as the exchange: the same
step in slow motion, for which four ranks have more of the two cores. The fields that end with SLOW_RATE show it. Weak
scaling follows, over 1, 2, 4 and 8 ranks that share the cable. Last comes the contended case (real_model.py), in which
two ranks compute on their own cores. --quick measures QUICK_VARIANTS at the first rate and nothing else; the other
fields are null.
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
        rate, device = RATE if count > 1 else None, 1 / main["device_cores"]
        phase = {"rate": rate, "variants": SCALING_VARIANTS, "repeats": REPEATS, "bare": BARE, "device": device}
        cases += run_ranks(count, size, compute, [phase])
    rows = []
    for one in sorted(cases, key=lambda one: one["ranks"]):
        ms = {f"ms_{name}": one["variants"][name]["ms"] for name in SCALING_VARIANTS}
        rows.append({"ranks": one["ranks"], **ms, "cores": one["variants"]["nested_M8"]["cores"]})
    return rows


def measured(quick: bool) -> dict[str, Any]:
    """Returns the fields of the JSON file."""
    compute = measured_compute(quick)
    repeats, bare = (QUICK_REPEATS, QUICK_BARE) if quick else (REPEATS, BARE)
    runs = {RATE: QUICK_VARIANTS} if quick else {RATE: tuple(VARIANTS), SLOW_RATE: OTHER_VARIANTS}
    phases = [
        {"rate": rate, "variants": names, "repeats": repeats, "bare": bare, "ratio": RATIO}
        for rate, names in runs.items()
    ]
    cases = run_ranks(RANKS, DEVICE_SIZE, compute, phases)
    for one in cases:
        figures.show(one)
    fast, slow = [*cases, None][:2]
    found: dict[str, Any] = figures.fields(fast, VARIANTS) | figures.fields(slow, OTHER_VARIANTS, f"_{SLOW_RATE}")
    found |= dict.fromkeys(f"contended_speedup_{name}" for name in real_model.SCHEDULES)
    scaling = []
    if not quick:
        scaling = weak_scaling(DEVICE_SIZE, compute, cases[0])
        harness.print_table(f"weak scaling: ranks on two hosts that share {RATE}", scaling)
        found |= real_model.contended(SIZE, list(real_model.SCHEDULES), REPEATS)
    return {**found, "compute": compute, "cases": cases, "weak_scaling": scaling}


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    reason = network.why_not()
    found = measured(arguments.quick) if reason is None else {}
    if reason is not None:
        print(f"not measured: {reason}")
    clustering = headline(1 if arguments.quick else 4)
    harness.print_fields("fields", found)
    harness.print_fields("clustering", clustering or {})
    harness.write_json(arguments.json, {**found, "clustering": clustering, "not_measured": reason})


if __name__ == "__main__":
    processes.program(main)
