"""Question: how far is the choice of fr.plan from the best choice, found by trying all?

    python -m benchmarks.planner [--quick] [--json FILE]

Twelve workloads: three sizes of a step on four networks. Four ranks on two hosts train each choice, with
a device stream in place of dense compute, as in benchmarks.overlap. fr.plan gets the same model in one process, with
the rate of the cable and the measured time of one message. It knows nothing of the runs.

    regret       = step of fr.plan's choice over the quickest step that was measured, less 1
    error        = forecast over measured step of fr.plan's choice, less 1
    bytes error  = forecast over counted bytes of a step of sync, less 1

Needs root; without root nothing is measured. --quick tries a few choices for one size on two networks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, network, processes, ranks
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap.__main__ import measured_phase, started
from benchmarks.overlap.device import Compute, DeviceModel, DeviceSize, Pace, compiled, make_batch, make_model
from benchmarks.overlap.figures import VARIANTS
from benchmarks.overlap.real_model import Step
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules import Sync

RANKS, RANKS_PER_HOST = 4, 2
INSIDE_BYTES_PER_S = 2e9  # assumed: the loop-back inside a host
TOLERATED = ("stale_rows", "bfloat16_wire", "weight_sync")
MICRO_BATCHES = (4, 8)
# Variants of benchmarks.overlap between which fr.plan chooses, all with the batches of sync.
CHOICES = tuple(
    name
    for name, variant in VARIANTS.items()
    if not variant.clustered and not variant.lookup and variant.micro_batches in (1, *MICRO_BATCHES)
)
QUICK_CHOICES = ("sync", "frozen_M4", "dual", "nested_M8", "semi_async")

SIZES = {
    "wide rows": DeviceSize(users=32, tokens_per_user=128, dim=512),
    "narrow rows": DeviceSize(users=64, tokens_per_user=128, dim=128),
    "short batches": DeviceSize(users=64, tokens_per_user=32, dim=512),
}


class Network(NamedTuple):
    """The surroundings of a step."""

    rate: str  # of the cable between the hosts
    bytes_per_s: float  # the same
    ratio: float  # compute over the exchange of sync
    lookup: float  # part of the step of sync that its lookups take


NETWORKS = (
    Network("1gbit", 1e9 / 8, 1.4, 0.0),
    Network("1gbit", 1e9 / 8, 0.6, 0.0),
    Network("2500mbit", 2.5e9 / 8, 1.4, 0.3),
    Network("500mbit", 0.5e9 / 8, 2.0, 0.0),
)


def message_s() -> float:
    """Returns the seconds of one message of an all-to-all among all ranks. Collective."""
    world = collectives.world()

    @tf.function(autograph=False)
    def exchange() -> tf.Tensor:
        sent, splits = tf.zeros([256, 1]), tf.fill([world.size], 1)
        return collectives.all_to_all(sent, splits, name="planner.probe", ranks=world)[0]

    ms = ranks.turns({"probe": lambda: exchange().numpy()}, warmup=1, repeats=20).ms["probe"]
    return 1e-3 * ms / max(world.size - 1, 1)


def sent_bytes(model: DeviceModel, step: Step, count: int) -> float:
    """Returns the bytes of ids, rows and gradients that a rank sends in a step, the mean over ranks. Collective."""

    def sent() -> int:
        return sum(int(group.traffic.numpy()[2]) for group in model.embedding.internals.groups)

    before = sent()
    for _ in range(count):
        step()
    return float(fr.collectives.all_gather(np.array([(sent() - before) / count])).mean())


def on_rank(size: dict[str, Any], compute: dict[str, Any], phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns paces and variants of each phase (see benchmarks.overlap), seconds of a message, and bytes of sync."""
    of_size, times, names = DeviceSize(**size), Compute(**compute), phases[0]["variants"]
    pace, steps, models = started(of_size, times, names, [VARIANTS[name].topology for name in names])
    sent, compute_s = sent_bytes(models["sync"], steps["sync"], of_size.batches), times.seconds(of_size.tokens)
    return [
        {**measured_phase(phase, pace, steps, compute_s), "message_s": message_s(), "bytes": sent} for phase in phases
    ]


