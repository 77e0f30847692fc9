"""One rank of benchmarks/overlap.py: the arms of one size take turns; rank 0 says what it does and what it measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks import children, harness, network, tier
from benchmarks.overlap_model import (
    Size,
    Step,
    dataset,
    dense_only,
    exchange_only,
    make_embedding,
    make_model,
    training,
)
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks.timeline import Recorder, step_times
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Schedule, SemiAsync, Sync

RANKS = 2
# Schedules sum in another order; losses of a few steps of training amplify that.
LOSS_TOLERANCE = 1e-3
# Rows that lack one update: a few steps from the start that is a small part of the loss, and no rounding.
STALE_LOSS_TOLERANCE = 5e-2
ALONE = fr.Topology()
# Replicas on both ranks: rows need no all2all, and gradients of all rows of both ranks go to both.
GROUPS = fr.Topology(groups=RANKS)
IN_MEMORY = 1.25  # batches whose rows memory holds in the arms with a file; one is the least


class Arm(NamedTuple):
    """A way to train."""

    schedule: Schedule
    topology: fr.Topology = ALONE
    file: bool = False  # most rows are in a file, whose pages are not in memory when a step begins
    reference: str = "sync"  # the arm that it is compared with


ARMS = {
    "sync": Arm(Sync()),
    "frozen_M4": Arm(FrozenWindow(4)),
    "dual": Arm(DualBuffer()),
    "nested_M4": Arm(Nested(4)),
    "semi_async": Arm(SemiAsync()),
    "2d": Arm(Sync(), GROUPS),
    "nested_2d": Arm(Nested(4), GROUPS),
    "sync_file": Arm(Sync(), file=True, reference="sync_file"),
    "dual_file": Arm(DualBuffer(), file=True, reference="sync_file"),
}
HALVES = ("dense_only", "dense_with_allreduce", "exchange_only")


def say(what: str) -> None:
    if fr.collectives.rank() == 0:
        print(what, flush=True)


def contenders(size: Size, names: Sequence[str], folder: str) -> tuple[dict[str, Step], dict[str, Any]]:
    """Steps by name, and the models of those that train."""
    batches = dataset(size)
    steps: dict[str, Step] = {
        "dense_only": dense_only(size, batches, reduce=False),
        "dense_with_allreduce": dense_only(size, batches, reduce=True),
        "exchange_only": exchange_only(size, batches),
    }
    models = {}
    for name in names:
        arm, table = ARMS[name], {}
        if arm.file:
            of_batch = size.tokens * 2 * 4 * size.dim  # a row and its slot for every token
            # The two tables are one group, whose budget is the sum of theirs.
            table = {"memory_budget": int(of_batch * IN_MEMORY / 2), "tier_folder": folder}
        embedding = make_embedding(size, name, table, topology=arm.topology)
        models[name] = make_model(size, embedding, arm.schedule)
        steps[name] = training(models[name], batches)
    return steps, models


def get_ready(name: str) -> None:
    """All ranks begin together; before arms with a file, it is written and its pages leave memory."""
    if name in ARMS and ARMS[name].file:
        tier.give_up_pages()
    fr.collectives.barrier()


def check(steps: dict[str, Step], models: dict[str, Any], rounds: int) -> None:
    """Runs every contender a few steps, and holds the losses of the schedules against those of sync."""
    losses = {}
    for name, step in steps.items():
        begin = time.perf_counter()
        for _ in range(rounds):
            step()
        if name in models and ARMS[name].file and not models[name].embedding.lookups[0].table.memory["second_rows"]:
            raise harness.CheckFailed(f"{name} has no rows in a file.")
        if name in models:
            losses[name] = float(models[name].metrics[0].result())
        say(f"{name}: traced, {rounds} steps in {time.perf_counter() - begin:.0f} s")
    for name, loss in losses.items():
        tolerance = STALE_LOSS_TOLERANCE if name == "semi_async" else LOSS_TOLERANCE
        what = f"mean loss of {name} against sync"
        harness.check_close(what, loss, losses["sync"], relative=tolerance, reason="order of sums; rows of semi_async")


def measure(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Milliseconds per step of each, of the slowest rank."""
    names = list(steps)
    seconds = np.zeros([len(names), repeats])
    for repeat in range(repeats):
        for turn in range(len(names)):
            c = (repeat + turn) % len(names)
            get_ready(names[c])
            begin = time.perf_counter()
            steps[names[c]]()
            seconds[c, repeat] = time.perf_counter() - begin
        say(f"round {repeat + 1} of {repeats}")
    slowest = fr.collectives.all_gather(seconds[np.newaxis]).max(axis=0)
    return {name: (1e3 * slowest[c]).tolist() for c, name in enumerate(names)}


def record(steps: dict[str, Step], count: int) -> dict[str, dict[str, float]]:
    """Where the median of `count` steps of each contender went, on rank 0; other ranks answer nothing."""
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
    say("reading the record of the steps")
    events = recorder.stop()
    table = {}
    for name, spans in bounds.items():
        times = sorted((step_times(i, events, *span) for i, span in enumerate(spans)), key=lambda t: t.step_ms)
        table[name] = {field: value for field, value in times[count // 2]._asdict().items() if field != "number"}
    return table


def main(
    size: dict[str, Any], phases: list[dict[str, Any]], folder: str, recording: bool
) -> list[dict[str, Any]] | None:
    """On rank 0, of each phase: milliseconds of each step by contender, or the table of `record`.

    Args:
      size: fields of Size.
      phases: of each the `rate` of the network, the `arms` that take turns and their `repeats`, and
        steps `recorded` of each.
      folder: where tables put their files; the same on all ranks.
      recording: whether to record steps and not to time them: a job that can do the one is too slow for the other.
    """
    # One core per rank computes; a second thread keeps lookups from waiting for the compute of another micro-batch.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init(GROUPS, timeline=recording)
    keras.utils.disable_interactive_logging()
    arms = list(dict.fromkeys(arm for phase in phases for arm in phase["arms"]))
    steps, models = contenders(Size(**size), arms, folder)
    check(steps, models, Size(**size).batches)
    found: list[dict[str, Any]] = []
    for phase in phases:
        say(f"at {phase['rate']}: {', '.join(phase['arms'])}")
        if fr.collectives.rank() == 0:
            network.limit_here("lo", phase["rate"])
        fr.collectives.barrier()
        turns = {name: step for name, step in steps.items() if name in phase["arms"] or name not in ARMS}
        found.append(record(turns, phase["recorded"]) if recording else measure(turns, phase["repeats"]))
    return found if fr.collectives.rank() == 0 else None


if __name__ == "__main__":
    children.answer(main)
