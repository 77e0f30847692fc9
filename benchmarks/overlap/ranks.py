"""One rank of benchmarks.overlap: the variants of one size take turns, and rank 0 reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from benchmarks.tier.pages import give_up_pages
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks.timeline import Recorder, step_times
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Schedule, SemiAsync, Sync

RANKS = 2
TIMEOUT_S = 1500
# Schedules sum in another order, and a few training steps amplify the rounding.
LOSS_TOLERANCE = 1e-3
# Rows that lack one update change the loss of the first steps by a small part, which is more than rounding.
STALE_LOSS_TOLERANCE = 5e-2
ALONE = fr.Topology()
# Both ranks hold replicas: rows need no all-to-all, and each rank gets the gradients of both.
GROUPS = fr.Topology(groups=RANKS)
IN_MEMORY = 1.25  # batches whose rows fit in memory in the variants with a file; at least one


class Variant(NamedTuple):
    """A schedule with its topology and its tables."""

    schedule: Schedule
    topology: fr.Topology = ALONE
    file: bool = False  # keeps most rows in a file, whose pages are out of memory when a step begins
    baseline: str = "sync"  # the variant that it is compared with


VARIANTS = {
    "sync": Variant(Sync()),
    "frozen_M4": Variant(FrozenWindow(4)),
    "dual": Variant(DualBuffer()),
    "nested_M4": Variant(Nested(4)),
    "semi_async": Variant(SemiAsync()),
    "2d": Variant(Sync(), GROUPS),
    "nested_2d": Variant(Nested(4), GROUPS),
    "sync_file": Variant(Sync(), file=True, baseline="sync_file"),
    "dual_file": Variant(DualBuffer(), file=True, baseline="sync_file"),
}


def print_on_rank_0(what: str) -> None:
    if fr.collectives.rank() == 0:
        print(what, flush=True)


def make_steps(size: Size, names: Sequence[str], folder: str) -> tuple[dict[str, Step], dict[str, Any]]:
    """Returns the steps by name, and the models of the steps that train."""
    batches = dataset(size)
    steps: dict[str, Step] = {
        "dense_only": dense_only(size, batches, reduce=False),
        "dense_with_allreduce": dense_only(size, batches, reduce=True),
        "exchange_only": exchange_only(size, batches),
    }
    models = {}
    for name in names:
        variant, table = VARIANTS[name], {}
        if variant.file:
            batch_bytes = size.tokens * 2 * 4 * size.dim  # a row and its slot per token
            # The two tables are one group, whose budget is the sum of theirs.
            table = {"memory_budget": int(batch_bytes * IN_MEMORY / 2), "tier_folder": folder}
        embedding = make_embedding(size, name, table, topology=variant.topology)
        models[name] = make_model(size, embedding, variant.schedule)
        steps[name] = training(models[name], batches)
    return steps, models


def get_ready(name: str) -> None:
    """Lets all ranks begin together. Before a variant with a file, its pages are written and leave memory."""
    if name in VARIANTS and VARIANTS[name].file:
        give_up_pages()
    fr.collectives.barrier()


def check(steps: dict[str, Step], models: dict[str, Any], rounds: int) -> None:
    """Runs every step a few times, and compares the losses of the schedules with those of sync."""
    losses = {}
    for name, step in steps.items():
        begin = time.perf_counter()
        for _ in range(rounds):
            step()
        if name in models and VARIANTS[name].file and not models[name].embedding.lookups[0].table.memory["second_rows"]:
            raise harness.CheckFailed(f"{name} has no rows in a file, so it measures no file. Lower IN_MEMORY.")
        if name in models:
            losses[name] = float(models[name].metrics[0].result())
        print_on_rank_0(f"{name}: traced, {rounds} steps in {time.perf_counter() - begin:.0f} s")
    for name, loss in losses.items():
        tolerance = STALE_LOSS_TOLERANCE if name == "semi_async" else LOSS_TOLERANCE
        what = f"mean loss of {name} against sync"
        harness.check_close(what, loss, losses["sync"], relative=tolerance, reason="order of sums; rows of semi_async")


def measure(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each step on the slowest rank."""
    names = list(steps)
    seconds = np.zeros([len(names), repeats])
    for repeat in range(repeats):
        for turn in range(len(names)):
            c = (repeat + turn) % len(names)
            get_ready(names[c])
            begin = time.perf_counter()
            steps[names[c]]()
            seconds[c, repeat] = time.perf_counter() - begin
        print_on_rank_0(f"round {repeat + 1} of {repeats}")
    slowest = fr.collectives.all_gather(seconds[np.newaxis]).max(axis=0)
    return {name: (1e3 * slowest[c]).tolist() for c, name in enumerate(names)}


def record(steps: dict[str, Step], count: int) -> dict[str, dict[str, float]]:
    """Returns, on rank 0, the parts of the median of `count` recorded steps. Other ranks return nothing."""
    recorder = Recorder() if fr.collectives.rank() == 0 else None
    bounds: dict[str, list[tuple[float, float]]] = {}
    for name, step in steps.items():
        for _ in range(count):
            get_ready(name)
            begin = time.time()
            step()
            bounds.setdefault(name, []).append((begin, time.time()))
    fr.collectives.barrier()
    if recorder is None:
        return {}
    print_on_rank_0("reading the record of the steps")
    events = recorder.stop()
    table = {}
    for name, spans in bounds.items():
        times = sorted((step_times(i, events, *span) for i, span in enumerate(spans)), key=lambda t: t.step_ms)
        table[name] = {field: value for field, value in times[count // 2]._asdict().items() if field != "number"}
    return table


def main(
    size: dict[str, Any], phases: list[dict[str, Any]], folder: str, recording: bool
) -> list[dict[str, Any]] | None:
    """Times or records all phases. Returns, on rank 0, milliseconds by step or the table of `record`.

    Args:
      size: Fields of Size.
      phases: For each phase the `rate` of the network, the names of the `variants`, their `repeats`, and the number of
        steps to be `recorded`.
      folder: Folder for the files of tables, the same on all ranks.
      recording: Whether to record steps instead of timing them. A job with Horovod's timeline is too slow to time.
    """
    # One core per rank computes. A second thread lets lookups run beside the compute of another micro-batch.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init(GROUPS, timeline=recording)
    keras.utils.disable_interactive_logging()
    names = list(dict.fromkeys(name for phase in phases for name in phase["variants"]))
    steps, models = make_steps(Size(**size), names, folder)
    check(steps, models, Size(**size).batches)
    found: list[dict[str, Any]] = []
    for phase in phases:
        print_on_rank_0(f"at {phase['rate']}: {', '.join(phase['variants'])}")
        if fr.collectives.rank() == 0:
            network.limit_here("lo", phase["rate"])
        fr.collectives.barrier()
        turns = {name: step for name, step in steps.items() if name in phase["variants"] or name not in VARIANTS}
        found.append(record(turns, phase["recorded"]) if recording else measure(turns, phase["repeats"]))
    return found if fr.collectives.rank() == 0 else None


if __name__ == "__main__":
    children.answer(main)
