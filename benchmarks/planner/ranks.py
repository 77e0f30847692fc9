"""One rank of benchmarks.planner: all choices take turns on every network, as in benchmarks.overlap."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import children, network
from benchmarks.overlap.device_model import Compute, DeviceModel, DeviceSize, Pace
from benchmarks.overlap.model import Step
from benchmarks.overlap.ranks import check, device_factor, make_steps, memory_pace, print_on_rank_0, take_turn
from benchmarks.overlap.variants import VARIANTS
from benchmarks.planner.workloads import Network
from tf_fusedrec import keras, tf

PROBES = 20
TRIALS = 2  # rounds of all choices
FAR = 1.3


def message_s() -> float:
    """Returns the seconds of one message of an all-to-all among all ranks. Collective."""
    ranks = fr.collectives.world()
    splits = tf.fill([ranks.size], 1)

    @tf.function(autograph=False)
    def exchange() -> tf.Tensor:
        sent = tf.zeros([256, 1])
        return fr.collectives.all_to_all(sent, splits, name="planner.probe", ranks=ranks)[0]

    seconds = []
    for _ in range(PROBES):
        fr.collectives.barrier()
        begin = time.perf_counter()
        exchange().numpy()
        seconds.append(time.perf_counter() - begin)
    slowest = fr.collectives.all_gather(np.array([np.median(seconds)])).max()
    return float(slowest) / max(ranks.size - 1, 1)


def sent_bytes(models: Mapping[str, DeviceModel], steps: Mapping[str, Step], name: str, count: int) -> float:
    """Returns the bytes of ids, rows and gradients that a rank sends in a step, the mean over ranks. Collective."""
    lookups = models[name].embedding.lookups
    before = sum(int(lookup.traffic.numpy()[2]) for lookup in lookups)
    for _ in range(count):
        steps[name]()
    after = sum(int(lookup.traffic.numpy()[2]) for lookup in lookups)
    return float(fr.collectives.all_gather(np.array([(after - before) / count])).mean())


def contenders(ms: Mapping[str, float]) -> list[str]:
    """Returns the choices whose step is at most FAR times the quickest."""
    return [name for name in ms if ms[name] <= FAR * min(ms.values())]


def slowest_medians(taken: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns the median time of the slowest rank, by choice. Collective."""
    slowest = fr.collectives.all_gather(np.concatenate([*taken.values()])[np.newaxis]).max(axis=0)
    parts = np.split(slowest, np.cumsum([len(times) for times in taken.values()])[:-1])
    return {name: float(np.median(part)) for name, part in zip(taken, parts)}


def measure(steps: Mapping[str, Step], names: Sequence[str], repeats: int) -> dict[str, float]:
    """Returns the median ms of a step by choice; the slowest rank counts. Collective.

    The choices take turns. After TRIALS rounds only the contenders go on, since no other can be the best.
    """
    taken: dict[str, list[float]] = {name: [] for name in names}
    running = list(names)
    for repeat in range(repeats):
        for turn in range(len(running)):
            name = running[(repeat + turn) % len(running)]
            taken[name].append(take_turn(steps[name], VARIANTS[name].steps).step)
        if repeat + 1 == TRIALS:
            running = contenders(slowest_medians(taken))
        print_on_rank_0(f"round {repeat + 1} of {repeats}: {len(running)} choices")
    return slowest_medians(taken)


def main(
    size: dict[str, Any], compute: dict[str, Any], networks: list[list[Any]], names: list[str], repeats: int
) -> list[dict[str, Any]] | None:
    """Returns, on rank 0, what each network gave: the pace, the seconds of a message, and ms and bytes by choice.

    Args:
      size: Fields of DeviceSize.
      compute: Fields of Compute.
      networks: The fields of each Network.
      names: Names of overlap.variants.VARIANTS, with "sync".
      repeats: Turns of each choice.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init(*dict.fromkeys(VARIANTS[name].topology for name in names))
    keras.utils.disable_interactive_logging()
    of_size, times, pace = DeviceSize(**size), Compute(**compute), Pace()
    steps, models = make_steps(of_size, times, pace, names)
    check(steps, models, of_size.batches + 1)
    counted = {name: sent_bytes(models, steps, name, of_size.batches) for name in names}
    found = []
    for one in (Network(*fields) for fields in networks):
        if os.environ["HOROVOD_LOCAL_RANK"] == "0":
            network.limit_here("eth0", one.rate)
        fr.collectives.barrier()
        device = device_factor(steps["sync"], pace, times.seconds(of_size.tokens), one.ratio)
        memory = memory_pace(steps["sync"], pace, device) * one.lookup / (1 - one.lookup)
        pace.set(device=device, memory=memory)
        print_on_rank_0(f"at {one.rate}: the device is {1 / device:.2f} cores")
        ms = measure(steps, names, repeats)
        found.append({"device": device, "memory": memory, "message_s": message_s(), "ms": ms, "bytes": counted})
    return found if fr.collectives.rank() == 0 else None


if __name__ == "__main__":
    children.answer(main)
