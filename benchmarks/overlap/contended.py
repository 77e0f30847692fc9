"""The contended case of benchmarks.overlap: two ranks compute on the two cores that also move the bytes.

Both ranks train the GRM of model.py on real ops. Their loop-back is limited. So the case shows the gain of a schedule
on a machine without an accelerator. It is a lower bound, because exchanges take cores from the compute that hides them.

    exposed ratio = (step - dense only) / (exchange only)

"dense only" reads rows from a variable and averages no gradients. "exchange only" is lookup and update with their
all-to-alls.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import children, harness, network
from benchmarks.overlap.model import (
    Size,
    Step,
    dataset,
    dense_only,
    exchange_only,
    make_embedding,
    make_model,
    training,
)
from benchmarks.overlap.variants import EXACT, STALE
from tf_fusedrec import keras, tf
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, SemiAsync, Sync

RANKS = 2
TIMEOUT_S = 900
RATE = "1gbit"
SCHEDULES = {
    "sync": Sync(),
    "frozen_M4": FrozenWindow(4),
    "dual": DualBuffer(),
    "nested_M4": Nested(4),
    "semi_async": SemiAsync(),
}
FIELDS = {
    "contended_exposed_ratio_frozen_M4": ("exposed_ratio", "frozen_M4"),
    "contended_exposed_ratio_nested_M4": ("exposed_ratio", "nested_M4"),
    "contended_speedup_frozen_M4": ("speedup", "frozen_M4"),
    "contended_speedup_nested_M4": ("speedup", "nested_M4"),
    "contended_speedup_dual": ("speedup", "dual"),
    "contended_speedup_semi_async": ("speedup", "semi_async"),
}


def ask(size: Size, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Runs two ranks in a namespace of their own and returns the figures of the case.

    Raises:
      CheckFailed: The ranks failed or exceeded the time limit.
    """
    with network.slow_loopback(RATE) as name:
        ms = children.ask_ranks(
            "benchmarks.overlap.contended", RANKS, inside=network.inside(name, []), timeout_s=TIMEOUT_S,
            size=dataclasses.asdict(size), names=list(names), repeats=repeats,
        )  # fmt: skip
    return case(ms)


def case(ms_of_turns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns the figures of the case: medians in ms, and the exposed part of the exchange."""
    ms = {name: float(np.median(values)) for name, values in ms_of_turns.items()}
    dense, exchange = ms["dense_only"], ms["exchange_only"]
    names = [name for name in SCHEDULES if name in ms]
    return {
        "rate": RATE,
        "ratio": dense / exchange,
        "ms": ms,
        "exposed_ratio": {name: (ms[name] - dense) / exchange for name in names},
        "speedup": {name: ms["sync"] / ms[name] for name in names},
    }


def fields(one: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Returns FIELDS, None for each without root."""
    return {name: None if one is None else one[figure].get(variant) for name, (figure, variant) in FIELDS.items()}


def show(one: Mapping[str, Any]) -> None:
    rows = [
        {
            "variant": name,
            "ms": ms,
            "exposed ratio": one["exposed_ratio"].get(name, "-"),
            "times sync": one["speedup"].get(name, "-"),
        }
        for name, ms in one["ms"].items()
    ]
    harness.print_table(f"contended: 2 ranks compute on their cores; compute : exchange {one['ratio']:.2f}", rows)


def make_steps(size: Size, names: Sequence[str]) -> tuple[dict[str, Step], dict[str, Any]]:
    """Returns the steps by name, and the models of the steps that train."""
    batches = dataset(size)
    models = {name: make_model(size, make_embedding(size, name), SCHEDULES[name]) for name in names}
    return {
        "dense_only": dense_only(size, batches, reduce=False),
        "exchange_only": exchange_only(size, batches),
        **{name: training(model, batches) for name, model in models.items()},
    }, models


def check(steps: Mapping[str, Step], models: Mapping[str, Any], rounds: int) -> None:
    """Runs every step a few times, and compares the losses of the schedules with the losses of sync."""
    losses = {}
    for name, step in steps.items():
        for _ in range(rounds):
            step()
        if name in models:
            losses[name] = float(models[name].metrics[0].result())
    for name, loss in losses.items():
        tolerance = STALE if name == "semi_async" else EXACT
        what = f"mean loss of {name} against sync"
        harness.check_close(what, loss, losses["sync"], relative=tolerance, reason="order of sums; rows of semi_async")


def measure(steps: Mapping[str, Step], repeats: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each step on the slowest rank."""
    names = list(steps)
    seconds = np.zeros([len(names), repeats])
    for repeat in range(repeats):
        for turn in range(len(names)):
            c = (repeat + turn) % len(names)
            fr.collectives.barrier()
            begin = time.perf_counter()
            steps[names[c]]()
            seconds[c, repeat] = time.perf_counter() - begin
    slowest = fr.collectives.all_gather(seconds[np.newaxis]).max(axis=0)
    return {name: (1e3 * slowest[c]).tolist() for c, name in enumerate(names)}


def main(size: dict[str, Any], names: list[str], repeats: int) -> dict[str, list[float]] | None:
    """Returns, on rank 0, the milliseconds of each turn by step.

    Args:
      size: Fields of Size.
      names: Names of SCHEDULES, with "sync".
      repeats: Turns of each step.
    """
    # One core per rank computes. A second thread lets lookups run beside the compute of another micro-batch.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init()
    keras.utils.disable_interactive_logging()
    steps, models = make_steps(Size(**size), names)
    check(steps, models, Size(**size).batches)
    ms = measure(steps, repeats)
    return ms if fr.collectives.rank() == 0 else None


if __name__ == "__main__":
    children.answer(main)
