"""Question: what do splits, negotiation and the one queue of Horovod cost, by latency, and what does the engine Gloo?

    python -m benchmarks.papers.horovod_queue [--quick] [--json FILE]

Four ranks run as 2 x 2, as in benchmarks.overlap: two hosts, and a cable of 1 Gbit/s that delays each frame
(harness/network.py). In an all-to-all of Horovod over Gloo, all ranks negotiate in a cycle what all of them have asked
for, tell each other how many rows they will send (splits), and send the rows. AT_ONCE all-to-alls of no rows share a
negotiation, and each makes two exchanges of a few bytes: its splits, and its empty rows:

    splits_ms      = (empty_8 - empty) / 7 / 2
    negotiation_ms = empty - 2 splits_ms

A second job has the process sets of two groups as well. There, an all-to-all inside a host asks while an all-reduce
between the hosts runs: blocked_ms is what it takes longer than alone. Steps of benchmarks.overlap run at the same
latencies, with a compute of RATIO times the exchange without latency:

    latency_part_*  what the step takes longer than without latency, as a part of the step
    splits_part_*   the part of it that the splits cause: latency_part * splits_ms / empty

An all-to-all with known splits saves splits_part. One without negotiation saves at most latency_part. A third job does
the same over the engine Gloo, which knows the splits and does not negotiate (exchange="gloo"):

    at_once_ms_*            AT_ONCE all-to-alls of no rows, by engine
    step_ms_sync_gloo, ...  the steps over Gloo, with the compute of the first job's rule

Namespaces need root, and without root there are no cases. --quick measures two latencies and sync alone, with fewer
repeats. A time is from the call until a rank has its result. The slowest rank's time counts, and of these the median.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, network, processes, ranks
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap import device
from benchmarks.overlap.__main__ import device_factor, limit_cable, measure, started
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout

AT_ONCE = 8  # all-to-alls in one call, which share one negotiation
GROUPS = fr.Topology(2)  # a group is a host, and the replicas of a shard are on both hosts
REDUCED = 500_000  # numbers of the all-reduce in the queue
IN_GROUP = 1_000  # rows that a rank of a group sends to each rank
LATER_S = 0.01  # the all-to-all asks so long after the all-reduce, which runs by then

RANKS, RATE = 4, "1gbit"
LATENCIES_MS, QUICK_LATENCIES_MS = (0.0, 0.1, 1.0, 5.0), (0.0, 1.0)
STEPS = {"sync": "sync", "nested": "nested_M8"}  # name in a field, and the variant of benchmarks.overlap
REPEATS, QUICK_REPEATS = 60, 10
STEP_REPEATS, QUICK_STEP_REPEATS = 9, 2
TIMEOUT_S = 1500

Call = Callable[[], Any]
Case = dict[str, float]  # latency_ms, and ms by what took them


def empty(name: str, dim: int, at_once: int) -> Call:
    """Returns a call of `at_once` all-to-alls of no rows."""
    nothing, splits = tf.zeros([0, dim]), tf.zeros([collectives.size()], tf.int32)

    def exchange(name: str) -> tf.Tensor:
        return collectives.all_to_all(nothing, splits, name=name, received_splits=splits)[0]

    return tf.function(lambda: [exchange(f"{name}.{n}") for n in range(at_once)], autograph=False)


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
        "both": tf.function(lambda: (exchange(), reduce()), autograph=False),
    }
    with device.stamping():
        received, total = calls["both"]()
        calls["exchange"]()
    harness.check_equal("rows of the group", received[:, 0], np.repeat(np.arange(layout.group.size), IN_GROUP))
    harness.check_equal("sums of the replicas", total, np.full(REDUCED, layout.replicas.size))
    return calls


def span(call: Call, name: str) -> float:
    collectives.barrier()
    device.take_record()
    call()
    ((begin, end),) = device.take_record().spans[name]
    return end - begin


def calls_on_rank(variants: Sequence[str], repeats: int, step_repeats: int, **cable: Any) -> list[Case]:
    """Returns the ms of empty all-to-alls and of the steps of variants, by latency."""
    size = overlap.DEVICE_SIZE
    pace, steps, _ = started(size, overlap.COMPUTE, variants, [])
    calls = {f"empty_{count}": empty(f"empty_{count}", size.dim, count) for count in (1, AT_ONCE)}
    factor: list[float] = []

    def measured() -> Case:
        ms = ranks.turns(calls, warmup=1, repeats=repeats).ms  # the warm-up fills Horovod's response cache
        if not factor:  # the first latency sets the pace of the device
            factor.append(device_factor(steps["sync"], pace, overlap.COMPUTE.seconds(size.tokens), overlap.RATIO))
        turns = measure(steps, pace, factor[0], variants, step_repeats, 1)
        return {**ms, **{name: turns[name]["full"]["step"] for name in steps}}

    return by_latency(measured, **cable)


def queue_on_rank(repeats: int, **cable: Any) -> list[Case]:
    """Returns the ms of an all-to-all that is alone, and of one beside an all-reduce, by latency."""
    size = overlap.DEVICE_SIZE
    started(size, overlap.COMPUTE, [], [GROUPS])
    calls = queue(size.dim)

    def measured() -> Case:
        seconds = [[span(calls[name], "queue.rows") for name in ("exchange", "both")] for _ in range(repeats + 1)]
        slowest = np.median(collectives.all_gather(np.array([seconds[1:]])).max(axis=0), axis=0)
        return dict(zip(("alone", "queued"), (1e3 * slowest).tolist()))

    return by_latency(measured, **cable)


def by_latency(measured: Callable[[], Case], latencies_ms: Sequence[float], delay: str) -> list[Case]:
    """Measures at each latency of the cable. Collective."""
    limit_cable(RATE)
    cases = []
    for latency_ms in latencies_ms:
        collectives.barrier()
        if collectives.rank() == 0:
            network.set_delay(pathlib.Path(delay), 1e-3 * latency_ms)
        cases.append({"latency_ms": latency_ms, **measured()})
        ranks.print_on_rank_0(str(cases[-1]))
    return cases


def on_two_hosts(function: Callable[..., Any], exchange: str, **request: Any) -> list[Case]:
    with tempfile.TemporaryDirectory() as folder:
        delay = pathlib.Path(folder) / "delay"
        with network.spread(RANKS, delay) as where:
            where["variables"] = {**where["variables"], "FUSEDREC_EXCHANGE": exchange}
            return processes.ask_ranks(function, RANKS, **where, timeout_s=TIMEOUT_S, delay=str(delay), **request)


def figures(case: Case, at_once: Case, queued: Case, gloo: Case) -> Case:
    """Returns the figures at the latency of `case`, `queued` and `gloo`. `at_once` is the case without latency."""
    empty_ms = case["empty_1"]
    splits_ms = max(0.0, case[f"empty_{AT_ONCE}"] - empty_ms) / (AT_ONCE - 1) / 2
    fields = {"latency_ms": case["latency_ms"], "splits_ms": splits_ms, "negotiation_ms": empty_ms - 2 * splits_ms}
    fields["blocked_ms"] = queued["queued"] - queued["alone"]
    fields["at_once_ms_horovod"], fields["at_once_ms_gloo"] = case[f"empty_{AT_ONCE}"], gloo[f"empty_{AT_ONCE}"]
    for name, variant in STEPS.items():
        if variant in case:
            step_ms = fields[f"step_ms_{name}"] = case[variant]
            latency_part = fields[f"latency_part_{name}"] = max(0.0, 1 - at_once[variant] / step_ms)
            fields[f"splits_part_{name}"] = latency_part * splits_ms / empty_ms
            fields[f"step_ms_{name}_gloo"] = gloo[variant]
    return fields


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    reason, quick = network.why_not(), arguments.quick
    cases = []
    if reason is None:
        device.compiled()  # once, before the ranks ask for it
        request = {
            "latencies_ms": QUICK_LATENCIES_MS if quick else LATENCIES_MS,
            "repeats": QUICK_REPEATS if quick else REPEATS,
        }
        variants = list(STEPS.values())[: 1 if quick else None]
        step_repeats = QUICK_STEP_REPEATS if quick else STEP_REPEATS
        steps = {"variants": variants, "step_repeats": step_repeats, **request}
        calls = on_two_hosts(calls_on_rank, "horovod", **steps)
        queued = on_two_hosts(queue_on_rank, "horovod", **request)
        gloo = on_two_hosts(calls_on_rank, "gloo", **steps)
        cases = [figures(case, calls[0], *others) for case, *others in zip(calls, queued, gloo)]
        harness.print_table("one all-to-all, and steps of schedules; ms, by latency of the cable", cases)
    else:
        print(f"not measured: {reason}")
    harness.write_json(arguments.json, {"not_measured": reason, "cases": cases})


if __name__ == "__main__":
    processes.program(main)
