"""One rank of benchmarks.overlap: the variants are checked against sync, then take turns. Rank 0 reports.

A turn of a variant is one step, or `steps` of them. Beside its full turns a variant has bare ones, in which compute and
lookups take no time: what remains is its exchange alone.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, network
from benchmarks.harness.ranks import print_on_rank_0
from benchmarks.overlap import device as stream
from benchmarks.overlap.device import Compute, DeviceModel, DeviceSize, Pace, dataset, make_model
from benchmarks.overlap.figures import Parts, exposed_ms, free_ms, parts_of
from benchmarks.overlap.real_model import Step, training
from benchmarks.overlap.variants import VARIANTS, Variant
from tf_fusedrec import keras, tf

CALIBRATION = 3  # steps whose median sets a pace
PROBE_S = 1e-6  # time per id in the step that counts the ids of a lookup


def mean_over_ranks(value: float) -> float:
    """Returns the same number on all ranks. Collective."""
    return float(fr.collectives.all_gather(np.array([value])).mean())


@dataclasses.dataclass(frozen=True)
class Turn:
    """The times of one turn, in ms per step of this rank."""

    step: float
    cpu: float  # processor time of all threads of the process
    exposed: float  # some exchange ran and the device stream did not
    free: float  # no exchange and no stream ran: work of the host that nothing hides
    compute: float
    lookup: float
    parts: Parts

    def numbers(self) -> list[float]:
        *times, parts = dataclasses.astuple(self)
        return [*times, *parts]

    @staticmethod
    def median(of_ranks: np.ndarray) -> Turn:
        """Returns the median of turns <double>[R, turns, numbers]. A step is the slowest rank's, else means count."""
        numbers = of_ranks.mean(axis=0)
        numbers[:, 0] = of_ranks[:, :, 0].max(axis=0)
        step, cpu, exposed, free, compute, lookup, *parts = np.median(numbers, axis=0).tolist()
        return Turn(step, cpu, exposed, free, compute, lookup, Parts(*parts))


def take_turn(step: Step, steps: int) -> Turn:
    """Runs a variant after all ranks are ready. Collective."""
    fr.collectives.barrier()
    stream.take_record()
    cpu, begin = time.process_time(), time.monotonic()
    for _ in range(steps):
        step()
    end, cpu = time.monotonic(), time.process_time() - cpu
    record = stream.take_record()

    def busy_ms(name: str) -> float:
        return 1e3 * sum(end - begin for begin, end in record.get(name, ())) / steps

    return Turn(
        step=1e3 * (end - begin) / steps,
        cpu=1e3 * cpu / steps,
        exposed=exposed_ms(record) / steps,
        free=free_ms(record, begin, end) / steps,
        compute=busy_ms(stream.DEVICE),
        lookup=busy_ms(stream.MEMORY),
        parts=Parts(*(value / steps for value in dataclasses.astuple(parts_of(record)))),
    )


def make_steps(
    size: DeviceSize, compute: Compute, pace: Pace, names: Sequence[str]
) -> tuple[dict[str, Step], dict[str, DeviceModel]]:
    """Returns the step and the model of each variant that has its own."""
    batches = {clustered: dataset(size, 8 if clustered else 0) for clustered in {VARIANTS[n].clustered for n in names}}
    models = {
        name: make_model(size, compute, pace, name, VARIANTS[name].schedule, **VARIANTS[name].layer()) for name in names
    }
    return {name: training(model, batches[VARIANTS[name].clustered]) for name, model in models.items()}, models


def check(steps: Mapping[str, Step], models: Mapping[str, DeviceModel], rounds: int) -> None:
    """Trains every model a few steps, and compares losses and sums of exchanged rows with sync. Collective."""
    found = []
    for name, step in steps.items():
        begin = time.perf_counter()
        with stream.stamping():
            for _ in range(rounds):
                step()
        found.append([float(models[name].metrics[0].result()), float(models[name].row_sums.result())])
        print_on_rank_0(f"{name}: traced, {rounds} steps in {time.perf_counter() - begin:.1f} s")
    means = fr.collectives.all_gather(np.array([found])).mean(axis=0)
    want = means[list(steps).index("sync")]
    for name, got in zip(steps, means):
        for what, value, of_sync in zip(("mean loss", "sum of exchanged rows"), got, want):
            reason = "order of sums, narrow numbers or missing updates; see variants.py"
            tolerance = VARIANTS[name].tolerance
            harness.check_close(f"{what} of {name} against sync", value, of_sync, relative=tolerance, reason=reason)


