"""Dependencies in the traced steps of DualBuffer and Nested."""

import pytest

from tests.schedules import clicks
from tests.support.ranks import run_ranks

M = 2


def _facts():
    """Body: returns the facts for the tests below from the compiled function of fit, by schedule."""
    import tf_fusedrec as fr
    from tests.support.graphs import ancestors
    from tf_fusedrec import keras, tf
    from tf_fusedrec.schedules import DualBuffer, Nested, Sync

    found = {}
    for name, schedule in (("sync", Sync()), ("dual_buffer", DualBuffer()), ("nested", Nested(M))):
        optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.01))
        model = clicks.make_model(clicks.make_embedding(), schedule, optimizer)
        data = tf.data.Dataset.from_tensor_slices(clicks.batch(24, 1)).batch(8)
        feed, batches = model.make_train_function(), iter(data)
        feed(batches)
        ops = feed._step.get_concrete_function(batches).graph.get_operations()
        compute = {op for op in ops if op.type == "MatMul"}
        kinds = {
            "refresh": [op for op in ops if op.type == "Fusedrec>TableRefresh"],
            "look_ahead": [op for op in ops if op.type == "Fusedrec>TableLookAhead"],
            "update": [op for op in ops if op.type.startswith("Fusedrec>TableApply")],
            "unique": [op for op in ops if op.type == "Fusedrec>SegmentUnique"],
            **{
                kind: [op for op in ops if op.type == "HorovodAlltoall" and op.name.endswith(f".{kind}")]
                for kind in ("ids", "rows", "gradients")
            },
        }
        before = {op: ancestors(op) for found_ops in kinds.values() for op in found_ops}
        refreshes, updates = set(kinds["refresh"]), set(kinds["update"])
        found[name] = {
            "reduced_early": clicks.last_layer_reduced_early(ops),
            "counts": {kind: len(found_ops) for kind, found_ops in kinds.items()},
            "ahead_waits_for_refresh": [refreshes <= before[op] for op in kinds["unique"] + kinds["ids"]],
            "ahead_waits_for_compute": [bool(before[op] & compute) for op in kinds["look_ahead"] + kinds["ids"]],
            "rows_wait_for_refresh": [bool(before[op] & refreshes) for op in kinds["rows"]],
            "rows_wait_for_compute": [bool(before[op] & compute) for op in kinds["rows"]],
            "update_waits_for_look_ahead": [set(kinds["look_ahead"]) <= before[op] for op in kinds["update"]],
            "look_ahead_waits_for_update": [bool(before[op] & updates) for op in kinds["look_ahead"]],
        }
    return found


@pytest.fixture(scope="module")
def facts():
    return run_ranks(_facts, 2)[0]


@pytest.mark.parametrize("schedule", ["dual_buffer", "nested"])
def test_the_next_batch_waits_for_no_compute(facts, schedule):
    seen = facts[schedule]
    for kind in ("ids", "refresh", "look_ahead"):
        assert seen["counts"][kind] == 1, kind
    for kind in ("rows", "gradients"):
        assert seen["counts"][kind] == (M if schedule == "nested" else 1), kind
    assert not any(seen["ahead_waits_for_compute"])


@pytest.mark.parametrize("schedule", ["dual_buffer", "nested"])
def test_the_next_batch_waits_for_the_refresh_of_this_one(facts, schedule):
    """Otherwise few threads could work on the next batch's ids before the op that this batch's rows need."""
    seen = facts[schedule]["ahead_waits_for_refresh"]
    assert len(seen) > 1 and all(seen)


@pytest.mark.parametrize("schedule", ["dual_buffer", "nested"])
def test_rows_leave_when_they_are_refreshed_and_not_before(facts, schedule):
    seen = facts[schedule]
    assert all(seen["rows_wait_for_refresh"]) and not any(seen["rows_wait_for_compute"])
    # The look-ahead fills the buffer before the update, so updated rows are newer.
    assert all(seen["update_waits_for_look_ahead"]) and not any(seen["look_ahead_waits_for_update"])


def test_dense_gradients_are_averaged_as_they_become_ready(facts):
    assert [seen["reduced_early"] for seen in facts.values()] == [True] * 3