def choose(
    size: dict[str, Any], compute: dict[str, Any], paces: list[dict[str, float]], names: list[str]
) -> list[list[dict[str, Any]]]:
    """Returns, for each pace, the forecasts of the choices, the chosen one first."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    of_size, pace = DeviceSize(**size), Pace()
    model = make_model(of_size, Compute(**compute), pace, "planned", Sync())
    variants = {name: VARIANTS[name] for name in names}
    answers = []
    for one in paces:
        pace.set(device=one["device"], memory=one["memory"])
        cluster = fr.Cluster(
            RANKS, 1e12, RANKS_PER_HOST, INSIDE_BYTES_PER_S, one["bytes_per_s"], latency_s=one["message_s"]
        )  # fmt: skip
        found = fr.plan(model, make_batch(of_size, 0), cluster, micro_batches=MICRO_BATCHES, tolerate=TOLERATED)
        answers.append([
            {"choice": name, "ms": 1e3 * forecast.step_s, "bytes": forecast.embedding_bytes}
            for forecast in found.forecasts
            for name, one in variants.items()
            if (one.schedule, one.topology, one.wire) == (forecast.schedule, forecast.topology, forecast.wire_dtype)
        ])  # fmt: skip
    return answers


REPEATS, QUICK_REPEATS = 7, 2
WITHIN = 0.05
TIMEOUT_S = 5400


def run(size: DeviceSize, networks: Sequence[Network], names: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Returns the case of each network: measured and forecast steps of all choices."""
    asked: dict[str, Any] = {"size": dataclasses.asdict(size), "compute": overlap.COMPUTE._asdict()}
    turns = {"variants": list(names), "repeats": repeats, "bare": 1}
    phases = [{"rate": one.rate, "ratio": one.ratio, "lookup": one.lookup, **turns} for one in networks]
    compiled()  # once, before the ranks ask for it
    with network.spread(RANKS) as where:
        measured = processes.ask_ranks(on_rank, RANKS, **where, timeout_s=TIMEOUT_S, phases=phases, **asked)
    paces = [{**answer, "bytes_per_s": one.bytes_per_s} for answer, one in zip(measured, networks)]
    forecasts = processes.ask(choose, paces=paces, names=list(names), **asked)
    return [case(one, *parts) for one, *parts in zip(networks, measured, forecasts)]


def case(one: Network, measured: dict[str, Any], forecasts: list[dict[str, Any]]) -> dict[str, Any]:
    ms = {name: turns["full"]["step"] for name, turns in measured["variants"].items()}
    chosen = forecasts[0]
    of_sync = next(forecast for forecast in forecasts if forecast["choice"] == "sync")
    best = min(ms, key=lambda name: ms[name])
    ms_of_choice = ms[chosen["choice"]]
    return {
        **one._asdict(), "message_ms": 1e3 * measured["message_s"], "best": best, "best_ms": ms[best],
        "chosen": chosen["choice"], "chosen_ms": ms_of_choice, "forecast_ms": chosen["ms"],
        "regret": ms_of_choice / ms[best] - 1, "error": chosen["ms"] / ms_of_choice - 1,
        "bytes_error": of_sync["bytes"] / measured["bytes"] - 1, "measured_ms": ms,
        "forecasts_ms": {forecast["choice"]: forecast["ms"] for forecast in forecasts},
    }  # fmt: skip


def fields(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    regrets = [one["regret"] for one in cases]
    return {
        "workloads": len(cases), "within_5_percent": sum(regret <= WITHIN for regret in regrets),
        "worst_regret": max(regrets), "median_error": float(np.median([abs(one["error"]) for one in cases])),
        "worst_bytes_error": max(abs(one["bytes_error"]) for one in cases),
    }  # fmt: skip


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    quick, reason = arguments.quick, network.why_not()
    if reason is not None:
        print(f"not measured: {reason}")
        harness.write_json(arguments.json, {"not_measured": reason, "cases": []})
        return
    names, repeats = (QUICK_CHOICES, QUICK_REPEATS) if quick else (CHOICES, REPEATS)
    cases = [
        {"size": name, **one}
        for name, size in list(SIZES.items())[: 1 if quick else None]
        for one in run(size, NETWORKS[: 2 if quick else None], names, repeats)
    ]
    shown = [{key: value for key, value in one.items() if not isinstance(value, dict)} for one in cases]
    harness.print_table("the choice of fr.plan and the best choice", shown)
    found = fields(cases)
    harness.print_fields("fields", found)
    harness.write_json(arguments.json, {**found, "not_measured": None, "cases": cases})


if __name__ == "__main__":
    processes.program(main)
