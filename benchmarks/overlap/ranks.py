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
from benchmarks.overlap.figures import PARTS, exposed_ms, free_ms, parts_of
from benchmarks.overlap.real_model import Step, training
from benchmarks.overlap.variants import VARIANTS
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks.timeline_events import seconds

CALIBRATION = 3  # steps whose median sets a pace
PROBE_S = 1e-6  # time per id in the step that counts the ids of a lookup


def mean_over_ranks(value: float) -> float:
    """Returns the same number on all ranks. Collective."""
    return float(fr.collectives.all_gather(np.array([value])).mean())


def take_turn(step: Step, steps: int) -> dict[str, float]:
    """Runs a variant after all ranks are ready. Returns times in ms per step of this rank. Collective.

    step: wall clock. cpu: processor time of all threads. exposed: some exchange ran and the device stream did not.
    free: no exchange and no stream ran, which is work of the host that nothing hides. compute and lookup: the streams.
    The fields of figures.Parts follow.
    """
    fr.collectives.barrier()
    stream.take_record()
    cpu, begin = time.process_time(), time.monotonic()
    for _ in range(steps):
        step()
    end, cpu = time.monotonic(), time.process_time() - cpu
    record = stream.take_record()
    compute, lookup = (1e3 * seconds(record.get(name, ())) for name in (stream.DEVICE, stream.MEMORY))
    ms = {
        "step": 1e3 * (end - begin), "cpu": 1e3 * cpu, "exposed": exposed_ms(record),
        "free": free_ms(record, begin, end), "compute": compute, "lookup": lookup,
        **dataclasses.asdict(parts_of(record)),
    }  # fmt: skip
    return {name: value / steps for name, value in ms.items()}


def median_turn(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of turns. A step is the slowest rank's; other times are means over ranks. Collective."""
    of_ranks = fr.collectives.all_gather(np.array([[list(turn.values()) for turn in turns]]))  # [R, turns, times]
    times = of_ranks.mean(axis=0)
    times[:, 0] = of_ranks[:, :, 0].max(axis=0)
    return dict(zip(turns[0], np.median(times, axis=0).tolist()))


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
    exchange_ms = float(np.median([sum(take_turn(step, 1)[part] for part in PARTS) for _ in range(CALIBRATION)]))
    return ratio * mean_over_ranks(exchange_ms) / (1e3 * compute_s)


def memory_pace(step: Step, pace: Pace, device: float) -> float:
    """Returns the seconds per id at which lookups take as long as a step of sync without them. Collective."""
    pace.set(device=device, memory=PROBE_S)
    ids = mean_over_ranks(take_turn(step, 1)["lookup"] / (1e3 * PROBE_S))
    pace.set(device=device, memory=0.0)
    step_ms = float(np.median([take_turn(step, 1)["step"] for _ in range(CALIBRATION)]))
    return mean_over_ranks(step_ms) / (1e3 * ids)


def measure(
    steps: Mapping[str, Step], pace: Pace, device: float, names: Sequence[str], repeats: int, bare: int
) -> dict[str, Any]:
    """Returns the median turns of the variants, full and bare. The variants take turns. Collective."""
    memory = memory_pace(steps["sync"], pace, device) if any(VARIANTS[name].lookup for name in names) else 0.0
    model_of = {name: VARIANTS[name].model or name for name in names}
    full, alone = ({name: list[dict[str, float]]() for name in chosen} for chosen in (names, model_of.values()))
    for _, name in harness.in_turns(names, repeats):
        share = VARIANTS[name].lookup
        pace.set(device=device, memory=memory * share / (1 - share))
        full[name].append(take_turn(steps[model_of[name]], VARIANTS[name].steps))
    pace.set(device=0.0, memory=0.0)
    for _, name in harness.in_turns(list(alone), bare):
        alone[name].append(take_turn(steps[name], VARIANTS[name].steps))
    medians = {name: median_turn(turns) for name, turns in alone.items()}
    return {name: {"full": median_turn(full[name]), "bare": medians[model_of[name]]} for name in names}


def limit_cable(rate: str | None) -> None:
    """Limits the cable between the hosts to `rate`. Collective. None: one host, without a cable."""
    if rate is not None and os.environ["HOROVOD_LOCAL_RANK"] == "0":
        network.limit_here("eth0", rate)
    fr.collectives.barrier()


def on_rank(size: dict[str, Any], compute: dict[str, Any], phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measures all phases. Returns `device` and `variants` of each phase.

    Args:
      size: Fields of DeviceSize.
      compute: Fields of Compute.
      phases: For each phase the `rate` of the cable (see limit_cable), the names of the `variants`, their `repeats` and
        `bare` repeats, and the pace of the device: its factor `device`, or the `ratio` of compute to the exchange of
        sync that it shall have.
    """
    names = list(dict.fromkeys(VARIANTS[name].model or name for phase in phases for name in phase["variants"]))
    of_size, times = DeviceSize(**size), Compute(**compute)
    pace, steps, _ = started(of_size, times, names, [VARIANTS[name].topology for name in names])
    found: list[dict[str, Any]] = []
    for phase in phases:
        limit_cable(phase["rate"])
        device = phase.get("device")
        if device is None:
            device = device_factor(steps["sync"], pace, times.seconds(of_size.tokens), phase["ratio"])
        print_on_rank_0(f"at {phase['rate']}: {', '.join(phase['variants'])}; the device is {1 / device:.2f} cores")
        variants = measure(steps, pace, device, phase["variants"], phase["repeats"], phase["bare"])
        found.append({"device": device, "variants": variants})
    return found
