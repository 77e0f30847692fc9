"""Question: what do the exchange of splits, the negotiation and the one queue of Horovod cost, by latency?

    python -m benchmarks.papers.horovod_queue [--quick] [--json FILE]

Four ranks run as 2 x 2, as in benchmarks.overlap: two hosts, and a cable of 1 Gbit/s that delays each frame
(harness/network.py). An all-to-all of Horovod over Gloo has three parts:

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

An all-to-all with known splits saves splits_part. One without negotiation saves at most latency_part. Namespaces need
root, and without root the fields are null. --quick measures one latency and sync alone, with fewer repeats. A time
is from the call until a rank has its result. The slowest rank's time counts, and of these the median.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, network, processes, ranks
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap import device
from benchmarks.overlap.device import Compute, DeviceSize
from benchmarks.overlap.ranks import device_factor, measure, started
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout

AT_ONCE = 8  # all-to-alls in one call, which share one negotiation
GROUPS = fr.Topology(2)  # a group is a host, and the replicas of a shard are on both hosts
REDUCED = 500_000  # numbers of the all-reduce in the queue
IN_GROUP = 1_000  # rows that a rank of a group sends to each rank
COMPUTE = Compute(fixed=(0.0, 0.0), per_token=(1e-5, 2e-5))  # one third forward; the pace scales it
LATER_S = 0.01  # the all-to-all asks so long after the all-reduce, which runs by then

Call = Callable[[], Any]


def all_to_alls(name: str, rows: int, dim: int, at_once: int) -> Call:
    """Returns a call of `at_once` all-to-alls, each of `rows` to every rank. Checks what arrives."""
    ranks, me = collectives.size(), collectives.rank()
    sent = tf.reshape(tf.repeat(tf.range(ranks, dtype=tf.float32) + ranks * me, rows * dim), [ranks * rows, dim])

    @tf.function(autograph=False)
    def call() -> list[tf.Tensor]:
        splits = tf.fill([ranks], rows)
        return [collectives.all_to_all(sent, splits, name=f"{name}.{n}")[0] for n in range(at_once)]

    for received in call():
        harness.check_equal(f"rows of {name}", received[:, :1], np.repeat(np.arange(ranks) * ranks + me, rows)[:, None])
    return call


def queue(dim: int) -> dict[str, Call]:
    """Returns calls of an all-to-all inside the group, an all-reduce among the replicas, and both.

    The all-to-all asks LATER_S after the call begins.
    """
    layout = RankLayout(GROUPS)
    rows = tf.fill([IN_GROUP * layout.group.size, dim], float(layout.group.index))
    numbers = tf.ones([REDUCED])

    def exchange() -> tf.Tensor:
        later = device.wait(rows, tf.constant(LATER_S, tf.float64), device.MEMORY)
        splits = tf.fill([layout.group.size], IN_GROUP)
        return collectives.all_to_all(later, splits, name="queue.rows", ranks=layout.group)[0]

    def reduce() -> tf.Tensor:
        return collectives.all_reduce_sum(numbers, name="queue.sum", ranks=layout.replicas)

    calls: dict[str, Call] = {
        "exchange": tf.function(exchange, autograph=False),
        "reduce": tf.function(reduce, autograph=False),
        "both": tf.function(lambda: (exchange(), reduce()), autograph=False),
    }
    with device.stamping():
        received, total = calls["both"]()
        calls["exchange"](), calls["reduce"]()
    harness.check_equal("rows of the group", received[:, 0], np.repeat(np.arange(layout.group.size), IN_GROUP))
    harness.check_equal("sums of the replicas", total, np.full(REDUCED, layout.replicas.size))
    return calls


def span(call: Call, name: str) -> float:
    """Returns the seconds of one collective of a call. Collective."""
    collectives.barrier()
    device.take_record()
    call()
    ((begin, end),) = device.take_record()[name]
    return end - begin


def on_rank(
    latencies_ms: Sequence[float],
    delay: str,
    rate: str,
    sets: bool,
    rows: int,
    repeats: int,
    steps: Mapping[str, Any],
) -> list[dict[str, Any]] | None:
    """Measures at each latency. Returns, on rank 0, the cases."""
    size = DeviceSize(**steps["size"])
    pace, variants, _ = started(size, COMPUTE, steps["variants"], [GROUPS] if sets else [])
    if os.environ["HOROVOD_LOCAL_RANK"] == "0":
        network.limit_here("eth0", rate)
    calls = {
        "empty": all_to_alls("empty", 0, size.dim, 1),
        f"empty_{AT_ONCE}": all_to_alls(f"empty_{AT_ONCE}", 0, size.dim, AT_ONCE),
        "rows": all_to_alls("rows", rows, size.dim, 1),
    }  # fmt: skip
    queued = queue(size.dim) if sets else {}
    spans = {
        "exchange_alone": ("exchange", "queue.rows"), "exchange_queued": ("both", "queue.rows"),
    }  # fmt: skip
    cases, factor = [], 0.0
    for latency_ms in latencies_ms:
        collectives.barrier()
        if collectives.rank() == 0:
            network.set_delay(pathlib.Path(delay), 1e-3 * latency_ms)
        # The warm-up fills Horovod's response cache.
        ms = ranks.turns(calls, warmup=1, repeats=repeats).ms
        if sets:
            seconds = [[span(queued[call], name) for call, name in spans.values()] for _ in range(repeats + 1)][1:]
            slowest = np.median(collectives.all_gather(np.array([seconds])).max(axis=0), axis=0)
            ms |= {name: 1e3 * float(value) for name, value in zip(spans, slowest)}
        case: dict[str, Any] = {"latency_ms": latency_ms, **{f"ms_{name}": value for name, value in ms.items()}}
        if variants:
            # The first latency sets the pace of the device.
            compute_s = COMPUTE.seconds(size.tokens)
            factor = factor or device_factor(variants["sync"], pace, compute_s, steps["ratio"])
            turns = measure(variants, pace, factor, steps["variants"], steps["repeats"], 1)
            case["step_ms"] = {name: turns[name]["full"]["step"] for name in variants}
        ranks.print_on_rank_0(f"{latency_ms} ms: {case}")
        cases.append(case)
    return cases if collectives.rank() == 0 else None


RANKS, RATE = 4, "1gbit"
LATENCIES_MS, QUICK_LATENCIES_MS = (0.0, 0.1, 1.0, 5.0), (0.0, 1.0)
STEPS = {"sync": "sync", "nested": "nested_M8"}  # name in a field, and the variant of benchmarks.overlap
ROWS = 1_800  # to each rank: the distinct ids of a batch by owner
REPEATS, QUICK_REPEATS = 60, 10
STEP_REPEATS, QUICK_STEP_REPEATS = 9, 2
TIMEOUT_S = 1500


def measured(quick: bool, *, sets: bool) -> list[dict[str, Any]]:
    """Returns the cases of on_rank. The steps run in the job without sets."""
    variants = [] if sets else [STEPS["sync"]] if quick else list(STEPS.values())
    steps = {
        "size": dataclasses.asdict(overlap.DEVICE_SIZE), "ratio": overlap.RATIO, "variants": variants,
        "repeats": QUICK_STEP_REPEATS if quick else STEP_REPEATS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        delay = pathlib.Path(folder) / "delay"
        with network.spread(RANKS, delay) as where:
            return processes.ask_ranks(
                on_rank, RANKS, **where, timeout_s=TIMEOUT_S,
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
    found["blocked_ms"] = with_sets["ms_exchange_queued"] - with_sets["ms_exchange_alone"]
    for name, variant in STEPS.items():
        if variant in case["step_ms"]:
            step_ms = found[f"step_ms_{name}"] = case["step_ms"][variant]
            latency_part = found[f"latency_part_{name}"] = max(0.0, 1 - at_once["step_ms"][variant] / step_ms)
            found[f"splits_part_{name}"] = latency_part * found["splits_ms"] / case["ms_empty"]
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
    arguments = harness.parser(__doc__).parse_args()
    reason = network.why_not()
    cases = []
    if reason is None:
        device.compiled()  # once, before the ranks ask for it
        without_sets, with_sets = (measured(arguments.quick, sets=sets) for sets in (False, True))
        cases = [figures(*pair, without_sets[0]) for pair in zip(without_sets, with_sets)]
        harness.print_table("one all-to-all, and steps of schedules; ms, by latency of the cable", cases)
    else:
        print(f"not measured: {reason}")
    shown = fields(cases)
    harness.print_fields("fields", shown)
    harness.write_json(arguments.json, {**shown, "not_measured": reason, "cases": cases})


if __name__ == "__main__":
    processes.program(main)
