"""What no gradient trains is one state on all ranks: constants, moving statistics, counters, vocabularies.

NumPy computes the moving statistics of each rank and of all samples. Keras' own layer on the whole batch is the oracle
of SyncBatchNormalization. One launch for each number of processes serves all tests.
"""

import logging

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.layers import layer_of
from tests.support.ranks import error_of, run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras_api
from tf_fusedrec.exchange import collectives

pytestmark = pytest.mark.both

STEPS, MOMENTUM = 6, 0.5
ADAPTED = "mean:0" if KERAS_IS_LEGACY else "adapted/mean:0"


def batch_of(rank, step):
    """Returns numbers <float32>[4 + 8 rank, 1]. Ranks have batches of other sizes and other distributions."""
    return np.random.default_rng([rank, step]).normal(5.0 * rank, 1.0 + rank, [4 + 8 * rank, 1]).astype(np.float32)


def data_of(rank):
    def batches():
        for step in range(STEPS):
            x = batch_of(rank, step)
            yield {"f": np.arange(len(x)) + 100 * rank, "n": x}, (x > 2.5).astype(np.float32)

    spec = {"f": tf.TensorSpec([None], tf.int64), "n": tf.TensorSpec([None, 1])}
    return tf.data.Dataset.from_generator(batches, output_signature=(spec, tf.TensorSpec([None, 1])))


def make(kind, rank):
    """Returns a model with every kind of state that no gradient trains."""

    class Moving(keras.layers.Layer):
        """A moving mean and a counter, as users write them."""

        def build(self, _):
            self.mean = self.add_weight(name="mean", shape=[1], trainable=False, initializer="zeros")
            self.calls = self.add_weight(name="calls", shape=[], dtype=tf.int32, trainable=False, initializer="zeros")

        def call(self, x, training=None):
            if training:
                self.mean.assign(self.mean * MOMENTUM + tf.reduce_mean(x, 0) * (1 - MOMENTUM))
                self.calls.assign_add(1)
            return x - self.mean

    embedding = layer_of(fr.TableConfig("f", 4, fr.optimizers.SGD(0.1)))
    inputs = {"f": keras.Input([], dtype=tf.int64, name="f"), "n": keras.Input([1], name="n")}
    adapted = keras.layers.Normalization(name="adapted")
    adapted.adapt(batch_of(rank, 0))
    state = {
        "batch_norm": keras.layers.BatchNormalization(momentum=MOMENTUM, name="batch_norm"),
        "moving": Moving(name="moving"),
        "constants": keras.layers.Dense(3, name="constants", trainable=False),
        "adapted": adapted,
    }
    rows = embedding({"f": inputs["f"]})["f"]
    hidden = keras.layers.Concatenate()([rows, *(layer(inputs["n"]) for layer in state.values())])
    return kind(inputs, keras.layers.Dense(1, name="head")(hidden)), embedding


def weights(model):
    return {keras_api.variable_name(weight): weight.numpy() for weight in model.weights}


def found_on_ranks(folder):
    """Body: returns this rank's weights and predictions by case, and refusals."""
    rank, found, said = fr.rank(), {}, {}
    warned = []
    logging.getLogger("tf_fusedrec.schedules.feed").addFilter(lambda record: warned.append(record.getMessage()))
    probe = {"f": np.arange(4), "n": np.linspace(-2, 8, 4)[:, np.newaxis].astype(np.float32)}
    for case, kind in (("pipelined", fr.schedules.PipelinedModel), ("plain", keras.Model)):
        keras.utils.set_random_seed(rank)
        # A plain model does not read what Normalization has adapted, so a difference is refused below.
        model, _ = make(kind, 0 if kind is keras.Model else rank)
        model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.0)), "mse")
        model.fit(data_of(rank), verbose=0)
        if kind is keras.Model:
            fr.checkpoint.save(f"{folder}/{case}", model, model.optimizer)
        found[case] = weights(model), model.predict(tf.data.Dataset.from_tensors(probe), verbose=0)
    assert not warned, warned
    model.get_layer("adapted").adapt(batch_of(rank, 0))
    said["constants at a save"] = error_of(fr.checkpoint.save, f"{folder}/refused", model, model.optimizer)
    said["constants at an export"] = error_of(fr.export, model, f"{folder}/exported")

    for case, kind in (("frozen, pipelined", fr.schedules.PipelinedModel), ("frozen, plain", keras.Model)):
        keras.utils.set_random_seed(0)
        model, embedding = make(kind, 0)
        embedding.trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mse")
        said[case] = error_of(model.fit, data_of(rank), verbose=0)
        said[case + ", exported"] = error_of(fr.export, model, f"{folder}/frozen")

    equal = fr.schedules.PipelinedModel(*[keras.Input([1])] * 2)
    equal.compile(fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.1)), "mse")
    equal.fit(tf.data.Dataset.from_tensors((np.ones([3, 1], "f"), np.ones([3, 1], "f"))), verbose=0)
    text = keras.Input([1], dtype=tf.string)
    lookup = keras.layers.StringLookup(vocabulary=[f"word {rank}"], output_mode="multi_hot", name="lookup")
    words = fr.schedules.PipelinedModel(text, keras.layers.Dense(1)(lookup(text)))
    words.compile(fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.1)), "mse")
    said["vocabulary"] = error_of(words.fit, tf.data.Dataset.from_tensors(([["a"]], [[1.0]])), verbose=0)
    return found, said, warned


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return run_ranks(found_on_ranks, 2, folder=str(tmp_path_factory.mktemp("one_state")))


