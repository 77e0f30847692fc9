"""Replays the schedules: a step is tasks on three kinds of resources, each of which does one task at a time.

    lookup    the stages before the rows leave their owner: read, route, find, copy. A pipeline has a resource per stage
    network   all2alls of rows and gradients, and what replicas exchange
    compute   dense forward and backward

A resource takes, of the tasks that could run, the one that comes first in the program. Several steps are replayed; the
time of a step is that between two ends when the pipeline is full.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

STEPS = 12  # replayed
FULL = 6  # the pipeline is full by then: none looks further ahead


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """What one step of one worker costs, in seconds, when nothing runs beside it."""

    lookup: float
    compute: float
    rows: float  # all2all
    gradients: float  # all2all
    synchronize: float = 0.0  # what replicas exchange after their updates, or their gradients before
    refresh: float = 0.0  # dual buffer: rows that the batch before updated
    lookup_stages: int = 4  # NestPipe IV.A: prefetch, copy to the device, routing, retrieval


class Task(NamedTuple):
    name: str
    resource: str
    seconds: float
    after: tuple[int, ...]  # numbers of earlier tasks


class Replay(NamedTuple):
    """Of a step in the steady state, in seconds."""

    step: float
    lookup_exposed: float  # waits that lookups make
    exposed: float  # waits that the network makes


Program = list[Task]
Schedule = Callable[[StepCosts], Program]


def _add(program: Program, name: str, resource: str, seconds: float, after: Sequence[int | None]) -> int:
    program.append(Task(name, resource, seconds, tuple(i for i in after if i is not None)))
    return len(program) - 1


def sync(costs: StepCosts) -> Program:
    """One after another."""
    return frozen_window(1)(costs)


def frozen_window(micro_batches: int) -> Schedule:
    """NestPipe V: exchanges of one micro-batch under the compute of another; lookups start with the step.

    Micro-batches are equal, as in what the paper publishes; schedules.cut makes the first and the last smaller.
    """
    return lambda costs: _program(costs, micro_batches, ahead=False)


def dual_buffer(costs: StepCosts) -> Program:
    """NestPipe IV: lookups of coming batches under this one; rows leave when they are up to date."""
    return nested(1)(costs)


def nested(micro_batches: int) -> Schedule:
    """NestPipe: both."""
    return lambda costs: _program(costs, micro_batches, ahead=True)


def semi_async(costs: StepCosts) -> Program:
    """TurboGR 4.2.2: rows of the next batch leave, and gradients of the last one return, under dense compute."""
    program: Program = []
    updated: list[int | None] = [None, None]
    for t in range(STEPS):
        rows = _add(program, "rows", "network", costs.rows, [_stages(program, costs), updated[t]])
        dense = _add(program, "dense", "compute", costs.compute, [rows])
        back = _add(program, "gradients", "network", costs.gradients, [dense])
        updated.append(_add(program, "synchronize", "network", costs.synchronize, [back]))
    return program


def _stages(program: Program, costs: StepCosts) -> int:
    """A lookup whose stages are resources of their own; answers the last one."""
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
        for _ in range(micro_batches):
            if not ahead:
                ready = _add(program, "lookup", "lookup", part * costs.lookup, [done])
            rows.append(_add(program, "rows", "network", part * costs.rows, [ready]))
        back = []
        for row in rows:
            dense = _add(program, "dense", "compute", part * costs.compute, [row])
            back.append(_add(program, "gradients", "network", part * costs.gradients, [dense]))
        done = _add(program, "synchronize", "network", costs.synchronize, back)
    return program


def ends(program: Program) -> list[float]:
    """When each task ends."""
    finished: dict[int, float] = {}
    free: dict[str, float] = {}
    waiting = list(range(len(program)))
    while waiting:
        # The task that can begin first; of several, the one that comes first in the program.
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
    """Step time of a schedule, and what lookups and the network add to it (the network last)."""
    step = _seconds_per_step(costs, schedule)
    quiet = dataclasses.replace(costs, rows=0.0, gradients=0.0, synchronize=0.0)
    without_network = _seconds_per_step(quiet, schedule)
    return Replay(step, without_network - costs.compute, step - without_network)
