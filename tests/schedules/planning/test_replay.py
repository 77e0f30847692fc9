"""The replay of a step agrees with sums made by hand, for every schedule."""

import dataclasses

import pytest

from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync
from tf_fusedrec.schedules.planning.replay import NETWORK, Piece, Program, StepCosts, ends, shares, step_program, step_s

# All costs and their sums are exact in binary.
WHOLE = (Piece(compute=8.0, rows=1.0, gradients=1.0),)
COSTS = StepCosts(0.5, 0.25, 2.0, WHOLE, update=1.0, dense=0.5, refresh=0.125)


def cut(costs, micro_batches):
    parts = [(2 - (i in (0, micro_batches - 1))) / (2 * micro_batches - 2) for i in range(micro_batches)]
    return dataclasses.replace(costs, pieces=tuple(Piece(8.0 * p, 1.0 * p, 1.0 * p) for p in parts))


def test_a_resource_runs_what_became_ready_first():
    program = Program()
    short, long = program.add("short", "compute", 2.0), program.add("long", "host", 2.5)
    program.add("busy", NETWORK, 3.0)
    second = program.add("second", NETWORK, 1.0, [long])
    first = program.add("first", NETWORK, 1.0, [short])  # behind the other in the program, and ready before it
    finished = ends(program.tasks)
    assert (finished[first], finished[second]) == (4.0, 5.0)


def test_micro_batches_are_smaller_at_both_ends():
    assert shares(6000, 4) == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6], abs=1e-3)
    assert shares(22000, 8) == pytest.approx([n / 22 for n in (1, 2, 4, 4, 4, 4, 2, 1)], abs=1e-3)
    assert sum(shares(7, 3)) == pytest.approx(1)


# The parts of a step under Sync: ids are prepared and sent, rows looked up and sent, computed with, and trained.
SYNC = 0.5 + 0.25 + 2 + 1 + 8 + 0.5 + 1 + 1
FIFTHS, WINDOW = cut(COSTS, 5).pieces, (Piece(2.0, 0.25, 0.25),) * 4


@pytest.mark.parametrize(
    ("schedule", "costs", "expected"),
    [
        (Sync(), {}, SYNC),
        (Pipelined(1), {}, SYNC),
        (Pipelined(2), {}, SYNC),
        (Sync(), {"dense": 4.0}, SYNC - 0.5 + 4),
        (Sync(), {"average": 3.0}, SYNC + 3),
        (Sync(), {"shared_cores": True}, SYNC),
        # Rows do not wait for the ids of other groups, which travel under the lookup.
        (Sync(), {"replica_ids": 1.5, "pieces": (WHOLE[0]._replace(replicas=2.0),)}, SYNC + 2),
        (FrozenWindow(1), {}, SYNC),
        (FrozenWindow(1), {"dense": 4.0}, SYNC - 0.5 + 4),
        # The first rows, the last gradients and their update are exposed. They have half the size of others: an eighth.
        (FrozenWindow(5), {"pieces": FIFTHS}, 0.5 + 0.25 + 2 + 1 / 8 + 8 + 0.5 + 1 / 8 + 1 / 8),
        # The sums of all micro-batches but the last one travel under compute.
        (FrozenWindow(4), {"pieces": WINDOW}, 0.5 + 0.25 + 2 + 0.25 + 8 + 0.5 + 0.25 + 1 / 4),
        (
            FrozenWindow(4),
            {"replica_ids": 1.5, "pieces": tuple(piece._replace(replicas=0.5) for piece in WINDOW)},
            0.5 + 0.25 + 2 + 0.25 + 8 + 0.5 + 0.25 + 1 / 4 + 0.5,
        ),
        # Ids and lookups are hidden, and their refresh is not.
        (DualBuffer(), {}, 0.125 + 1 + 8 + 0.5 + 1 + 1),
        (Nested(5), {"pieces": FIFTHS}, 0.125 + 1 / 8 + 8 + 0.5 + 1 / 8 + 1 / 8),
        # A look-ahead holds up the update behind it. Its ids queue behind the rows, which are ready first.
        (DualBuffer(), {"lookup": 32.0}, 0.125 + 1 + 0.25 + 32 + 1),
        (Pipelined(3), {}, 2 + 1 + 8 + 0.5 + 1 + 1),
        (Pipelined(4), {}, 8 + 0.5 + 1 + 1),
        # The dense all-reduce alone is exposed, unless gradients, update, lookup and rows, one chain, take longer.
        (SemiAsync(), {}, 8 + 0.5),
        (SemiAsync(), {"lookup": 16.0}, 1 + 1 + 16 + 1),
        (Pipelined(6), {"lookup": 16.0}, 1 + 1 + 16 + 1),
    ],
)
def test_a_step_takes_the_sum_of_what_is_exposed(schedule, costs, expected):
    assert step_s(dataclasses.replace(COSTS, **costs), schedule) == expected


def test_gradients_go_between_rows_that_leave_one_after_another():
    slow = dataclasses.replace(COSTS, pieces=(Piece(1.0, 2.0, 2.0),) * 3, dense=0.0)
    names = [task.name for task in step_program(slow, FrozenWindow(3))]
    finished = dict(zip(range(len(names)), ends(step_program(slow, FrozenWindow(3)))))
    rows, back = ([i for i, name in enumerate(names) if name == kind] for kind in ("rows", "gradients"))
    # Rows 1 run while micro-batch 0 computes; rows 2 and the gradients of 0 are ready then, the gradients first.
    assert finished[rows[1]] < finished[back[0]] < finished[rows[2]]


def test_shared_cores_hide_no_lookup():
    """Prepare, look-ahead, refresh, compute and update take turns; only exchanges run beside them."""
    shared = dataclasses.replace(COSTS, shared_cores=True)
    assert step_s(shared, DualBuffer()) >= 0.5 + 2 + 0.125 + 8 + 1


@pytest.mark.parametrize("schedule", [Sync(), FrozenWindow(4), DualBuffer(), Nested(4), SemiAsync(), Pipelined(6)])
def test_every_cost_is_spent(schedule):
    """A program holds each cost once, so no schedule forgets an exchange."""
    costs = cut(dataclasses.replace(COSTS, replica_ids=4.0, average=3.0), 4)
    costs = dataclasses.replace(costs, pieces=tuple(piece._replace(replicas=0.5) for piece in costs.pieces))
    pieces = [sum(piece) for piece in costs.pieces]
    refresh = costs.refresh if isinstance(schedule, (DualBuffer, Nested)) else 0
    expected = 0.5 + 0.25 + 2 + sum(pieces) + 1 + 0.5 + 4 + 3 + refresh
    assert sum(task.seconds for task in step_program(costs, schedule)) == pytest.approx(expected, rel=1e-12)
