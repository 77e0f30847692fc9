"""Replays the schedules. A step is a list of tasks on three kinds of resources, each with one task at a time.

    lookup    the stages before rows leave their owner: read, route, find, copy. A pipeline has a resource per stage
    network   all-to-alls of rows and gradients, and the exchange between replicas
    compute   dense forward and backward

A step makes one lookup of its table, whatever the number of its micro-batches, as tf_fusedrec does
(tf_fusedrec/embedding). A resource runs the ready task that comes first in the program. The time of a step is the time
between the ends of two steps of a full pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

STEPS = 12  # replayed steps
FULL = 6  # steps that fill the pipeline: no schedule looks further ahead


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Costs of one step of one worker, in seconds, without overlap."""

    lookup: float
    compute: float
    rows: float  # all-to-all
    gradients: float  # all-to-all
    synchronize: float = 0.0  # exchange between replicas, of rows after the update or of gradients before it
    refresh: float = 0.0  # dual buffer: second copy of rows that the previous batch updated
    lookup_stages: int = 4  # NestPipe IV.A: prefetch, copy to the device, routing, retrieval


class Task(NamedTuple):
    name: str
    resource: str
    seconds: float
    after: tuple[int, ...]  # numbers of earlier tasks


class Replay(NamedTuple):
    """Times of a step in the steady state, in seconds."""

    step: float
    lookup_exposed: float  # time that lookups add to the compute
    exposed: float  # time that the network adds to both


Program = list[Task]
Schedule = Callable[[StepCosts], Program]


def _add(program: Program, name: str, resource: str, seconds: float, after: Sequence[int | None]) -> int:
    program.append(Task(name, resource, seconds, tuple(i for i in after if i is not None)))
    return len(program) - 1


def sync(costs: StepCosts) -> Program:
    """Runs lookup, exchanges and compute one after another."""
    return frozen_window(1)(costs)


def frozen_window(micro_batches: int) -> Schedule:
    """Hides exchanges of one micro-batch under the compute of another (NestPipe V). The lookup starts with the step.

    Micro-batches are equal, as in the paper. tf_fusedrec makes the first and the last micro-batch smaller.
    """
    return lambda costs: _program(costs, micro_batches, ahead=False)


def dual_buffer(costs: StepCosts) -> Program:
    """Hides the lookups of coming batches under this batch (NestPipe IV). Rows travel once they are up to date."""
    return nested(1)(costs)


def nested(micro_batches: int) -> Schedule:
    """Hides exchanges as frozen_window does and lookups as dual_buffer does (NestPipe)."""
    return lambda costs: _program(costs, micro_batches, ahead=True)


def semi_async(costs: StepCosts) -> Program:
    """Sends rows of the next batch and gradients of the last one under dense compute (TurboGR 4.2.2)."""
    program: Program = []
    updated: list[int | None] = [None, None]
    for t in range(STEPS):
        rows = _add(program, "rows", "network", costs.rows, [_stages(program, costs), updated[t]])
        dense = _add(program, "dense", "compute", costs.compute, [rows])
        back = _add(program, "gradients", "network", costs.gradients, [dense])
        updated.append(_add(program, "synchronize", "network", costs.synchronize, [back]))
    return program


def _stages(program: Program, costs: StepCosts) -> int:
    """Adds a lookup with a resource per stage. Returns the number of the last task."""
    done = None
    for stage in range(costs.lookup_stages):
        done = _add(program, "lookup", f"lookup {stage}", costs.lookup / costs.lookup_stages, [done])
    assert done is not None
    return done


def _program(costs: StepCosts, micro_batches: int, *, ahead: bool) -> Program:
    program: Program = []
    part = 1 / micro_batches
    done: int | None = None
    for _ in range(STEPS):
        rows = []
        if ahead:
            ready = _add(program, "refresh", "lookup refresh", costs.refresh, [_stages(program, costs), done])
        else:
            ready = _add(program, "lookup", "lookup", costs.lookup, [done])
        for _ in range(micro_batches):
            rows.append(_add(program, "rows", "network", part * costs.rows, [ready]))
        back = []
        for row in rows:
            dense = _add(program, "dense", "compute", part * costs.compute, [row])
            back.append(_add(program, "gradients", "network", part * costs.gradients, [dense]))
        done = _add(program, "synchronize", "network", costs.synchronize, back)
    return program


def ends(program: Program) -> list[float]:
    """Returns the time at which each task ends."""
    finished: dict[int, float] = {}
    free: dict[str, float] = {}
    waiting = list(range(len(program)))
    while waiting:
        # The earliest task runs next. Among equally early tasks, the first one in the program runs.
        ready = [
            (max([free.get(program[i].resource, 0.0), *(finished[j] for j in program[i].after)]), i)
            for i in waiting
            if all(j in finished for j in program[i].after)
        ]
        begin, i = min(ready)
        finished[i] = free[program[i].resource] = begin + program[i].seconds
        waiting.remove(i)
    return [finished[i] for i in range(len(program))]


def _seconds_per_step(costs: StepCosts, schedule: Schedule) -> float:
    program = schedule(costs)
    dense = [end for task, end in zip(program, ends(program)) if task.name == "dense"]
    pieces = len(dense) // STEPS
    last = dense[pieces - 1 :: pieces]
    return (last[-1] - last[FULL - 1]) / (STEPS - FULL)


def replay(costs: StepCosts, schedule: Schedule) -> Replay:
    """Returns the step time of a schedule, the time that lookups add, and the time that the network adds to both."""
    step = _seconds_per_step(costs, schedule)
    quiet = dataclasses.replace(costs, rows=0.0, gradients=0.0, synchronize=0.0)
    without_network = _seconds_per_step(quiet, schedule)
    return Replay(step, without_network - costs.compute, step - without_network)
