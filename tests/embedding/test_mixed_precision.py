"""Keras mixed precision under fit: HSTU blocks on a FusedEmbedding, the scaled loss of float16, and overflows."""

import contextlib

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.models.batches import ragged
from tf_fusedrec import keras, layers, tf
from tf_fusedrec._tf_compat import keras_api

pytestmark = pytest.mark.both

IDS = 30


class Clicks(fr.schedules.PipelinedModel):
    """A model of the next click: rows of a history pass two HSTU blocks."""

    def __init__(self, optimizer):
        super().__init__()
        table = fr.TableConfig("item", 16, optimizer, fr.Uniform(-0.5, 0.5))
        self.embedding = fr.FusedEmbedding([fr.FeatureConfig("item", "item")], [table], seed=3)
        self.blocks = [layers.HSTU(2, 8, 8, max_sequence_length=16, time_encoding="none") for _ in range(2)]
        self.head = keras.layers.Dense(1)
        self.logits = keras.layers.Activation("linear", dtype="float32")  # as in Keras' guide

    def call(self, x, training=None):
        rows = self.embedding({"item": x}, training=training)["item"]
        rows = rows.with_values(tf.cast(rows.values, self.compute_dtype))
        for block in self.blocks:
            rows = block(rows, training=training)
        self.seen = rows.dtype
        return self.logits(self.head(tf.math.segment_sum(rows.values, rows.value_rowids())))


@contextlib.contextmanager
def policy(name):
    keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy("float32")


def batches(rank=0, ranks=1, steps=40):
    random = np.random.default_rng(5)
    taste = random.normal(size=IDS)
    for _ in range(steps):
        lengths = random.integers(1, 12, 16)
        items = random.integers(0, IDS, lengths.sum())
        labels = np.array([taste[part].sum() > 0 for part in np.split(items, np.cumsum(lengths)[:-1])], np.float32)
        mine = slice(rank, None, ranks)
        parts = np.split(items, np.cumsum(lengths)[:-1])[mine]
        yield ragged([len(part) for part in parts], np.concatenate(parts)), labels[mine, np.newaxis]


def data(**which):
    x, y = zip(*batches(**which))
    return tf.data.Dataset.from_generator(
        lambda: zip(x, y),
        output_signature=(tf.RaggedTensorSpec([None, None], tf.int64), tf.TensorSpec([None, 1], tf.float32)),
    )


def fitted(name):
    with policy(name):
        keras.utils.set_random_seed(1)
        model = Clicks(fr.optimizers.Adagrad(0.1))
        model(next(iter(data(steps=1)))[0])
        optimizer = keras.optimizers.Adagrad(0.05)
        if name == "mixed_float16":  # Keras' default of 2^15 overflows in the first steps
            optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=2.0**8)
            model.schedule = fr.schedules.DualBuffer()  # equal to sync
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
        history = model.fit(data(), epochs=2, verbose=0).history["loss"]
    return model, history


@pytest.fixture(scope="module")
def wide():
    return fitted("float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_it_trains_as_float32_does(name, wide):
    half = tf.as_dtype(name.removeprefix("mixed_"))
    model, losses = fitted(name)
    assert model.seen == half and model.embedding.tables[0].dtype == "float32"
    if half == tf.float16:
        assert float(keras_api.loss_scale(model.optimizer)) == 2.0**8, "no step may be left out here"
    # bfloat16 has 8 bits and float16 11: each number is off by 2^-9 or 2^-12 of itself, and a loss by some such errors.
    np.testing.assert_allclose(losses, wide[1], rtol=20 * 2.0 ** (-9 if half == tf.bfloat16 else -12))
    assert losses[1] < 0.9 * losses[0]
    ids, rows = model.embedding.export_table("item")
    assert rows.dtype == np.float32 and np.array_equal(ids, wide[0].embedding.export_table("item")[0])
    # Rows of both have moved by more than ten times their difference.
    _, expected = wide[0].embedding.export_table("item")
    _, initial = untrained(ids)
    assert np.abs(rows - expected).mean() < 0.1 * np.abs(expected - initial).mean()


def untrained(ids):
    """Returns ids and their initial rows."""
    with policy("float32"):
        embedding = Clicks(fr.optimizers.Adagrad(0.1)).embedding
    embedding({"item": tf.constant(ids)}, training=True)
    return embedding.export_table("item")


def overflowing(scale):
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=scale)
    return fr.collectives.distributed_optimizer(scaled)


@pytest.mark.slow
def test_an_overflow_leaves_out_the_step_of_rows_and_weights():
    """A scale of 2^40 overflows float16. Each step halves it until it fits, and nothing trains before that."""
    optimizer = overflowing(2.0**40)
    with policy("mixed_float16"):
        model = Clicks(fr.optimizers.Adam(0.1))
        model(next(iter(data(steps=1)))[0])
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
        before = [model.embedding.export_table("item")[1], *(v.numpy() for v in model.trainable_variables)]
        model.fit(data(steps=1), epochs=3, verbose=0)
        after = [model.embedding.export_table("item")[1], *(v.numpy() for v in model.trainable_variables)]
        assert float(keras_api.loss_scale(optimizer)) == 2.0**37
        for one, other in zip(before, after):
            np.testing.assert_array_equal(one, other)
        assert int(model.embedding.optimizers["item"].iterations) == 0
        model.fit(data(steps=1), epochs=40, verbose=0)
    assert float(keras_api.loss_scale(optimizer)) < 2.0**24 and int(model.embedding.optimizers["item"].iterations) > 5
    assert np.isfinite(model.embedding.export_table("item")[1]).all()
    assert (model.embedding.export_table("item")[1] != before[0]).any()


@pytest.mark.legacy  # Keras 3 has other names for the scale
def test_where_a_scale_cannot_be_taken_off_it_is_refused():
    x, _ = next(iter(data(steps=1)))
    with policy("mixed_float16"):
        model = Clicks(fr.optimizers.SGD(0.1))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        with pytest.raises(ValueError, match="cannot train under the policy mixed_float16 here.*Use PipelinedModel"):
            tape.gradient(loss, model.trainable_variables)
        model.schedule = fr.schedules.FrozenWindow(2)
        model.compile("sgd", "mse")  # Keras puts a LossScaleOptimizer around it
        with pytest.raises(ValueError, match="wait under this schedule.*Use schedule='sync' or DualBuffer"):
            model.fit(data(steps=1), verbose=0)


@pytest.mark.legacy
def test_a_custom_loop():
    """A scaled loss inside loss_scaled_by trains equal rows to an unscaled loss."""
    x, _ = next(iter(data(steps=1)))
    rows = []
    for scale in (1.0, 1024.0):
        keras.utils.set_random_seed(1)
        model = Clicks(fr.optimizers.SGD(0.1))
        model(x)
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), dynamic=False, initial_scale=scale
        )
        with model.embedding.loss_scaled_by(optimizer), tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(model(x)))
            tape.gradient(loss, model.trainable_variables)
        rows.append(model.embedding.export_table("item")[1])
    np.testing.assert_array_equal(*rows)  # powers of two round nothing
