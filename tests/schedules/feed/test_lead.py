"""DualBuffer and Nested with a lead of several batches equal Sync and FrozenWindow bit for bit."""

import pytest

from tests.schedules import clicks
from tests.schedules.feed.test_dual_buffer import assert_same, fitted, states_with_removals
from tests.schedules.feed.test_feed import dataset, unknown
from tests.support.graphs import ancestors
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, registry

PAIRS = {
    "dual_buffer, 2": (DualBuffer(lead=2), "sync"),
    "dual_buffer, 4": (DualBuffer(lead=4), "sync"),
    "nested, 3": (Nested(4, lead=3), FrozenWindow(4)),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


@pytest.mark.slow
def test_fits_are_those_of_the_reference(pair):
    """Covers evictions, expiry, admission, evaluation between epochs, fewer batches than the lead, and a short last
    batch.
    """
    table = {"max_rows": 60, "eviction": "lru", "ttl": 16, "admission_count": 2}
    fits = [
        (unknown(dataset(40)), {"epochs": 2, "validation_data": dataset(seed=2)}),
        (dataset(14, seed=3), {"epochs": 2}),
    ]
    (got, history, clock), (wanted, of_reference, clock_of_reference) = (
        fitted(pair, schedule, fits, table=table) for schedule in pair
    )
    for one, other in zip(got, wanted):
        assert_same(one, other)
    assert history == of_reference and clock == clock_of_reference


@pytest.mark.slow
def test_rows_that_leave_while_batches_wait_are_searched_again(pair):
    assert_same(*states_with_removals(pair))


@pytest.mark.parametrize("lead", [1, 2])
def test_the_look_ahead_waits_for_ids_of_its_own_step_with_lead_1_alone(lead):
    model = clicks.make_model(clicks.make_embedding(), DualBuffer(lead))
    feed, batches = model.make_train_function(), iter(dataset(24))
    feed(batches)
    ops = feed._step.get_concrete_function(batches).graph.get_operations()
    (look_ahead,) = [op for op in ops if op.type == "Fusedrec>TableLookAhead"]
    unique = {op for op in ops if op.type == "Fusedrec>SegmentUnique"}
    assert unique and bool(unique & ancestors(look_ahead)) == (lead == 1)


@pytest.mark.parametrize("lead", [0, 5, 2.0, True, None, "2"])
def test_bad_leads_are_refused(lead):
    for make in (lambda: DualBuffer(lead=lead), lambda: Nested(2, lead=lead)):
        with pytest.raises(ValueError, match="lead is .*must be an int from 1 to 4"):
            make()


def test_leads_are_part_of_a_saved_schedule():
    for schedule in (DualBuffer(lead=3), Nested(2, lead=2), DualBuffer()):
        assert registry.deserialize(registry.serialize(schedule)) == schedule
    assert registry.deserialize({"name": "dual_buffer", "config": {}}) == DualBuffer(lead=1)
