"""DualBuffer and Nested on one process equal Sync and FrozenWindow bit for bit, whatever tables do meanwhile."""

import functools

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.schedules.ahead import RouteAhead
from tests.schedules.test_feed import dataset, unknown
from tests.support.graphs import ancestors
from tf_fusedrec import keras
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested

PAIRS = {"dual_buffer": (DualBuffer(), "sync"), "nested": (Nested(2), FrozenWindow(2))}
LEADS = {
    "ids alone": (RouteAhead(), "sync"),
    "dual_buffer, 2": (DualBuffer(lead=2), "sync"),
    "dual_buffer, 4": (DualBuffer(lead=4), "sync"),
    "nested, 3": (Nested(2, lead=3), FrozenWindow(2)),
}
TABLES = {
    "adam": ({}, "Adam"),
    "bfloat16, lru": (
        {
            "storage": fr.Storage(dtype="bfloat16", stochastic_rounding=True),
            "limits": fr.Limits(max_rows_per_rank=18, eviction="lru"),
            "record_tombstones": True,
        },
        "RowWiseAdagrad",
    ),
    "counted": ({"limits": fr.Limits(max_rows_per_rank=60, eviction="lru", ttl=16, admission_count=2)}, "Adam"),
}


def stop(batch, _):
    if batch == 1:
        raise KeyboardInterrupt


@functools.cache
def fitted(schedule, table):
    """Returns the states after each fit, the evaluations between epochs, and the table's clock.

    The fits: data of unknown length with a last batch of 6 samples, more data than steps, one that is stopped in the
    middle of an epoch, fewer batches than a lead, endless data, and data that ends before its epochs. All look-aheads
    share a reference.
    """
    options, rule = TABLES[table]
    embedding = clicks.make_embedding(rule, options)
    model = clicks.make_model(embedding, schedule)
    states, histories = [], []
    for data, arguments in (
        (unknown(dataset()), {"epochs": 2, "validation_data": dataset(seed=2)}),
        (dataset(40, seed=3), {"epochs": 2, "steps_per_epoch": 2}),
        (dataset(40), {}),
        (dataset(14, seed=3), {"epochs": 2}),
        (dataset().repeat(), {"epochs": 3, "steps_per_epoch": 4}),
        (dataset(), {"epochs": 2, "steps_per_epoch": 5}),
    ):
        if arguments:
            histories.append(model.fit(data, verbose=0, **arguments).history)
        else:
            with pytest.raises(KeyboardInterrupt):
                clicks.fit(model, data, stop)
        states.append(clicks.state(model, embedding))
    return states, histories, embedding.internals.groups[0].table.clock


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "table"),
    [*[(pair, table) for pair in PAIRS for table in TABLES], *[(pair, "counted") for pair in LEADS]],
)
def test_fits_of_every_form_of_table(pair, table):
    ahead, reference = {**PAIRS, **LEADS}[pair]
    (got, history, clock), (wanted, of_reference, clock_of_reference) = fitted(ahead, table), fitted(reference, table)
    for one, other in zip(got, wanted, strict=True):
        clicks.assert_same(one, other)
    assert history == of_reference and clock == clock_of_reference


@pytest.mark.slow
def test_rows_beyond_memory(tmp_path):
    states = []
    for schedule in PAIRS["nested"]:
        embedding = clicks.make_embedding(table={"tier": fr.Tier(memory_budget_per_rank=1200, folder=str(tmp_path))})
        model = clicks.make_model(embedding, schedule)
        model.fit(dataset(64, seed=5), epochs=2, verbose=0)
        states.append(clicks.state(model, embedding))
    clicks.assert_same(*states, but=["pool"])  # the place of a row may differ


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_is_that_of_the_reference_and_goes_on_alike(tmp_path):
    """Counters of LRU, admission and ttl are equal too, because a look-ahead counts nothing before its turn.

    At the save, a batch is looked up ahead.
    """
    table = {"limits": fr.Limits(max_rows_per_rank=60, eviction="lru", ttl=50, admission_count=2)}
    saved = []
    for i, schedule in enumerate(PAIRS["nested"]):
        folder = tmp_path / str(i)
        embedding = clicks.make_embedding(table=table)
        model = clicks.make_model(embedding, schedule)

        def save(batch, _, model=model, folder=folder):
            if batch == 3:
                fr.checkpoint.save(folder, model, model.optimizer)

        clicks.fit(model, dataset(64, seed=5), save)
        whole = clicks.state(model, embedding)
        rows = clicks.make_embedding(table=table)
        resumed = clicks.make_model(rows, schedule)
        resumed.train_on_batch(*clicks.batch(8, seed=9))
        fr.checkpoint.load(folder, resumed, resumed.optimizer)
        saved.append((clicks.state(resumed, rows), rows.internals.groups[0].table.clock))
        resumed.fit(dataset(64, seed=5).skip(4), verbose=0)
        clicks.assert_same(clicks.state(resumed, rows), whole)
    clicks.assert_same(saved[0][0], saved[1][0])
    assert saved[0][1] == saved[1][1]


@functools.cache
def state_with_removals(schedule):
    """Returns the state after a fit that removes rows of a batch that is looked up ahead."""
    embedding = clicks.make_embedding(table={"limits": fr.Limits(max_rows_per_rank=60, eviction="lru")})
    model = clicks.make_model(embedding, schedule)
    table = embedding.internals.groups[0].table

    def remove(*_):
        table.remove("item", np.arange(6))
        table.evict("user", 4)

    clicks.fit(model, dataset(40), remove)
    return clicks.state(model, embedding)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*PAIRS, *LEADS])
def test_rows_that_leave_between_look_ahead_and_lookup_are_searched_again(pair):
    """No pin is needed: rows in flight may be evicted, and the step still equals the reference."""
    ahead, reference = {**PAIRS, **LEADS}[pair]
    clicks.assert_same(state_with_removals(ahead), state_with_removals(reference))


def test_a_functional_model_of_one_feature_tells_its_lookup():
    """Keras unwraps a list of one output, but the one call must stay a list."""
    embedding = fr.FusedEmbedding(
        [fr.FeatureConfig("item", "item")], [fr.TableConfig("item", 4, fr.optimizers.SGD(0.1))]
    )  # fmt: skip
    item = keras.Input([], dtype="int64", name="item")
    model = fr.schedules.PipelinedModel({"item": item}, keras.layers.Dense(1)(embedding({"item": item})["item"]))
    ids = np.array([5, 7, 5])
    (call,) = model.embedding_inputs({"item": ids})
    assert call.embedding is embedding and call.weights is None
    np.testing.assert_array_equal(call.inputs["item"], ids)


@pytest.mark.parametrize("lead", [1, 2])
def test_the_look_ahead_waits_for_ids_of_its_own_step_with_lead_1_alone(lead):
    model = clicks.make_model(clicks.make_embedding(), DualBuffer(lead))
    feed, batches = model.make_train_function(), iter(dataset(24))
    feed(batches)
    ops = feed._step.get_concrete_function(batches).graph.get_operations()
    (look_ahead,) = [op for op in ops if op.type == "Fusedrec>TableLookAhead"]
    unique = {op for op in ops if op.type == "Fusedrec>SegmentUnique"}
    assert unique and bool(unique & ancestors(look_ahead)) == (lead == 1)
