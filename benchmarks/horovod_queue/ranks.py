"""One rank of benchmarks.horovod_queue: collectives are checked, then timed in turns at each latency. Rank 0 reports.

A time is from the call until this rank has its result. The slowest rank's time counts, and of these the median.
"""

from __future__ import annotations

import functools
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import children, delayed_cable, harness, network
from benchmarks.overlap import device_stream
from benchmarks.overlap import ranks as overlap
from benchmarks.overlap.device_model import Compute, DeviceSize, Pace
from tf_fusedrec import keras, tf
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


def reduce_one() -> Call:
    """Returns a call of an all-reduce of one number."""
    one = tf.ones([1])
    call = tf.function(lambda: collectives.all_reduce_sum(one, name="one"), autograph=False)
    harness.check_equal("a sum", call(), [collectives.size()])
    return call


def queue(dim: int) -> dict[str, Call]:
    """Returns calls of an all-to-all inside the group, an all-reduce among the replicas, and both.

    The all-to-all asks LATER_S after the call begins.
    """
    layout = RankLayout(GROUPS)
    rows = tf.fill([IN_GROUP * layout.group.size, dim], float(layout.group.index))
    numbers = tf.ones([REDUCED])

    def exchange() -> tf.Tensor:
        later = device_stream.wait(rows, tf.constant(LATER_S, tf.float64), device_stream.MEMORY)
        splits = tf.fill([layout.group.size], IN_GROUP)
        return collectives.all_to_all(later, splits, name="queue.rows", ranks=layout.group)[0]

    def reduce() -> tf.Tensor:
        return collectives.all_reduce_sum(numbers, name="queue.sum", ranks=layout.replicas)

    calls: dict[str, Call] = {
        "exchange": tf.function(exchange, autograph=False),
        "reduce": tf.function(reduce, autograph=False),
        "both": tf.function(lambda: (exchange(), reduce()), autograph=False),
    }
    with device_stream.stamping():
        received, total = calls["both"]()
        calls["exchange"](), calls["reduce"]()
    harness.check_equal("rows of the group", received[:, 0], np.repeat(np.arange(layout.group.size), IN_GROUP))
    harness.check_equal("sums of the replicas", total, np.full(REDUCED, layout.replicas.size))
    return calls


def timed(call: Call) -> float:
    """Returns the seconds of a call that all ranks begin together. Collective."""
    collectives.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def span(call: Call, name: str) -> float:
    """Returns the seconds of one collective of a call. Collective."""
    collectives.barrier()
    device_stream.take_record()
    call()
    ((begin, end),) = device_stream.take_record()[name]
    return end - begin


def medians(measured: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Returns the median, in ms, of the slowest rank's seconds. The cases take turns. Collective."""
    for measure in measured.values():
        measure()  # fills Horovod's response cache
    seconds = [[measure() for measure in measured.values()] for _ in range(repeats)]
    slowest = collectives.all_gather(np.array([seconds])).max(axis=0)
    return {f"ms_{name}": 1e3 * float(value) for name, value in zip(measured, np.median(slowest, axis=0))}


def all_to_alls_of_a_step(step: Call) -> int:
    """Returns the number of all-to-alls that a traced step makes. Collective."""
    collectives.barrier()
    device_stream.take_record()
    step()
    kinds = ("ids", "rows", "gradients")
    return sum(len(spans) for name, spans in device_stream.take_record().items() if name.endswith(kinds))


def main(
    latencies_ms: Sequence[float],
    delay: str,
    rate: str,
    sets: bool,
    rows: int,
    repeats: int,
    steps: Mapping[str, Any],
) -> list[dict[str, Any]] | None:
    """Measures at each latency. Returns, on rank 0, the cases.

    Args:
      latencies_ms: Times that the cable takes, one way.
      delay: File of delayed_cable.py.
      rate: Rate of the cable.
      sets: True if there are process sets for GROUPS beside the set of all ranks; if so, the queue is measured.
      rows: Rows of an all-to-all to each rank, as in a step.
      repeats: Number of turns.
      steps: The steps of schedules: their `size` as in overlap.ranks.main, the `ratio` of compute to exchange, the
        `variants`, which may be none, and their `repeats`.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init(*[GROUPS] if sets else [])
    keras.utils.disable_interactive_logging()
    if os.environ["HOROVOD_LOCAL_RANK"] == "0":
        network.limit_here("eth0", rate)
    size = DeviceSize(**steps["size"])
    calls = {
        "empty": all_to_alls("empty", 0, size.dim, 1),
        f"empty_{AT_ONCE}": all_to_alls(f"empty_{AT_ONCE}", 0, size.dim, AT_ONCE),
        "rows": all_to_alls("rows", rows, size.dim, 1),
        "reduce_one": reduce_one(),
    }
    measured: dict[str, Callable[[], float]] = {name: functools.partial(timed, call) for name, call in calls.items()}
    if sets:
        queued = queue(size.dim)
        measured["exchange_alone"] = functools.partial(span, queued["exchange"], "queue.rows")
        measured["exchange_queued"] = functools.partial(span, queued["both"], "queue.rows")
        measured["reduce_alone"] = functools.partial(span, queued["reduce"], "queue.sum")
    pace = Pace()
    variants: dict[str, Call] = {}
    if steps["variants"]:
        variants, models = overlap.make_steps(size, COMPUTE, pace, steps["variants"])
        overlap.check(variants, models, size.batches + 1)
    cases, device = [], 0.0
    for latency_ms in latencies_ms:
        collectives.barrier()
        if collectives.rank() == 0:
            delayed_cable.set_delay(pathlib.Path(delay), 1e-3 * latency_ms)
        collectives.barrier()
        case: dict[str, Any] = {"latency_ms": latency_ms, **medians(measured, repeats)}
        if variants:
            # The first latency sets the pace of the device.
            device = device or overlap.device_factor(
                variants["sync"], pace, COMPUTE.seconds(size.tokens), steps["ratio"]
            )  # fmt: skip
            turns = overlap.measure(variants, pace, device, steps["variants"], steps["repeats"], 1)
            case["steps"] = {
                name: {"ms": turns[name]["full"]["step"], "all_to_alls": all_to_alls_of_a_step(step)}
                for name, step in variants.items()
            }
        overlap.print_on_rank_0(f"{latency_ms} ms: {case}")
        cases.append(case)
    return cases if collectives.rank() == 0 else None


if __name__ == "__main__":
    children.answer(main)
