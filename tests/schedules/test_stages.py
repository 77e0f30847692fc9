"""A plan runs what the ids depend on, and nothing else. Training calls that differ from it are refused."""

import re

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY
from tf_fusedrec.schedules import DualBuffer, EmbeddingCall, FrozenWindow, PipelinedModel


class Clicks(PipelinedModel):
    """Looks up all features `calls` times, and plans the lookups that `planned` returns for the inputs."""

    def __init__(self, planned, calls=1):
        super().__init__(schedule=FrozenWindow(1))
        tables = [fr.TableConfig(name, 4, fr.optimizers.SGD(0.1)) for name in ("item", "user")]
        self.embedding = fr.FusedEmbedding([fr.FeatureConfig(table.name, table.name) for table in tables], tables)
        self.planned, self.calls = planned, calls

    def call(self, x):
        return tf.add_n([tf.add_n([*self.embedding(x).values()]) for _ in range(self.calls)])

    def embedding_inputs(self, x):
        return [EmbeddingCall(self.embedding, inputs) for inputs in self.planned(x)]


def train(planned, calls=1):
    model = Clicks(planned, calls)
    hooks = model.embedding.internals.hooks
    model.compile("sgd", "mse", run_eagerly=True)
    x = {"item": tf.constant([1, 2], tf.int64), "user": tf.constant([3, 4], tf.int64)}
    try:
        model.train_on_batch(x, tf.zeros([2, 4]))
    finally:
        assert model.embedding.internals.hooks is hooks


def twice_as_many_ids(x):
    return [{name: tf.repeat(ids, 2) for name, ids in x.items()}]


def other_ids(x):
    return [{name: ids + 1 for name, ids in x.items()}]


@pytest.mark.parametrize("calls", [1, 2])
def test_planned_calls_take_the_rows_that_were_found_ahead(calls):
    train(lambda x: [x] * calls, calls)


@pytest.mark.parametrize(
    "planned, calls, error, message",
    [
        (lambda x: [x, x], 1, ValueError, "1 lookups of 'fused_embedding' were made ahead and never came"),
        (lambda x: [x], 2, ValueError, "more often in a training step, than was looked up ahead"),
        (other_ids, 1, tf.errors.InvalidArgumentError, "called with other ids in a training step than"),
        (twice_as_many_ids, 1, tf.errors.InvalidArgumentError, "called with other ids in a training step than"),
    ],
)
def test_other_calls_are_refused(planned, calls, error, message):
    with pytest.raises(error, match=message):
        train(planned, calls)


class Prefixed(PipelinedModel):
    """Looks up the ids that `before`, a function of the model, its inputs and `training`, returns."""

    def __init__(self, schedule, before):
        super().__init__(schedule=schedule)
        keras.utils.set_random_seed(1)  # of the initial weights, which Keras 3 draws here and tf_keras in `trained`
        table = fr.TableConfig("item", 4, fr.optimizers.Adam(0.1))
        self.embedding = fr.FusedEmbedding([fr.FeatureConfig("item", "item")], [table])
        self.before, self.out = before, keras.layers.Dense(1)
        self.norm, self.dense = keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(5)
        self.words = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
        pairs = tf.lookup.KeyValueTensorInitializer(tf.range(3, dtype=tf.int64), [7, 5, 6], value_dtype=tf.int64)
        self.table = tf.lookup.StaticHashTable(pairs, 0)
        self.number = tf.Variable(3, trainable=False, dtype=tf.int64, name="number")
        self.calls, self.kept, self.ragged = 0, [], []

    def call(self, x, training=None):
        rows = self.embedding({"item": self.before(self, x, training)}, training=training)["item"]
        return self.out(tf.concat([rows, self.norm(x["dense"]), self.dense(x["dense"])], 1))

    def trained(self, **compiled):
        """Returns the state after three steps."""
        keras.utils.set_random_seed(1)
        self.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
        random, words = np.random.default_rng(2), np.array(list("abcd") * 3)
        x = {"item": np.arange(12) % 5, "word": words, "dense": random.normal(3, 2, [12, 2]).astype(np.float32)}
        data = tf.data.Dataset.from_tensor_slices((x, random.normal(size=12))).batch(4)
        history = self.fit(data, verbose=0).history
        dense = {f"weight {i}": weight.numpy() for i, weight in enumerate(self.weights)}
        return {**clicks.records(self.embedding), **dense, **history}


