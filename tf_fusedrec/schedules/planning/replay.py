"""Replays one training step: which task runs when, on the resources of one rank.

    compute   dense forward and backward passes, one after another
    host      duplicates are removed and ids sorted by owner
    table     lookups and updates, in their order
    network   collectives, in the order in which they become ready: Horovod has one queue for all sets of ranks

All ranks are alike, so one rank represents all. A step is one call of a compiled function. It ends when all its tasks
have ended, and no task of the next step begins before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tf_fusedrec.data.batches import piece_bounds
from tf_fusedrec.schedules.schedule import Schedule, Stages

COMPUTE, HOST, TABLE, NETWORK = "compute", "host", "table", "network"


class Task(NamedTuple):
    """One task of a program."""

    name: str
    resource: str  # runs one task at a time
    seconds: float
    after: tuple[int, ...]  # numbers of earlier tasks


class Piece(NamedTuple):
    """Costs of one micro-batch, in seconds."""

    compute: float
    rows: float  # all-to-all
    gradients: float  # all-to-all
    replicas: float = 0.0  # sums of gradients among the replicas of a shard: gradient_sync.py


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Costs of one step of one rank, in seconds, without overlap."""

    prepare: float  # host: duplicates removed, ids sorted by owner
    ids: float  # network: the joined all-to-all of the ids of all micro-batches
    lookup: float  # table: all rows found and copied
    pieces: tuple[Piece, ...]
    update: float  # table: gradients summed over ranks and micro-batches, optimizer
    dense: float = 0.0  # network: all-reduce of dense gradients
    replica_ids: float = 0.0  # network: the ids of all groups among the replicas of a shard; no row waits for them
    average: float = 0.0  # network: replicas become their mean, after the update
    refresh: float = 0.0  # table: rows of a look-ahead that the batch before has updated
    shared_cores: bool = False  # whether host, table and dense compute take turns on the same cores


def shares(samples: int, micro_batches: int) -> list[float]:
    """Parts of a batch that its micro-batches hold; see `cut`.

    A batch of samples with different numbers of tokens is cut by tokens, to nearly the same parts.
    """
    bounds = piece_bounds(samples, micro_batches)
    return [(end - begin) / samples for begin, end in zip(bounds, bounds[1:])]


class Program:
    """A list of tasks that grows."""

    def __init__(self, shared_cores: bool = False):
        self.tasks: list[Task] = []
        self._shared_cores = shared_cores

    def add(self, name: str, resource: str, seconds: float, after: Iterable[int | None] = ()) -> int:
        """Adds a task and returns its number; None in `after` means no task."""
        if self._shared_cores and resource in (HOST, TABLE):
            resource = COMPUTE
        self.tasks.append(Task(name, resource, seconds, tuple(i for i in after if i is not None)))
        return len(self.tasks) - 1


def step_program(costs: StepCosts, schedule: Schedule) -> list[Task]:
    """Returns the tasks of one step under a schedule of tf_fusedrec, in the steady state."""
    stages = schedule.stages
    program = Program(costs.shared_cores)
    if stages.return_rows:
        _rows_ahead(program, costs, stages)
        return program.tasks
    if stages.look_ahead:
        looked_up = program.add("refresh", TABLE, costs.refresh)
        ids, _ = _ids(program, costs, looked_up)
        # Ops on one table keep their order: the look-ahead precedes the update. With a longer lead it has its ids.
        before_update = program.add(
            "look-ahead", TABLE, costs.lookup, [looked_up, ids if stages.send_ids == 1 else None]
        )
    elif stages.send_ids:
        looked_up = before_update = program.add("lookup", TABLE, costs.lookup)
        _ids(program, costs)
    else:
        ids, before_update = _ids(program, costs)
        looked_up = program.add("lookup", TABLE, costs.lookup, [ids])
    rows: list[int] = []
    for piece in costs.pieces:
        rows.append(program.add("rows", NETWORK, piece.rows, [rows[-1] if rows else looked_up]))
    updated, compute = before_update, sum(piece.compute for piece in costs.pieces)
    for piece, arrived in zip(costs.pieces, _compute(program, costs, rows)):  # a row's with its last gradient
        share = piece.compute / compute if compute else 1 / len(costs.pieces)
        updated = program.add("update", TABLE, costs.update * share, [arrived, updated])
    program.add("average", NETWORK, costs.average, [updated])
    return program.tasks