def moving(rank, of_batch, start):
    for step in range(STEPS):
        start = start * MOMENTUM + of_batch(batch_of(rank, step)) * (1 - MOMENTUM)
    return start


def test_ranks_hold_one_state_and_predict_alike(on_two):
    (first, *_), (second, *_) = on_two
    for case, (one, predicted) in first.items():
        other, predicted_there = second[case]
        assert len(one) >= 10
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=f"{case} {name}")
        np.testing.assert_array_equal(predicted, predicted_there)


@pytest.mark.parametrize("case, shares", [("pipelined", (0.25, 0.75)), ("plain", (0.5, 0.5))])
def test_moving_statistics_are_those_of_all_samples(on_two, case, shares):
    state, _ = on_two[0][0][case]
    means, variances = (
        [moving(rank, of_batch, start) for rank in range(2)] for of_batch, start in ((np.mean, 0.0), (np.var, 1.0))
    )
    mean = np.dot(shares, means)
    variance = np.dot(shares, variances) + np.dot(shares, np.square(means - mean))
    names = {"batch_norm/moving_mean": mean, "moving/mean": mean, "batch_norm/moving_variance": variance}
    for name, expected in names.items():
        np.testing.assert_allclose(state[f"{name}:0"], expected, rtol=1e-5)  # float32 against float64
    if case == "pipelined":  # Keras counts a step more, in which the data has ended
        assert state["moving/calls:0"] == STEPS


def test_constants_are_those_of_rank_0(on_two):
    state, _ = on_two[0][0]["pipelined"]
    np.testing.assert_allclose(state[ADAPTED], batch_of(0, 0).mean(), rtol=1e-5)


def test_what_differs_is_refused_by_name(on_two):
    for _, said, _ in on_two:
        for name in ("constants at a save", "constants at an export"):
            assert f"dense weight '{ADAPTED}' (and " in said[name]
        first_step = "Ranks have different models after step 1: dense weight 'batch_norm/gamma:0'"
        assert first_step in said["frozen, pipelined"]
        for name in ("frozen, pipelined, exported", "frozen, plain, exported"):
            assert "Ranks have different models at the export: dense weight 'batch_norm/gamma:0'" in said[name]
        assert "'lookup' is a vocabulary of 2 (" in said["vocabulary"]


def test_equal_data_on_all_ranks_is_told_once(on_two):
    warned, of_other = (of[2] for of in on_two)
    assert len(warned) == 1 and not of_other
    assert "ranks [0, 1] begin with equal batches" in warned[0] and "shard(fr.size()" in warned[0]


PLAIN = {"fused": False} if KERAS_IS_LEGACY else {}  # Keras 3 has no fused form
PARTS = {1: [0, 12], 3: [0, 8, 8, 12]}  # the middle rank of three has no samples


def normalized(part):
    """Body: returns outputs, gradients of inputs and of all ranks' weights, and weights after 2 steps."""
    layer = fr.layers.SyncBatchNormalization(momentum=MOMENTUM, name="sync")
    if part is None:
        layer, part = keras.layers.BatchNormalization(momentum=MOMENTUM, name="sync", **PLAIN), slice(None)
    elif fr.size() > 1:
        part = slice(*part[fr.rank() : fr.rank() + 2])

    # As in fit, no size of a batch is known when a step is traced.
    @tf.function(input_signature=[tf.TensorSpec([None, 5, 3])] * 2 + [tf.TensorSpec([None, 5], tf.bool)])
    def step(x, y, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = layer(layer(x, training=True), training=True, mask=mask)
            loss = tf.reduce_sum((out - y) ** 2)
        gradients = tape.gradient(loss, [x, *layer.trainable_variables])
        summed = [collectives.all_reduce_sum(one, name=f"g{i}") for i, one in enumerate(gradients[1:])]
        return out, gradients[0], summed

    answers = []
    for number in range(2):
        random = np.random.default_rng(number)
        x, y = (random.normal(300.0, 2.0, [12, 5, 3]).astype(np.float32) for _ in range(2))
        mask = random.random([12, 5]) < 0.7
        if not layer.built:
            layer.build([None, 5, 3])
        answers.append(step(x[part], y[part], mask[part]))
    loaded = type(layer).from_config(layer.get_config())
    assert loaded.name == "sync"
    return [[out.numpy(), of_x.numpy(), [one.numpy() for one in summed]] for out, of_x, summed in answers], [
        weight.numpy() for weight in layer.weights
    ]


@pytest.mark.parametrize("ranks", PARTS)
def test_sync_batch_normalization_equals_the_whole_batch(ranks):
    expected, expected_weights = normalized(None)
    results = run_ranks(normalized, ranks, part=PARTS[ranks]) if ranks > 1 else [normalized(slice(None))]
    for number, (out, of_x, summed) in enumerate(expected):
        # Values about 300 have lost 9 bits before any sum; float32 has 24.
        for place, whole in enumerate((out, of_x)):
            together = np.concatenate([answers[number][place] for answers, _ in results])
            np.testing.assert_allclose(together, whole, rtol=1e-3, atol=1e-3 * np.abs(whole).max())
        for answers, _ in results:
            for one, other in zip(answers[number][2], summed):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())
    for _, own in results:
        for one, other, first in zip(own, expected_weights, results[0][1]):
            np.testing.assert_allclose(one, other, rtol=1e-4)
            np.testing.assert_array_equal(one, first)
