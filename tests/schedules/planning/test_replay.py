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


def test_the_first_and_the_last_micro_batch_are_half_as_large():
    assert shares(6000, 4) == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6], abs=1e-3)
    assert sum(shares(7, 3)) == pytest.approx(1)


def test_sync_is_the_sum_of_its_parts():
    assert step_s(COSTS, Sync()) == 0.5 + 0.25 + 2 + 1 + 8 + 0.5 + 1 + 1
    assert step_s(COSTS, Pipelined(1)) == step_s(COSTS, Sync())


def test_the_update_of_a_window_runs_under_its_dense_all_reduce():
    assert step_s(COSTS, FrozenWindow(1)) == step_s(COSTS, Sync()) - 0.5
    slow = dataclasses.replace(COSTS, dense=4.0)
    assert step_s(slow, FrozenWindow(1)) == 0.5 + 0.25 + 2 + 1 + 8 + 1 + 4
    assert step_s(slow, Sync()) == 0.5 + 0.25 + 2 + 1 + 8 + 4 + 1 + 1


def test_frozen_window_exposes_the_first_rows_and_the_last_gradients():
    # The first and last piece have half the size of the others: an eighth of the exchange at M = 5.
    step = step_s(cut(COSTS, 5), FrozenWindow(5))
    assert step == pytest.approx(0.5 + 0.25 + 2 + 1 / 8 + 8 + 1 / 8 + 1, rel=1e-12)


def test_gradients_go_between_rows_that_leave_one_after_another():
    slow = dataclasses.replace(COSTS, pieces=(Piece(1.0, 2.0, 2.0),) * 3, dense=0.0)
    names = [task.name for task in step_program(slow, FrozenWindow(3))]
    finished = dict(zip(range(len(names)), ends(step_program(slow, FrozenWindow(3)))))
    rows, back = ([i for i, name in enumerate(names) if name == kind] for kind in ("rows", "gradients"))
    # Rows 1 run while micro-batch 0 computes; rows 2 and the gradients of 0 are ready then, the gradients first.
    assert finished[rows[1]] < finished[back[0]] < finished[rows[2]]


def test_dual_buffer_hides_ids_and_lookups():
    assert step_s(COSTS, DualBuffer()) == 0.125 + 1 + 8 + 0.5 + 1 + 1
    assert step_s(cut(COSTS, 5), Nested(5)) == pytest.approx(0.125 + 1 / 8 + 8 + 1 / 8 + 1, rel=1e-12)


def test_a_look_ahead_holds_up_the_update_behind_it():
    slow = dataclasses.replace(COSTS, lookup=32.0)
    # The ids queue behind the rows, which are ready first.
    assert step_s(slow, DualBuffer()) == 0.125 + 1 + 0.25 + 32 + 1


def test_pipelined_3_routes_ahead_and_looks_up_in_the_step():
    assert step_s(COSTS, Pipelined(3)) == 2 + 1 + 8 + 0.5 + 1 + 1
    assert step_s(COSTS, Pipelined(2)) == step_s(COSTS, Sync())


def test_semi_async_exposes_the_dense_all_reduce_alone():
    assert step_s(COSTS, SemiAsync()) == 8 + 0.5
    # Gradients, update, lookup and rows are one chain, longer than the compute here.
    slow = dataclasses.replace(COSTS, lookup=16.0)
    assert step_s(slow, SemiAsync()) == 1 + 1 + 16 + 1
    assert step_s(slow, Pipelined(6)) == 1 + 1 + 16 + 1


def test_pipelined_4_updates_in_the_step():
    assert step_s(COSTS, Pipelined(4)) == 8 + 0.5 + 1 + 1


def test_replicas_sum_behind_the_gradients_of_their_group():
    summed = dataclasses.replace(COSTS, replica_ids=1.5, pieces=(WHOLE[0]._replace(replicas=2.0),))
    # Rows do not wait for the ids of other groups, which travel under the lookup.
    assert step_s(summed, Sync()) == step_s(COSTS, Sync()) + 2
    parts = tuple(Piece(2.0, 0.25, 0.25, replicas=0.5) for _ in range(4))
    window = dataclasses.replace(COSTS, pieces=parts)
    # The sums of all micro-batches but the last one travel under compute.
    without = dataclasses.replace(COSTS, pieces=tuple(part._replace(replicas=0.0) for part in parts))
    assert step_s(window, FrozenWindow(4)) == step_s(without, FrozenWindow(4)) + 0.5
    assert step_s(dataclasses.replace(COSTS, average=3.0), Sync()) == step_s(COSTS, Sync()) + 3


def test_shared_cores_hide_no_lookup():
    shared = dataclasses.replace(COSTS, shared_cores=True)
    assert step_s(shared, Sync()) == step_s(COSTS, Sync())
    # prepare, look-ahead, refresh, compute and update take turns; only exchanges run beside them.
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
