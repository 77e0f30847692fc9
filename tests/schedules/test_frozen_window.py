"""FrozenWindow on one process equals whole batches except for rounding, with Keras' features of a step."""

import contextlib
import time

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.schedules import FrozenWindow, PipelinedModel


def fit(schedule, samples=22, batch_size=8, epochs=2, embedding=None, **compiled):
    """Returns model, embedding and history of a run whose epochs end with a batch of 6 samples."""
    embedding = embedding or clicks.make_embedding()
    model = clicks.make_model(embedding, schedule, **compiled)
    data = tf.data.Dataset.from_tensor_slices(clicks.batch(samples, seed=1)).batch(batch_size)
    return model, embedding, model.fit(data, epochs=epochs, verbose=0).history


def assert_near(got, wanted):
    """Allows rounding of sums in another order, over a few steps of Adam, whose quotients multiply it."""
    for what in wanted:
        np.testing.assert_allclose(got[what], wanted[what], rtol=2e-4, atol=2e-5, err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "rule"), [(4, "Adam"), (7, "RowWiseAdagrad")])
def test_fit_equals_whole_batches(micro_batches, rule):
    """Covers sample weights, a last batch of 6 samples for 7 micro-batches, ragged input, and losses in the history."""
    wanted, wanted_rows, sync = fit("sync", embedding=clicks.make_embedding(rule))
    model, rows, history = fit(FrozenWindow(micro_batches), embedding=clicks.make_embedding(rule))
    assert_near(clicks.state(model, rows), clicks.state(wanted, wanted_rows))
    assert history.keys() == sync.keys() == {"loss", "mae"}
    for name in sync:
        np.testing.assert_allclose(history[name], sync[name], rtol=1e-5, err_msg=name)
    assert int(rows.optimizers["item"].iterations) == int(model.optimizer.iterations) == 6


@pytest.mark.slow
def test_eager_and_traced_steps_are_equal():
    eager, traced = (fit(FrozenWindow(3), run_eagerly=run_eagerly)[:2] for run_eagerly in (True, False))
    assert_near(clicks.state(*eager), clicks.state(*traced))


@pytest.mark.slow
def test_accumulation_goes_on_top():
    """Two batches of four micro-batches make one update of the tables."""
    results = [
        fit(schedule, samples=32, embedding=clicks.make_embedding(accumulate_steps=2))[:2]
        for schedule in ("sync", FrozenWindow(4))
    ]
    assert int(results[1][1].optimizers["item"].iterations) == 4
    assert_near(*(clicks.state(*result) for result in results))


@pytest.mark.slow
def test_a_table_that_is_full_evicts_no_row_of_the_window():
    """Every micro-batch brings new rows. With room for two batches, no row of the current step is evicted."""
    embedding = clicks.make_embedding(table={"limits": fr.Limits(max_rows_per_rank=16, eviction="lru")})
    model = clicks.make_model(embedding, FrozenWindow(4))
    x, y, _ = clicks.batch(8, seed=0)
    for step in range(6):
        model.train_on_batch({**x, "user": tf.range(8, dtype=tf.int64) + 8 * step}, y)
    ids = embedding.export_table("user")[0]
    assert len(ids) <= 16 and set(range(40, 48)) <= set(ids.tolist()) <= set(range(32, 48))


@pytest.mark.slow
def test_gradients_of_a_step_that_failed_are_dropped():
    """The last micro-batch fails a second after the gradients of the first have been summed."""

    def check(y):
        if (y > 99).any():
            time.sleep(1)
            raise ValueError("a wrong label")

    def loss(y, y_pred):
        with tf.control_dependencies([tf.numpy_function(check, [y], [])]):
            return tf.reduce_mean((y - y_pred) ** 2, axis=1)

    states = []
    x, y, _ = clicks.batch(8, seed=0)
    wrong = tf.concat([y[:7], [100.0]], 0)
    for labels in ([y, y], [y, wrong, y]):
        embedding = clicks.make_embedding()
        adam = keras.optimizers.legacy.Adam(0.01)  # the new ones count a step that failed
        model = clicks.make_model(embedding, FrozenWindow(4), adam, loss=loss)
        for one in labels:
            with pytest.raises(tf.errors.OpError, match="a wrong label") if one is wrong else contextlib.nullcontext():
                model.train_on_batch(x, one[:, tf.newaxis])
        states.append(clicks.state(model, embedding))
    clicks.assert_same(*states, but=("last", "count", "updated"))


class Tower(PipelinedModel):
    """A subclassed model: two inputs, losses of the call and of a regularizer, and an ordinary embedding."""

    def __init__(self, schedule):
        super().__init__(schedule=schedule)
        keras.utils.set_random_seed(5)
        self.rows = fr.FusedEmbedding(
            [fr.FeatureConfig(name="f", table="t")], [fr.TableConfig("t", 4, optimizers.Adam(0.1), fr.Uniform(-1, 1))]
        )
        self.plain = keras.layers.Embedding(9, 4)
        self.out = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
        self.seen = []

    def call(self, inputs):
        ids, plain = inputs
        self.seen.append(self.micro_batch.number)
        hidden = self.rows({"f": ids})["f"] + self.plain(plain)
        self.add_loss(tf.math.divide_no_nan(tf.reduce_sum(hidden**2), tf.cast(tf.size(ids), tf.float32)))
        return self.out(hidden)


@pytest.mark.slow
def test_added_losses_and_ordinary_embeddings():
    states, losses = [], []
    for schedule in ("sync", FrozenWindow(4)):
        model = Tower(schedule)
        model.compile(keras.optimizers.Adam(0.01), "mse")  # Keras' newer optimizers, too
        x = (np.arange(20) % 7, np.arange(20) % 5)
        losses.append(model.fit(x, np.linspace(-1, 1, 20), batch_size=8, epochs=2, shuffle=False, verbose=0).history)
        states.append([*(w.numpy() for w in model.trainable_weights), model.rows.export_table("t")[1]])
        assert set(model.seen) == ({0} if schedule == "sync" else {0, 1, 2, 3})
    for got, wanted in zip(*states):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(losses[1]["loss"], losses[0]["loss"], rtol=1e-5)


def test_more_micro_batches_than_a_batch_can_have_are_refused():
    with pytest.raises(ValueError, match="micro_batches 9 is more than the 8 samples"):
        data = tf.data.Dataset.from_tensor_slices(clicks.batch(16, seed=1)).batch(8, drop_remainder=True)
        clicks.make_model(clicks.make_embedding(), FrozenWindow(9)).fit(data, verbose=0)


def test_sums_and_missing_losses_are_refused():
    with pytest.raises(ValueError, match="has the reduction 'sum'"):
        fit(FrozenWindow(2), loss=keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(ValueError, match="No loss to compute|no loss to train with"):
        fit(FrozenWindow(2), loss=None)
