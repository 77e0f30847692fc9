"""With host_rows, ids of a coming batch never touch the device: a look-ahead then waits for no kernel.

There is no GPU here. A graph says on which device each of its operations must run, so a table is told that it lies on a
GPU, and the graph of a step is read. An operation without a device may run on the GPU.
"""

import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.support.ranks import run_ranks
from tf_fusedrec import tf
from tf_fusedrec.exchange.collectives import ALL_TO_ALLS
from tf_fusedrec.tables import places

M = 2
PLACES = {"host_rows": (True, True), "device": (False, False), "both": (True, False)}  # of both tables
# Look-aheads and exchanges of ids, by schedule and place. Tables on the device read nothing ahead. Ids of both places
# travel apart.
CELLS = {
    ("dual_buffer", "host_rows"): (1, 1),
    ("lead", "host_rows"): (1, 1),
    ("nested", "host_rows"): (1, 1),
    ("dual_buffer", "both"): (1, 2),
    ("nested", "both"): (1, 2),
    ("nested", "device"): (0, 1),
}


def _facts():
    """Body: returns facts of a step by schedule and place of the tables."""
    from unittest import mock

    import tf_fusedrec as fr
    from tests.support.graphs import made_from
    from tf_fusedrec import keras, tf
    from tf_fusedrec.schedules import DualBuffer, Nested
    from tf_fusedrec.tables import places

    def embedding(host_rows):
        tables = [
            fr.TableConfig(name, 4, fr.optimizers.Adagrad(0.1), tier=fr.Tier(host_rows=on_host))
            for name, on_host in zip(("item", "user"), host_rows)
        ]
        features = [
            fr.FeatureConfig("item", "item"),
            fr.FeatureConfig("past", "item", combiner="mean", padding_id=0),
            fr.FeatureConfig("user", "user"),
        ]
        with mock.patch.object(places, "on_gpu", lambda: True):
            return fr.FusedEmbedding(features, tables)

    def facts(schedule, host_rows):
        optimizer = fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01))
        model = clicks.make_model(embedding(host_rows), schedule, optimizer)
        data = tf.data.Dataset.from_tensor_slices(clicks.batch(24, 1)).batch(8)
        feed, batches = model.make_train_function(), iter(data)
        feed._start.get_concrete_function(batches)
        ops = feed._step.get_concrete_function(batches).graph.get_operations()
        look_aheads = [op for op in ops if op.type == "Fusedrec>TableLookAhead"]
        # Operations of an iterator run where it lies, in host memory.
        sources = {"Placeholder", "Const", "IteratorGetNextAsOptional", "OptionalHasValue"}
        way = {op for look_ahead in look_aheads for op in made_from(look_ahead) if op.type not in sources}
        exchanges = [op for op in ops if op.type in ALL_TO_ALLS and op.name.endswith(".ids")]
        routes = {*exchanges, *(op for op in ops if op.type == "Fusedrec>FuseIds")}

        def kinds(ops):
            return {"all-to-all" if op.type in ALL_TO_ALLS else op.type for op in ops}

        return {
            "look_aheads": len(look_aheads),
            "way": kinds(way),
            "elsewhere": sorted({op.type for op in way if "CPU" not in op.device}),
            "routed": kinds(op for op in routes if "CPU" in op.device),
            "exchanges": len(exchanges),
            "of_tables": {"CPU" in op.device for op in ops if op.type.startswith("Fusedrec>Table")},
        }

    schedules = {"dual_buffer": DualBuffer(), "lead": DualBuffer(lead=3), "nested": Nested(M)}
    if fr.size() == 1:
        return {("dual_buffer", "host_rows"): facts(DualBuffer(), PLACES["host_rows"])}
    return {(name, place): facts(schedules[name], PLACES[place]) for name, place in CELLS}


@pytest.fixture(scope="module")
def facts():
    return run_ranks(_facts, 2)[0]


def assert_ids_stay_in_host_memory(seen, schedule, ranks):
    assert seen["routed"] == {"Fusedrec>FuseIds", *(["all-to-all"] if ranks > 1 else [])}
    # With a lead, the ids that are looked up were routed in the step before.
    assert seen["way"] >= ({"QueueDequeueV2"} if schedule == "lead" else seen["routed"])
    assert seen["of_tables"] == {False}  # they run where the table is


@pytest.mark.parametrize(("schedule", "place"), CELLS)
def test_ids_of_host_rows_stay_in_host_memory(facts, schedule, place):
    seen = facts[schedule, place]
    assert (seen["look_aheads"], seen["exchanges"]) == CELLS[schedule, place] and seen["elsewhere"] == []
    if place == "host_rows":
        assert_ids_stay_in_host_memory(seen, schedule, ranks=2)


def test_ids_of_one_process_stay_in_host_memory():
    ((cell, seen),) = _facts().items()
    assert_ids_stay_in_host_memory(seen, cell[0], ranks=1)
    assert (seen["look_aheads"], seen["exchanges"]) == (1, 0) and seen["elsewhere"] == []


def test_a_call_flattens_ids_where_they_travel_and_leaves_weights_where_they_are(monkeypatch):
    """Without a schedule that plans lookups, the call's own operations are all that touch the ids."""
    monkeypatch.setattr(places, "on_gpu", lambda: True)
    tables = [
        fr.TableConfig(name, 4, fr.optimizers.Adagrad(0.1), tier=fr.Tier(host_rows=name == "host"))
        for name in ("host", "gpu")
    ]
    features = [fr.FeatureConfig(table.name, table.name, combiner="sum", padding_id=0) for table in tables]
    layer, seen = fr.FusedEmbedding(features, tables), {}

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int32), tf.TensorSpec([None, 3], tf.float32)])
    def call(ids, weights):
        inputs = {"host": ids, "gpu": ids}
        for weighted in (False, True):
            flat = layer.internals.flat_features(inputs, dict.fromkeys(inputs, weights) if weighted else None, None)
            seen.update({(name, weighted): feature for name, feature in flat.items()})

    call.get_concrete_function()
    placed = {
        (*key, part): "CPU" in getattr(feature, part).device
        for key, feature in seen.items()
        for part in ("ids", "places", "row_splits", "weights")
        if getattr(feature, part) is not None
    }
    assert len(placed) == 12
    for (table, _, part), is_on_cpu in placed.items():
        assert is_on_cpu == (table == "host" and part != "weights"), (table, part)