def effects(model, x, training):
    normed = model.norm(x["dense"], training=training)
    model.number.assign_add(1)
    model.calls += 1
    model.kept.append(normed)
    model.ragged.append(tf.RaggedTensor.from_tensor(normed))
    model.masked = normed > 0
    model.add_loss(tf.reduce_mean(normed**2))
    if KERAS_IS_LEGACY:
        model.add_metric(tf.reduce_mean(normed), name="normed")
    with tf.control_dependencies([model.number.assign_add(10)]):
        return tf.identity(x["item"])


@pytest.mark.slow
@pytest.mark.both
@pytest.mark.parametrize("schedule, eager", [(DualBuffer(), False), (DualBuffer(), True), (FrozenWindow(1), False)])
def test_effects_before_a_lookup_come_once_a_step(schedule, eager):
    model, reference = Prefixed(schedule, effects), Prefixed("sync", effects)
    got, wanted = model.trained(run_eagerly=eager), reference.trained(run_eagerly=eager)
    assert int(model.number) == 3 + 3 * 11 and got["normed" if KERAS_IS_LEGACY else "loss"]
    for what in wanted:
        np.testing.assert_allclose(got[what], wanted[what], rtol=1e-6, err_msg=what)
    if KERAS_IS_LEGACY:  # Keras 3 calls a model for its shapes as well
        counts = [(one.calls, len(one.kept), len(one.ragged)) for one in (model, reference)]
        assert counts[0] == counts[1]


def repeatable(model, x, training):
    ids = tf.map_fn(lambda one: 2 * one, x["item"] + model.table.lookup(x["item"]) + model.words(x["word"]))
    branch = tf.function(lambda: tf.cond(tf.reduce_sum(ids) > 0, lambda: model.number + 1, lambda: model.number - 1))
    return ids + branch()


@pytest.mark.slow
def test_ids_may_depend_on_loops_lookup_tables_and_constant_variables():
    got, wanted = (Prefixed(schedule, repeatable).trained() for schedule in (DualBuffer(), "sync"))
    for what in wanted:
        np.testing.assert_allclose(got[what], wanted[what], rtol=1e-6, err_msg=what)


def random(model, x, training):
    return x["item"] + tf.random.uniform(tf.shape(x["item"]), maxval=9, dtype=tf.int64)


def python(model, x, training):
    return tf.ensure_shape(tf.py_function(abs, [x["item"]], tf.int64), [None])


def assigned(model, x, training):
    with tf.control_dependencies([model.number.assign_add(1)]):
        return x["item"] + model.number.read_value()


def trained(model, x, training):
    return tf.argmax(model.dense(x["dense"]), 1)


@pytest.mark.parametrize(
    "before, schedule, cause",
    [
        (random, FrozenWindow(1), "the operation RandomUniformInt (prefixed"),
        (python, FrozenWindow(1), "the operation EagerPyFunc (prefixed"),
        pytest.param(  # Keras 3 knows no name of a tf.Variable
            assigned, FrozenWindow(1), "'number:0', which the model assigns", marks=pytest.mark.legacy
        ),
        (trained, DualBuffer(), "kernel:0', which the model trains"),
    ],
)
def test_ids_that_another_run_may_change_are_refused_by_name(before, schedule, cause):
    model = Prefixed(schedule, before)
    with pytest.raises(ValueError, match=f"computes the ids of 'fused_embedding' before.*{re.escape(cause)}.*Use "):
        model.trained()


def test_a_random_layer_before_the_lookup_of_a_functional_model_is_refused_by_name():
    ids = keras.Input([], dtype=tf.int64)

    class Noise(keras.layers.Layer):
        def call(self, ids):
            return ids + tf.random.uniform(tf.shape(ids), maxval=9, dtype=tf.int64)

    noise = Noise(name="noise")
    embedding = fr.FusedEmbedding([fr.FeatureConfig("f", "t")], [fr.TableConfig("t", 4, fr.optimizers.SGD(0.1))])
    outputs = keras.layers.Dense(1)(embedding({"f": noise(ids)})["f"])
    model = PipelinedModel(ids, outputs, schedule=FrozenWindow(1))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"depend on the operation RandomUniformInt \(\w+/noise\w*/random_uniform\)"):
        model.train_on_batch(np.arange(4), np.zeros(4))
