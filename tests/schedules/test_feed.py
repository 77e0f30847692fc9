"""Every batch that is read ahead trains once and in order, whatever ends when."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.schedules.ahead import RouteAhead
from tf_fusedrec import keras, tf
from tf_fusedrec.schedules import FrozenWindow, PipelinedModel
from tf_fusedrec.schedules.feed import StepState


def dataset(samples=22, batch_size=8, seed=1):
    return tf.data.Dataset.from_tensor_slices(clicks.batch(samples, seed)).batch(batch_size)


def trained(schedule, fits, **compiled):
    """Returns state and histories after some runs of fit, each given by (data set, arguments)."""
    embedding = clicks.make_embedding()
    model = clicks.make_model(embedding, schedule, **compiled)
    histories = [model.fit(data, verbose=0, **arguments).history for data, arguments in fits]
    return clicks.state(model, embedding), histories


def assert_same(fits, **compiled):
    (got, histories), (wanted, of_sync) = (trained(schedule, fits, **compiled) for schedule in (RouteAhead(), "sync"))
    clicks.assert_same(got, wanted)
    assert histories == of_sync


def unknown(data):
    return data.filter(lambda *_: True)


@pytest.mark.slow
def test_static_batch_sizes_and_eager_steps():
    data = tf.data.Dataset.from_tensor_slices(clicks.batch(22, seed=1)).batch(8, drop_remainder=True)
    assert_same([(data, {"epochs": 2})])
    assert_same([(dataset(), {})], run_eagerly=True)


@pytest.mark.slow
def test_several_steps_between_two_callbacks():
    # Executions take 2 and 1 of 3 batches, or as many of 6 as exist.
    assert_same([(dataset(), {"epochs": 2}), (dataset(), {"steps_per_epoch": 6})], steps_per_execution=2)


@pytest.mark.slow
def test_a_step_for_custom_loops():
    embedding = clicks.make_embedding()
    model = clicks.make_model(embedding, RouteAhead())
    traced_before = model.make_train_function()
    assert model.make_train_function() is traced_before
    step, batches, steps = model.make_train_function(force=True), iter(dataset(30)), 0
    assert step is not traced_before
    with pytest.raises(tf.errors.OutOfRangeError):
        while True:
            model.reset_metrics()
            assert step(batches)["loss"] > 0
            steps += 1
    assert steps == 4
    wanted, _ = trained("sync", [(dataset(30), {})])
    clicks.assert_same(clicks.state(model, embedding), wanted)


class Twin(PipelinedModel):
    """A subclassed model that calls its embedding `calls` times."""

    def __init__(self, calls, embeddings=1):
        super().__init__(schedule=RouteAhead())
        self.rows = [
            fr.FusedEmbedding(
                [fr.FeatureConfig("f", "t")], [fr.TableConfig("t", 4, fr.optimizers.SGD(0.1))], name=f"e{i}"
            )
            for i in range(embeddings)
        ]
        self.calls, self.out = calls, keras.layers.Dense(1)

    def call(self, x):
        rows = [self.rows[0]({"f": x})["f"] for _ in range(self.calls)]
        return self.out(tf.add_n([tf.zeros([tf.size(x), 4]), *rows]))


def test_lookups_that_no_schedule_can_plan_are_refused():
    x, y = np.arange(8), np.zeros(8)
    for model, words in (
        (Twin(0), "never calls its FusedEmbedding"),
        (Twin(2), "called with other features, or more often"),
        (Twin(1, embeddings=2), "has 2 FusedEmbeddings"),
    ):
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=words):
            model.fit(x, y, verbose=0)


def test_scalars_in_a_batch_are_refused():
    model = clicks.make_model(clicks.make_embedding(), RouteAhead())
    with pytest.raises(ValueError, match="first dimension counts the samples"):
        model.fit(tf.data.Dataset.from_tensor_slices(clicks.batch(8, 1)), verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", FrozenWindow(2), RouteAhead()], ids=str)
def test_a_step_that_finds_no_more_data_counts_nothing(schedule):
    embedding = clicks.make_embedding()
    # Legacy optimizers count after their updates, which wait for the data. Newer ones count at once.
    model = clicks.make_model(embedding, schedule, keras.optimizers.Adam(0.01))
    model.fit(unknown(dataset()), epochs=2, verbose=0)
    counts = [model.optimizer.iterations, *(trainer.iterations for trainer in embedding.optimizers.values())]
    assert {int(count) for count in counts} == {6}


def value(number):
    """Returns a structure whose parts are made on the host, anywhere, and outside of TensorFlow."""
    with tf.device("/CPU:0"):
        on_host = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64).with_values(tf.range(3, dtype=tf.int64) + number)
    return {"ids": on_host, "rows": tf.fill([2, 3], tf.cast(number, tf.float32)), "names": tf.constant(["a"]), "no": 7}


@pytest.fixture
def state():
    made = []

    @tf.function
    def start(number):
        made.append(StepState(value(number)))
        made[-1].put(value(number))

    start(tf.constant(1, tf.int64))
    return made[-1]


def test_a_step_takes_what_the_one_before_has_put_in(state):
    @tf.function
    def step(number):
        taken = state.take()
        state.put(value(number))
        assert taken["no"] == 7 and taken["rows"].shape == [2, 3]
        return taken["ids"], taken["rows"], taken["names"]

    for before, number in ((1, 5), (5, 9)):
        ids, rows, names = step(tf.constant(number, tf.int64))
        assert ids.to_list() == [[before, before + 1], [before + 2]] and names.numpy().tolist() == [b"a"]
        np.testing.assert_array_equal(rows, np.full([2, 3], before, np.float32))


def test_host_tensors_and_strings_wait_in_host_memory(state):
    made = []

    @tf.function
    def step():
        taken = state.take()
        made.extend((taken["ids"].values.op, taken["rows"].op, taken["names"].op))

    step.get_concrete_function()
    ids, rows, names = made
    assert "CPU" in ids.device and "CPU" in names.device and "CPU" not in rows.device
    assert {ids.type, rows.type, names.type} == {"QueueDequeueV2"}


def test_a_step_that_failed_halfway_leaves_no_state(state):
    assert state.full
    next(iter(state._queues.values())).dequeue()
    assert not state.full
    state.clear()
    state.clear()
    assert [int(queue.size()) for queue in state._queues.values()] == [0, 0]