def _ids(program: Program, costs: StepCosts, after: int | None = None) -> tuple[int, int]:
    """Adds the exchanges of ids: inside the group, and then among replicas."""
    prepared = program.add("prepare", HOST, costs.prepare, [after])
    ids = program.add("ids", NETWORK, costs.ids, [prepared])
    return ids, program.add("replica ids", NETWORK, costs.replica_ids, [ids])


def _compute(program: Program, costs: StepCosts, rows: Sequence[int | None]) -> list[int]:
    """Adds the dense passes of all micro-batches. Returns the last exchange of each one's gradients.

    Dense gradients are ready before the gradients of rows.
    """
    back, last = [], None
    for number, (piece, arrived) in enumerate(zip(costs.pieces, rows)):
        last = program.add("compute", COMPUTE, piece.compute, [last, arrived])
        if number + 1 == len(costs.pieces):
            program.add("dense", NETWORK, costs.dense, [last])
        back.append(_gradients(program, piece, last))
    return back


def _gradients(program: Program, piece: Piece, computed: int | None) -> int:
    arrived = program.add("gradients", NETWORK, piece.gradients, [computed])
    return program.add("replicas", NETWORK, piece.replicas, [arrived])


def _update(program: Program, costs: StepCosts, after: Sequence[int | None]) -> int:
    updated = program.add("update", TABLE, costs.update, after)
    return program.add("average", NETWORK, costs.average, [updated])


def _rows_ahead(program: Program, costs: StepCosts, stages: Stages) -> None:
    """The rows of the coming batch travel under this batch's compute (TurboGR, sections 4.2.2 and 4.2.3)."""
    batch = Piece(*(sum(part) for part in zip(*costs.pieces)))
    updated = None
    if stages.update:  # gradients of the batch before wait since the step before
        updated = _update(program, costs, [_gradients(program, batch, None)])
    ids, _ = _ids(program, costs)
    ids_now = ids if stages.send_ids == 1 else None  # with more, the ids have arrived a step earlier
    looked_up = program.add("lookup", TABLE, costs.lookup, [updated, ids_now])
    program.add("rows", NETWORK, batch.rows, [looked_up])
    dense = program.add("compute", COMPUTE, batch.compute)
    program.add("dense", NETWORK, costs.dense, [dense])
    if not stages.update:
        _update(program, costs, [_gradients(program, batch, dense), looked_up])


def ends(tasks: Sequence[Task]) -> list[float]:
    """Returns the time at which each task ends.

    A resource runs its tasks in the order in which they become ready. A task of no seconds does not queue: an exchange
    of one rank with itself is no collective.
    """
    finished: dict[int, float] = {}
    free: dict[str, float] = {}
    waiting = list(range(len(tasks)))
    while waiting:
        ready = [
            (max((finished[j] for j in tasks[i].after), default=0.0), i)
            for i in waiting
            if all(j in finished for j in tasks[i].after)
        ]
        begin, _, i = min(
            (max(at, free.get(tasks[i].resource, 0.0)) if tasks[i].seconds else at, at, i) for at, i in ready
        )
        finished[i] = begin + tasks[i].seconds
        if tasks[i].seconds:
            free[tasks[i].resource] = finished[i]
        waiting.remove(i)
    return [finished[i] for i in range(len(tasks))]


def step_s(costs: StepCosts, schedule: Schedule) -> float:
    """Returns the seconds of one step under a schedule."""
    return max(ends(step_program(costs, schedule)))
