"""Question: how much of the exchanges and lookups does each schedule hide, as on an accelerator, over unequal links?

    python -m benchmarks.overlap [--quick] [--json FILE] [--timelines FOLDER]

Four ranks run as 2 x 2: two network namespaces are hosts with two ranks each. A cable joins them, limited to 1 Gbit/s
each way. Namespaces need root; without root nothing is measured but clustering. THE DENSE PART IS NOT COMPUTED. It is a
stream of ops that take time and no core (device.py). The cores are free for tables and exchanges, as they are beside
an accelerator. It takes the times of a real GRM on one core (COMPUTE). One factor divides them and makes the
compute RATIO times as long as the exchange of sync. The factor is printed. Tables, exchanges and schedules are real.

Lookups of the variants *_lookup25 and *_lookup45 take that part of the step of sync. They wait for a slow memory, a
throttle of so much time per id on a stream of its own. A file would share its disk with the whole machine.

    exposed ratio = time in which some exchange runs and the device stream does not / exchange alone
    floor         = the step that the schedule's dependencies allow, from parts measured alone (figures.py)

"exchange alone" is the same variant with a device and a memory that take no time. Ops and collectives record their own
times. A wait for another rank counts as exchange, from the time when this rank asks. "free" is time in which no
exchange, device or memory runs: work of the host that nothing hides. The last columns are processor time, as evidence
that cores are free. floor_ratio_worst is the largest step / floor of all variants. All variants are checked against
sync, then take turns of one step, or of `steps` steps.

Then, at SLOW_RATE, the device is slower, too, so that compute again is RATIO times as long as the exchange: the same
step in slow motion, for which four ranks have more of the two cores. The fields that end with SLOW_RATE show it. Weak
scaling follows, over 1, 2, 4 and 8 ranks that share the cable. Last comes the contended case (real_model.py), in which
two ranks compute on their own cores. --quick measures QUICK_VARIANTS at the first rate and clusters one batch; the
other fields are null. `clustering` (clustering.py) needs Amazon Sports in ../shared/data, and is null without it.
--timelines draws steps of the real model into FOLDER instead, for docs/img/timeline_*.png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, network, processes
from benchmarks.harness.ranks import print_on_rank_0
from benchmarks.overlap import clustering, figures, real_model
from benchmarks.overlap import device as stream
from benchmarks.overlap.device import Compute, DeviceModel, DeviceSize, Pace, dataset, make_model
from benchmarks.overlap.figures import PARTS, VARIANTS, exposed_ms, free_ms, parts_of
from benchmarks.overlap.real_model import SIZE, Step, training
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks.timeline_events import seconds

# The forward and the backward pass of the GRM of real_model.py on one core. The pace scales it.
COMPUTE = Compute(fixed=(5e-4, 0.0), per_token=(1.4e-5, 2.8e-5))
DEVICE_SIZE = DeviceSize(users=64, tokens_per_user=128, dim=512)
RANKS, RATE, RATIO = 4, "1gbit", 1.4
OTHER_VARIANTS = ("sync", "frozen_M4", "nested_M8", "semi_async")
SLOW_RATE = "250mbit"
SCALING_RANKS, SCALING_VARIANTS = (1, 2, 8), ("sync", "nested_M8")
QUICK_VARIANTS = ("sync", "frozen_M4", "nested_M8", "dual", "semi_async", "2d", "sync_lookup45", "dual_lookup45")
REPEATS, QUICK_REPEATS = 5, 2
BARE, QUICK_BARE = 3, 1
TIMEOUT_S = 1500


def run_ranks(
    count: int, size: DeviceSize, compute: Compute, phases: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the case of each phase. One rank has no cable, and an even number of ranks is spread over two hosts."""
    stream.compiled()  # once, before the ranks ask for it
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(network.spread(count)) if count > 1 else {}
        answers = processes.ask_ranks(
            on_rank, count, **where, timeout_s=TIMEOUT_S, size=dataclasses.asdict(size), compute=compute._asdict(),
            phases=list(phases),
        )  # fmt: skip
    return [figures.case(one, answer, size.layers, count) for one, answer in zip(phases, answers)]


CALIBRATION = 9  # steps whose median sets a pace
PROBE_S = 1e-6  # time per id in the step that counts the ids of a lookup


