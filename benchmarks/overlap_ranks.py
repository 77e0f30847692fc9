"""One rank of benchmarks/overlap.py: all contenders of one size take turns; rank 0 prints what was measured."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks import harness
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
from tf_fusedrec.schedules import FrozenWindow
from tf_fusedrec.timeline import Recorder, step_times

MARK = "RESULT "
RECORDED = 3  # steps of each contender for the table
# Schedules sum in another order; losses of a few steps of training amplify that.
LOSS_TOLERANCE = 1e-3
SCHEDULES = {"sync": "sync", "frozen_M4": FrozenWindow(4)}


def contenders(size: Size) -> tuple[dict[str, Step], dict[str, Any]]:
    """Steps by name, and the models of those that train."""
    batches = dataset(size)
    steps: dict[str, Step] = {
        "dense_only": dense_only(size, batches, reduce=False),
        "dense_with_allreduce": dense_only(size, batches, reduce=True),
        "exchange_only": exchange_only(size, batches),
    }
    models = {name: make_model(size, make_embedding(size, name, {}), s) for name, s in SCHEDULES.items()}
    steps |= {name: training(model, batches) for name, model in models.items()}
    return steps, models


def check(steps: dict[str, Step], models: dict[str, Any], rounds: int) -> None:
    """Runs every contender a few steps, and holds the losses of the schedules against those of sync."""
    losses = {}
    for name, step in steps.items():
        for _ in range(rounds):
            step()
        if name in models:
            losses[name] = float(models[name].metrics[0].result())
    for name, loss in losses.items():
        harness.check_close(
            f"mean loss of {name} against sync", loss, losses["sync"], relative=LOSS_TOLERANCE, reason="order of sums"
        )


def measure(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Milliseconds per step of each, of the slowest rank."""
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


def record(steps: dict[str, Step]) -> dict[str, dict[str, float]]:
    """Where the median step of each contender went, on rank 0; other ranks answer nothing."""
    recorder = Recorder() if fr.collectives.rank() == 0 else None
    bounds: dict[str, list[tuple[float, float]]] = {}
    for name, step in steps.items():
        for _ in range(RECORDED):
            fr.collectives.barrier()
            begin = time.time()
            step()
            bounds.setdefault(name, []).append((begin, time.time()))
    fr.collectives.barrier()
    if recorder is None:
        return {}
    events = recorder.stop()
    table = {}
    for name, spans in bounds.items():
        times = sorted((step_times(i, events, *span) for i, span in enumerate(spans)), key=lambda t: t.step_ms)
        table[name] = {field: value for field, value in times[RECORDED // 2]._asdict().items() if field != "number"}
    return table


def main(size: dict[str, Any], repeats: int) -> None:
    # One core per rank computes; a second thread keeps lookups from waiting for the compute of another micro-batch.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init()
    keras.utils.disable_interactive_logging()
    steps, models = contenders(Size(**size))
    check(steps, models, Size(**size).batches)
    ms = measure(steps, repeats)
    table = record(steps)
    if fr.collectives.rank() == 0:
        answer = {"ms": ms, "table": table, "size": dataclasses.asdict(Size(**size))}
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    harness.run(lambda: main(**json.loads(sys.argv[1])))
