"""Question: what do the exchange of splits, the negotiation and the one queue of Horovod cost, by latency?

    python -m benchmarks.horovod_queue [--quick] [--json FILE]

Four ranks run as 2 x 2, as in benchmarks.overlap: two hosts, and a cable of 1 Gbit/s that delays each frame
(harness/delayed_cable.py). An all-to-all of Horovod over Gloo has three parts:

    negotiation   in each cycle, all ranks of a process set agree on what all of them have asked for
    splits        ranks tell each other how many rows they will send (AlltoallOp::PrepareOutputAndParams)
    rows          the rows themselves

AT_ONCE all-to-alls of no rows share a negotiation, and each makes two exchanges of a few bytes: its splits, and its
empty rows. So their time beyond one's gives the splits, and the rest of one is its negotiation:

    splits_ms      = (empty_8 - empty) / 7 / 2
    negotiation_ms = empty - 2 splits_ms

A second job has the process sets of two groups as well, and gives `with_sets`. There, an all-to-all inside a host asks
while an all-reduce between the hosts runs: blocked_ms is what it takes longer than alone.

Steps of benchmarks.overlap run at the same latencies, with a compute of RATIO times the exchange without latency:

    latency_part_*  what the step takes longer than without latency, as a part of the step
    splits_part_*   the part of it that the splits cause: latency_part * splits_ms / empty
    splits_bound_*  splits_ms of all its all-to-alls, as a part of the step, as if the schedule hid none of them

An all-to-all with known splits saves splits_part. One without negotiation saves at most latency_part. Namespaces need
root, and without root the fields are null. --quick measures one latency and sync alone, with fewer repeats.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import children, harness, network
from benchmarks.horovod_queue.ranks import AT_ONCE
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap import device_stream

RANKS, RATE = 4, "1gbit"
LATENCIES_MS, QUICK_LATENCIES_MS = (0.0, 0.1, 1.0, 5.0), (0.0, 1.0)
STEPS = {"sync": "sync", "nested": "nested_M8"}  # name in a field, and the variant of benchmarks.overlap
ROWS = 1_800  # to each rank: the distinct ids of a batch by owner
REPEATS, QUICK_REPEATS = 60, 10
STEP_REPEATS, QUICK_STEP_REPEATS = 9, 2
TIMEOUT_S = 1500


def measured(quick: bool, *, sets: bool) -> list[dict[str, Any]]:
    """Returns the cases of ranks.main. The steps run in the job without sets."""
    variants = [] if sets else [STEPS["sync"]] if quick else list(STEPS.values())
    steps = {
        "size": dataclasses.asdict(overlap.DEVICE_SIZE), "ratio": overlap.RATIO, "variants": variants,
        "repeats": QUICK_STEP_REPEATS if quick else STEP_REPEATS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        delay = pathlib.Path(folder) / "delay"
        with network.spread(RANKS, delay) as where:
            return children.ask_ranks(
                "benchmarks.horovod_queue.ranks", RANKS, **where, timeout_s=TIMEOUT_S,
                latencies_ms=QUICK_LATENCIES_MS if quick else LATENCIES_MS, delay=str(delay), rate=RATE, sets=sets,
                rows=ROWS, repeats=QUICK_REPEATS if quick else REPEATS, steps=steps,
            )  # fmt: skip


def parts(case: Mapping[str, Any]) -> dict[str, float]:
    """Returns splits_ms and negotiation_ms of one all-to-all."""
    splits = max(0.0, case[f"ms_empty_{AT_ONCE}"] - case["ms_empty"]) / (AT_ONCE - 1) / 2
    return {"splits_ms": splits, "negotiation_ms": case["ms_empty"] - 2 * splits}


def figures(case: Mapping[str, Any], with_sets: Mapping[str, Any], at_once: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures at one latency.

    Args:
      case: A case of the job without sets.
      with_sets: The case of the same latency with sets.
      at_once: The case of the job without sets and without latency.
    """
    found: dict[str, Any] = {"latency_ms": case["latency_ms"], "rows_ms": case["ms_rows"], **parts(case)}
    found["negotiation_ms_with_sets"] = parts(with_sets)["negotiation_ms"]
    found["exchange_alone_ms"] = with_sets["ms_exchange_alone"]
    found["reduce_alone_ms"] = with_sets["ms_reduce_alone"]
    found["blocked_ms"] = with_sets["ms_exchange_queued"] - with_sets["ms_exchange_alone"]
    for name, variant in STEPS.items():
        if variant not in case["steps"]:
            continue
        step, without_latency = case["steps"][variant], at_once["steps"][variant]["ms"]
        latency_part = max(0.0, 1 - without_latency / step["ms"])
        found[f"step_ms_{name}"] = step["ms"]
        found[f"latency_part_{name}"] = latency_part
        found[f"splits_part_{name}"] = latency_part * found["splits_ms"] / case["ms_empty"]
        found[f"splits_bound_{name}"] = step["all_to_alls"] * found["splits_ms"] / step["ms"]
    return found


def fields(cases: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the parts of the steps by latency, such as splits_part_sync_1ms. None: not measured."""
    by_latency = {case["latency_ms"]: case for case in cases}
    return {
        f"{part}_{name}_{latency_ms:g}ms": by_latency.get(latency_ms, {}).get(f"{part}_{name}")
        for part in ("splits_part", "latency_part")
        for name in STEPS
        for latency_ms in LATENCIES_MS[1:]
    }


def main() -> None:
    arguments = harness.parse_arguments(__doc__.splitlines()[0])
    reason = network.why_not()
    cases, raw = [], {}
    if reason is None:
        device_stream.compiled()  # once, before the ranks ask for it
        raw = {"without_sets": measured(arguments.quick, sets=False), "with_sets": measured(arguments.quick, sets=True)}
        cases = [figures(*pair, raw["without_sets"][0]) for pair in zip(raw["without_sets"], raw["with_sets"])]
        harness.print_table("one all-to-all, and steps of schedules; ms, by latency of the cable", cases)
    else:
        print(f"not measured: {reason}")
    shown = fields(cases)
    harness.print_table("fields", [{"field": name, "value": value} for name, value in shown.items()])
    harness.write_json(arguments.json, {**shown, "not_measured": reason, "cases": cases, "measured": raw})


if __name__ == "__main__":
    harness.run(main)
