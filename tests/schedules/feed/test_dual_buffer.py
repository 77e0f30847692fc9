"""DualBuffer and Nested on one process equal Sync and FrozenWindow bit for bit, whatever tables do meanwhile."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.schedules.feed.test_feed import Stop, dataset, unknown
from tf_fusedrec import keras
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, PipelinedModel

# test_lead.py has more micro-batches.
PAIRS = {"dual_buffer": (DualBuffer(), "sync"), "nested": (Nested(2), FrozenWindow(2))}
TABLES = {
    "adam": ({}, "Adam"),
    "bfloat16": ({"storage_dtype": "bfloat16", "stochastic_rounding": True}, "Adam"),
    "lru": ({"max_rows": 18, "eviction": "lru", "record_tombstones": True}, "RowWiseAdagrad"),
    "ttl": ({"ttl": 16, "admission_count": 2}, "Adam"),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


def assert_same(got, wanted, but=()):
    assert got.keys() == wanted.keys()
    for what in wanted:
        if what.split()[-1] not in but:
            np.testing.assert_array_equal(got[what], wanted[what], err_msg=what)


def fitted(pair, schedule, fits, rule="Adam", table=None):
    """Returns the states after each run of fit, given by (data set, arguments), and the evaluations between epochs."""
    embedding = clicks.make_embedding(rule, table)
    model = clicks.make_model(embedding, schedule)
    states, histories = [], []
    for data, arguments in fits:
        histories.append(model.fit(data, verbose=0, **arguments).history)
        states.append(clicks.state(model, embedding))
    return states, histories, embedding.lookups[0].table.clock


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_fits_of_every_form_of_table(pair, table):
    """Makes two fits with evaluation between epochs, a last batch of 6 samples, and data of unknown length."""
    options, rule = TABLES[table]
    fits = [
        (unknown(dataset()), {"epochs": 2, "validation_data": dataset(seed=2)}),
        (dataset(40, seed=3), {"epochs": 2, "steps_per_epoch": 2}),
    ]
    (got, history, clock), (wanted, of_reference, clock_of_reference) = (
        fitted(pair, schedule, fits, rule, options) for schedule in pair
    )
    for one, other in zip(got, wanted):
        assert_same(one, other)
    assert history == of_reference and clock == clock_of_reference


@pytest.mark.slow
def test_rows_beyond_memory(pair, tmp_path):
    table = {"memory_budget": 1200, "tier_folder": str(tmp_path)}
    data = [(dataset(64, seed=5), {"epochs": 2})]
    (got, _, _), (wanted, _, _) = (fitted(pair, schedule, data, table=table) for schedule in pair)
    assert_same(got[0], wanted[0], but=["pool"])  # the place of a row may differ


class SaveAt(keras.callbacks.Callback):
    """Saves in the middle of an epoch, with a batch looked up ahead."""

    def __init__(self, folder, step):
        super().__init__()
        self.folder, self.step = folder, step

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step:
            fr.checkpoint.save(self.folder, self.model, self.model.optimizer)


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_is_that_of_the_reference_and_goes_on_alike(pair, tmp_path):
    """Counters of LRU, admission and ttl are equal too, because a look-ahead counts nothing before its turn."""
    table = {"max_rows": 60, "eviction": "lru", "ttl": 50, "admission_count": 2}
    saved = []
    for i, schedule in enumerate(pair):
        folder = tmp_path / str(i)
        embedding = clicks.make_embedding(table=table)
        model = clicks.make_model(embedding, schedule)
        model.fit(dataset(64, seed=5), verbose=0, callbacks=[SaveAt(folder, 3)])
        whole = clicks.state(model, embedding)
        rows = clicks.make_embedding(table=table)
        resumed = clicks.make_model(rows, schedule)
        resumed.train_on_batch(*clicks.batch(8, seed=9))
        fr.checkpoint.load(folder, resumed, resumed.optimizer)
        saved.append((clicks.state(resumed, rows), rows.lookups[0].table.clock))
        resumed.fit(dataset(64, seed=5).skip(4), verbose=0)
        assert_same(clicks.state(resumed, rows), whole)
    assert_same(saved[0][0], saved[1][0])
    assert saved[0][1] == saved[1][1]


@pytest.mark.slow
def test_training_that_stops_in_the_middle_leaves_nothing_behind(pair):
    states = []
    for schedule in pair:
        embedding = clicks.make_embedding(table={"ttl": 16})
        model = clicks.make_model(embedding, schedule)
        with pytest.raises(KeyboardInterrupt):
            model.fit(dataset(40), verbose=0, callbacks=[Stop()])
        states.append([clicks.state(model, embedding)])
        model.fit(dataset(), verbose=0)
        states[-1].append(clicks.state(model, embedding))
    for got, wanted in zip(*states):
        assert_same(got, wanted)


class Meddle(keras.callbacks.Callback):
    """Removes rows while a batch that needs them is looked up ahead."""

    def __init__(self, embedding):
        super().__init__()
        self.table = embedding.lookups[0].table

    def on_train_batch_end(self, batch, logs=None):
        self.table.remove("item", np.arange(6))
        self.table.evict("user", 4)


def states_with_removals(pair):
    """Returns the states after a fit of each schedule that removes rows in flight."""
    states = []
    for schedule in pair:
        embedding = clicks.make_embedding(table={"max_rows": 60, "eviction": "lru"})
        model = clicks.make_model(embedding, schedule)
        model.fit(dataset(40), verbose=0, callbacks=[Meddle(embedding)])
        states.append(clicks.state(model, embedding))
    return states


@pytest.mark.slow
def test_rows_that_leave_between_look_ahead_and_lookup_are_searched_again(pair):
    """No pin is needed: rows in flight may be evicted, and the step still equals the reference."""
    assert_same(*states_with_removals(pair))


def test_bad_input_is_refused(pair):
    ahead, _ = pair
    table = {"optimizer": keras.optimizers.legacy.Adam(0.1)}
    with pytest.raises(ValueError, match="need backend='native'"):
        clicks.make_model(clicks.make_embedding(table=table, backend="tfra"), ahead).fit(dataset(), verbose=0)
    plain = keras.Input([3])
    model = PipelinedModel(plain, keras.layers.Dense(1)(plain), schedule=ahead)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="hides the exchanges of a FusedEmbedding.*schedule='sync'"):
        model.fit(np.zeros([8, 3]), np.zeros(8), verbose=0)
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="micro_batches must be an int >= 1"):
            Nested(wrong)


def test_a_functional_model_of_one_feature_tells_its_lookup():
    """Keras unwraps a list of one output, but the one call must stay a list."""
    embedding = fr.FusedEmbedding(
        [fr.TableConfig("item", 4, fr.optimizers.SGD(0.1))], [fr.FeatureConfig("item", "item")]
    )  # fmt: skip
    item = keras.Input([], dtype="int64", name="item")
    model = fr.schedules.PipelinedModel({"item": item}, keras.layers.Dense(1)(embedding({"item": item})["item"]))
    ids = np.array([5, 7, 5])
    (call,) = model.embedding_inputs({"item": ids})
    assert call.embedding is embedding and call.weights is None
    np.testing.assert_array_equal(call.inputs["item"], ids)
