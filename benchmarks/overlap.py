"""Question: how much of the exchanges does each schedule hide under dense compute when the network is slow?

    python -m benchmarks.overlap [--quick] [--json FILE]

Two ranks of GRM whose loop-back is limited to 1 Gbit/s in a network namespace, which needs root; without it the fields
are null. Compute is made 0.5, 1 and 2 times as long as the exchange by the number of blocks. In each run all contenders
take turns: the step of every schedule, its dense part alone and its exchange alone.

    exposed = (step - dense only) / (exchange only)

Dense only has rows that are there and averages no gradients; exchange only is lookup and update with their all2alls.
The table says for the median of a few recorded steps of rank 0 how long it computed, exchanged, exchanged with nothing
else to do, and did neither (TurboGR, table 6). Fields without a suffix are those of compute : exchange = 1.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks import children, clustering, harness, network
from benchmarks.overlap_model import Size
from benchmarks.overlap_ranks import MARK, SCHEDULES

RATE = "1gbit"
TIMEOUT_S = 600
SIZE = Size(users=64, history=120, exposures=8, dim=512, blocks=2)
FIELDS = ("exposed_ratio_sync", "exposed_ratio_frozen_M4", "exposed_allreduce_ms", "speedup_frozen")
BLOCKS = {0.5: 1, 1.0: 3, 2.0: 6}  # by compute : exchange that they come near to


def run_ranks(size: Size, repeats: int) -> dict[str, Any]:
    """What overlap_ranks answers, from two processes in a namespace of their own.

    Raises:
      CheckFailed: they failed, or did not end in time.
    """
    request = json.dumps({"size": dataclasses.asdict(size), "repeats": repeats})
    horovodrun = str(pathlib.Path(sys.executable).parent / "horovodrun")
    with network.slow_loopback(RATE) as name:
        ranks = [horovodrun, "-np", "2", "--gloo", sys.executable, "-m", "benchmarks.overlap_ranks", request]
        try:
            done = subprocess.run(
                network.inside(name, ranks), env=children.environment(), cwd=harness.ROOT, timeout=TIMEOUT_S,
                encoding="utf-8", errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            raise harness.CheckFailed(f"the ranks did not end within {TIMEOUT_S} s.") from expired
    answers = [line.split(MARK, 1)[1] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not answers:
        raise harness.CheckFailed("the ranks failed:\n" + "\n".join(done.stdout.splitlines()[-30:]))
    return json.loads(answers[-1])


def case(ratio: float, answer: dict[str, Any]) -> dict[str, Any]:
    """One run as figures: medians in ms, and what is exposed of the exchange."""
    ms = {name: float(np.median(values)) for name, values in answer["ms"].items()}
    dense, exchange = ms["dense_only"], ms["exchange_only"]
    return {
        "wanted_ratio": ratio,
        "ratio": dense / exchange,
        "ms": ms,
        "exposed_ms": {name: ms[name] - dense for name in SCHEDULES},
        "exposed_ratio": {name: (ms[name] - dense) / exchange for name in SCHEDULES},
        "speedup": {name: ms["sync"] / ms[name] for name in SCHEDULES},
        "exposed_allreduce_ms": ms["dense_with_allreduce"] - dense,
        "table": answer["table"],
    }


def fields(one: dict[str, Any] | None) -> dict[str, float | None]:
    """The figures that are asked for by name, of the case with as much compute as exchange; None without root."""
    if one is None:
        return dict.fromkeys(FIELDS)
    return {
        "exposed_ratio_sync": one["exposed_ratio"]["sync"],
        "exposed_ratio_frozen_M4": one["exposed_ratio"]["frozen_M4"],
        "exposed_allreduce_ms": one["exposed_allreduce_ms"],
        "speedup_frozen": one["speedup"]["frozen_M4"],
    }


def show(one: dict[str, Any]) -> None:
    rows = [
        {
            "contender": name,
            "ms": one["ms"][name],
            "exposed ratio": one["exposed_ratio"].get(name, "-"),
            "times sync": one["speedup"].get(name, "-"),
            **{column.removesuffix("_ms"): ms for column, ms in one["table"][name].items()},
        }
        for name in one["ms"]
    ]
    title = f"compute : exchange {one['ratio']:.2f}; from `step` on: one recorded step of rank 0, ms"
    harness.print_table(title, rows)


def main() -> None:
    arguments = harness.parse_arguments(__doc__.splitlines()[0])
    reason = network.why_not()
    cases = []
    if reason is None:
        for ratio, blocks in BLOCKS.items():
            size = dataclasses.replace(SIZE, blocks=blocks)
            cases.append(case(ratio, run_ranks(size, 8 if arguments.quick else 30)))
            show(cases[-1])
    else:
        print(f"not measured: {reason}")
    even = next((one for one in cases if one["wanted_ratio"] == 1), None)
    clustered = clustering.headline(1 if arguments.quick else 4)
    results: dict[str, Any] = {
        **fields(even),
        "bytes_ratio_clustered": None if clustered is None else clustered["ratio"],
        "clustering": clustered,
        "not_measured": reason,
        "rate": RATE,
        "size": dataclasses.asdict(SIZE),
        "cases": cases,
    }
    harness.print_table(
        "fields", [{"field": name, "value": results[name]} for name in [*FIELDS, "bytes_ratio_clustered"]]
    )
    harness.write_json(arguments.json, results)


if __name__ == "__main__":
    harness.run(main)
