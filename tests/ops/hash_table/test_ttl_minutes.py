"""limits.ttl_minutes: rows leave by wall time. The clock is set, so no test waits."""

import ctypes

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules.planning.models import make_model
from tests.support.hash_tables import new_table
from tf_fusedrec import ops
from tf_fusedrec.ops import _library
from tf_fusedrec.schedules.planning import choice


@pytest.fixture
def at():
    """Sets the minute that tables see."""
    set_minute = _library._functions.fusedrec_set_minute
    set_minute.argtypes = [ctypes.c_int64]
    yield set_minute
    set_minute(-1)


def minutes(ttl):
    return {"limits.ttl_minutes": ttl}


def ids_of(table, segment=0):
    return table.records(segment)[0].tolist()


def test_rows_leave_after_their_minutes_and_others_stay(at):
    with new_table(2, **minutes([3, 0]), record_tombstones=True) as table:
        seen = {}  # minute of the last lookup, by id
        random = np.random.default_rng(5)
        for minute in np.cumsum(random.integers(0, 3, 60)).tolist():
            at(100 + minute)
            ids = random.integers(0, 12, 3).tolist()
            seen = {i: last for i, last in seen.items() if minute - last <= 3 or i in ids}
            kept = {i for i in ids if i in seen and minute - seen[i] <= 3}
            before = table.statistics()[0][2]
            table.lookup([[ids, [77]]])
            assert table.statistics()[0][2] - before == len({*ids} - kept)
            seen.update(dict.fromkeys(ids, minute))
            assert sorted(ids_of(table)) == sorted(seen)
            assert ids_of(table, 1) == [77]
        gone = ops.table_tombstones(table.handle, 0).numpy().tolist()
        assert gone == sorted({*range(12)} - {*seen}) and table.statistics()[0][3] > 5


def test_a_step_that_trains_nothing_of_a_row_ages_it_and_pinned_rows_stay(at):
    with new_table(**minutes(2), window=2) as table:
        at(10)
        table.lookup([[[1]]])
        at(20)
        table.lookup([[[2]]])  # the window holds 1
        assert sorted(ids_of(table)) == [1, 2]
        at(21)
        table.lookup([[[2]]])
        assert ids_of(table) == [2]


def test_loaded_rows_count_as_looked_up_by_the_first_lookup(at):
    with new_table(**minutes(5)) as table, new_table(**minutes(5)) as other:
        at(1)
        for _ in range(9):
            table.lookup([[[1, 2]]])
        at(1000)
        other.restore(*table.records())
        ops.table_set_clock(other.handle, ops.table_clock(table.handle))
        other.lookup([[[3]]])
        at(1005)
        other.lookup([[[1]]])
        assert sorted(ids_of(other)) == [1, 2, 3]
        at(1006)
        other.lookup([[[1]]])
        assert ids_of(other) == [1]


def test_a_clock_that_is_set_back_removes_nothing_early(at):
    with new_table(**minutes(2)) as table:
        for minute in (50, 10, 51, 53):
            at(minute)
            table.lookup([[[minute]]])
        assert sorted(ids_of(table)) == [51, 53]  # the lookup at 10 counts for 50
        at(54)
        table.lookup([[[9]]])
        assert sorted(ids_of(table)) == [9, 53]


def test_a_plan_leaves_out_groups():
    model, _ = make_model(limits=fr.Limits(ttl_minutes=5))
    assert {one.groups for one in choice._topologies(model, fr.Cluster(4, 1e9), choice.TOLERATED)} == {1}


def test_replicas_and_gpus_are_refused():
    table = fr.TableConfig("t", 2, fr.optimizers.SGD(0.1), limits=fr.Limits(ttl_minutes=5))
    assert "must be 0 on a GPU" in ops.check_tables([table.record()], "device")
    with pytest.raises(ValueError, match="limits.ttl_minutes of table 't' is 5 .* Use limits.ttl, or Topology"):
        fr.FusedEmbedding([fr.FeatureConfig("t", "t")], [table], topology=fr.Topology(2))