def started(
    size: DeviceSize, compute: Compute, names: Sequence[str], topologies: Sequence[fr.Topology]
) -> tuple[Pace, dict[str, Step], dict[str, DeviceModel]]:
    """Initializes a rank. Returns the pace, and steps and models of the variants, which are checked. Collective."""
    # One core per rank. A second thread lets lookups run beside the start of a compute.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init(*dict.fromkeys(topologies))
    keras.utils.disable_interactive_logging()
    pace = Pace()
    steps, models = make_steps(size, compute, pace, names)
    if names:
        check(steps, models, size.batches + 1)
    return pace, steps, models


def device_factor(step: Step, pace: Pace, compute_s: float, ratio: float) -> float:
    """Returns the factor of all compute times at which compute is `ratio` times the exchange of sync. Collective."""
    pace.set(device=0.0, memory=0.0)
    exchange_ms = float(np.median([take_turn(step, 1).parts.exchange for _ in range(CALIBRATION)]))
    return ratio * mean_over_ranks(exchange_ms) / (1e3 * compute_s)


def memory_pace(step: Step, pace: Pace, device: float) -> float:
    """Returns the seconds per id at which lookups take as long as a step of sync without them. Collective."""
    pace.set(device=device, memory=PROBE_S)
    ids = mean_over_ranks(take_turn(step, 1).lookup / (1e3 * PROBE_S))
    pace.set(device=device, memory=0.0)
    step_ms = float(np.median([take_turn(step, 1).step for _ in range(CALIBRATION)]))
    return mean_over_ranks(step_ms) / (1e3 * ids)


def measure(
    steps: Mapping[str, Step], pace: Pace, device: float, names: Sequence[str], repeats: int, bare: int
) -> dict[str, Any]:
    """Returns the median turns of the variants, full and bare. The variants take turns. Collective."""
    memory = memory_pace(steps["sync"], pace, device) if any(VARIANTS[name].lookup for name in names) else 0.0

    def runs(variant: Variant, name: str) -> Turn:
        share = variant.lookup
        pace.set(device=device, memory=memory * share / (1 - share))
        return take_turn(steps[variant.model or name], variant.steps)

    def runs_bare(variant: Variant, name: str) -> Turn:
        pace.set(device=0.0, memory=0.0)
        return take_turn(steps[name], variant.steps)

    own = list(dict.fromkeys(VARIANTS[name].model or name for name in names))
    kinds: dict[str, dict[str, Turn]] = {}
    for kind, take, chosen, count in (("full", runs, names, repeats), ("bare", runs_bare, own, bare)):
        taken: dict[str, list[list[float]]] = {name: [] for name in chosen}
        for repeat in range(count):
            for turn in range(len(chosen)):
                name = chosen[(repeat + turn) % len(chosen)]
                taken[name].append(take(VARIANTS[name], name).numbers())
            print_on_rank_0(f"{kind} round {repeat + 1} of {count}")
        of_ranks = fr.collectives.all_gather(np.array([list(taken.values())]))
        kinds[kind] = {name: Turn.median(of_ranks[:, n]) for n, name in enumerate(chosen)}
    return {
        name: {
            "full": dataclasses.asdict(kinds["full"][name]),
            "bare": dataclasses.asdict(kinds["bare"][VARIANTS[name].model or name]),
        }
        for name in names
    }


def on_rank(size: dict[str, Any], compute: dict[str, Any], phases: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Measures all phases. Returns, on rank 0, `device` and `variants` of each phase.

    Args:
      size: Fields of DeviceSize.
      compute: Fields of Compute.
      phases: For each phase the `rate` of the cable between the hosts (None: no cable), the names of the `variants`,
        their `repeats` and `bare` repeats, and the pace of the device: its factor `device`, or the `ratio` of compute
        to the exchange of sync that it shall have. Both None: the pace of the phase before.
    """
    names = list(dict.fromkeys(VARIANTS[name].model or name for phase in phases for name in phase["variants"]))
    of_size, times = DeviceSize(**size), Compute(**compute)
    pace, steps, _ = started(of_size, times, names, [VARIANTS[name].topology for name in names])
    found: list[dict[str, Any]] = []
    device = 0.0
    for phase in phases:
        if phase["rate"] is not None and os.environ["HOROVOD_LOCAL_RANK"] == "0":
            network.limit_here("eth0", phase["rate"])
        fr.collectives.barrier()
        if phase["device"] is not None:
            device = phase["device"]
        elif phase["ratio"] is not None:
            device = device_factor(steps["sync"], pace, times.seconds(of_size.tokens), phase["ratio"])
        print_on_rank_0(f"at {phase['rate']}: {', '.join(phase['variants'])}; the device is {1 / device:.2f} cores")
        variants = measure(steps, pace, device, phase["variants"], phase["repeats"], phase["bare"])
        found.append({"device": device, "variants": variants})
    return found if fr.collectives.rank() == 0 else None
