"""Replays the steps that papers describe: equal micro-batches, and batches in flight without a barrier between steps.

    lookup    the stages before rows leave their owner: read, route, find, copy. A pipeline has a resource per stage
    network   all-to-alls of rows and gradients, and the exchange between replicas
    compute   dense forward and backward

tf_fusedrec/schedules/planning/replay.py has the engine, and the steps of this project. The time of a step is the time
between the ends of two steps of a full pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from tf_fusedrec.schedules.planning.replay import COMPUTE, NETWORK, Program, Task, ends

STEPS = 12  # replayed steps
FULL = 6  # steps that fill the pipeline: no schedule looks further ahead


@dataclasses.dataclass(frozen=True)
class PaperStep:
    """Costs of one step of one worker, in seconds, without overlap."""

    lookup: float
    compute: float
    rows: float  # all-to-all
    gradients: float  # all-to-all
    synchronize: float = 0.0  # exchange between replicas, of rows after the update or of gradients before it
    lookup_stages: int = 4  # NestPipe IV.A: prefetch, copy to the device, routing, retrieval


class Replay(NamedTuple):
    """Times of a step in the steady state, in seconds."""

    step: float
    lookup_exposed: float  # time that lookups add to the compute
    exposed: float  # time that the network adds to both


Schedule = Callable[[PaperStep], "list[Task]"]


def sync(costs: PaperStep) -> list[Task]:
    """Runs lookup, exchanges and compute one after another."""
    return frozen_window(1)(costs)


def frozen_window(micro_batches: int) -> Schedule:
    """Hides exchanges of one micro-batch under the compute of another (NestPipe V). The lookup starts with the step."""
    return lambda costs: _program(costs, micro_batches, ahead=False)


def dual_buffer(costs: PaperStep) -> list[Task]:
    """Hides the lookups of coming batches under this batch (NestPipe IV). Rows travel once they are up to date."""
    return nested(1)(costs)


def nested(micro_batches: int) -> Schedule:
    """Hides exchanges as frozen_window does and lookups as dual_buffer does (NestPipe)."""
    return lambda costs: _program(costs, micro_batches, ahead=True)


def _stages(program: Program, costs: PaperStep) -> int:
    """Adds a lookup with a resource per stage. Returns the number of the last task."""
    done = None
    for stage in range(costs.lookup_stages):
        done = program.add("lookup", f"lookup {stage}", costs.lookup / costs.lookup_stages, [done])
    assert done is not None
    return done


def _program(costs: PaperStep, micro_batches: int, *, ahead: bool) -> list[Task]:
    program = Program()
    part = 1 / micro_batches
    done: int | None = None
    for _ in range(STEPS):
        if ahead:
            ready = program.add("ready", "refresh", 0.0, [_stages(program, costs), done])
        else:
            ready = program.add("lookup", "lookup", costs.lookup, [done])
        rows = [program.add("rows", NETWORK, part * costs.rows, [ready]) for _ in range(micro_batches)]
        back = []
        for row in rows:
            dense = program.add("dense", COMPUTE, part * costs.compute, [row])
            back.append(program.add("gradients", NETWORK, part * costs.gradients, [dense]))
        done = program.add("synchronize", NETWORK, costs.synchronize, back)
    return program.tasks


def _seconds_per_step(costs: PaperStep, schedule: Schedule) -> float:
    program = schedule(costs)
    dense = [end for task, end in zip(program, ends(program)) if task.name == "dense"]
    pieces = len(dense) // STEPS
    last = dense[pieces - 1 :: pieces]
    return (last[-1] - last[FULL - 1]) / (STEPS - FULL)


def replay(costs: PaperStep, schedule: Schedule) -> Replay:
    """Returns the step time of a schedule, the time that lookups add, and the time that the network adds to both."""
    step = _seconds_per_step(costs, schedule)
    quiet = dataclasses.replace(costs, rows=0.0, gradients=0.0, synchronize=0.0)
    without_network = _seconds_per_step(quiet, schedule)
    return Replay(step, without_network - costs.compute, step - without_network)