def mean_over_ranks(value: float) -> float:
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
    compute, lookup = (1e3 * seconds(record.spans.get(name, ())) for name in (stream.DEVICE, stream.MEMORY))
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
            reason = "order of sums, narrow numbers or missing updates; see figures.py"
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
    steps: Mapping[str, Step], pace: Pace, device: float, names: Sequence[str], repeats: int, bare: int,
    memory: float = 0.0, lookup: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Returns the median turns of the variants, full and bare. The variants take turns. Collective.

    Lookups of a variant take its part of a step of sync, or `lookup`. `memory` has the pace of memory_pace.
    """
    model_of = {name: VARIANTS[name].model or name for name in names}
    full, alone = ({name: list[dict[str, float]]() for name in chosen} for chosen in (names, model_of.values()))
    for _, name in harness.in_turns(names, repeats):
        share = VARIANTS[name].lookup or lookup
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
        network.limit("eth0", rate)
    fr.collectives.barrier()


def on_rank(size: dict[str, Any], compute: dict[str, Any], phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measures all phases. Returns the result of measured_phase for each.

    Args:
      size: Fields of DeviceSize.
      compute: Fields of Compute.
      phases: For each phase the `rate` of the cable (see limit_cable), the names of the `variants`, their `repeats` and
        `bare` repeats, the `lookup` part of a step (see measure), and the pace of the device: its factor `device`, or
        the `ratio` of compute to the exchange of sync that it shall have.
    """
    names = list(dict.fromkeys(VARIANTS[name].model or name for phase in phases for name in phase["variants"]))
    of_size, times = DeviceSize(**size), Compute(**compute)
    pace, steps, _ = started(of_size, times, names, [VARIANTS[name].topology for name in names])
    return [measured_phase(phase, pace, steps, times.seconds(of_size.tokens)) for phase in phases]


def measured_phase(phase: Mapping[str, Any], pace: Pace, steps: Mapping[str, Step], compute_s: float) -> dict[str, Any]:
    """Returns the paces `device` and `memory`, and the `variants` of a phase. Collective."""
    limit_cable(phase["rate"])
    names, lookup = phase["variants"], phase.get("lookup", 0.0)
    device = phase.get("device") or device_factor(steps["sync"], pace, compute_s, phase["ratio"])
    memory = 0.0
    if lookup or any(VARIANTS[name].lookup for name in names):
        memory = memory_pace(steps["sync"], pace, device)
    print_on_rank_0(f"at {phase['rate']}: {', '.join(names)}; the device is {1 / device:.2f} cores")
    variants = measure(steps, pace, device, names, phase["repeats"], phase["bare"], memory, lookup)
    return {"device": device, "memory": memory * lookup / (1 - lookup), "variants": variants}


def weak_scaling(size: DeviceSize, compute: Compute, main: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    repeats, bare = (QUICK_REPEATS, QUICK_BARE) if quick else (REPEATS, BARE)
    runs = {RATE: QUICK_VARIANTS} if quick else {RATE: tuple(VARIANTS), SLOW_RATE: OTHER_VARIANTS}
    phases = [
        {"rate": rate, "variants": names, "repeats": repeats, "bare": bare, "ratio": RATIO}
        for rate, names in runs.items()
    ]
    cases = run_ranks(RANKS, DEVICE_SIZE, COMPUTE, phases)
    for one in cases:
        figures.show(one)
    fast, slow = [*cases, None][:2]
    found: dict[str, Any] = figures.fields(fast, VARIANTS) | figures.fields(slow, OTHER_VARIANTS, f"_{SLOW_RATE}")
    found |= dict.fromkeys(f"contended_speedup_{name}" for name in real_model.SCHEDULES)
    scaling = []
    if not quick:
        scaling = weak_scaling(DEVICE_SIZE, COMPUTE, cases[0])
        harness.print_table(f"weak scaling: ranks on two hosts that share {RATE}", scaling)
        found |= real_model.contended(SIZE, list(real_model.SCHEDULES), REPEATS)
    return {**found, "compute": COMPUTE._asdict(), "cases": cases, "weak_scaling": scaling}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--timelines", type=pathlib.Path, metavar="FOLDER", help="draw steps of three schedules instead"
    )
    arguments, reason = parser.parse_args(), network.why_not()
    if arguments.timelines:
        if reason is not None or not arguments.timelines.is_dir():
            raise harness.CheckFailed(f"no pictures: {reason or f'{arguments.timelines} is no folder. Make it.'}")
        real_model.draw_timelines(arguments.timelines)
        return
    found = measured(arguments.quick) if reason is None else {}
    if reason is not None:
        print(f"not measured: {reason}")
    saved = clustering.measure(1 if arguments.quick else 4)
    harness.print_fields("fields", found)
    harness.print_fields("clustering", saved or {})
    harness.write_json(arguments.json, {**found, "clustering": saved, "not_measured": reason})


if __name__ == "__main__":
    processes.program(main)
