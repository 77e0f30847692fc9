"""All ranks start from rank 0's weights without a call: under fit and in loops, for every kind of model and optimizer.
The oracle is one process that trains on all ranks' samples, with the weights that rank 0 draws.
"""

import functools
import logging
import operator

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.layers import layer_of
from tests.support.logs import logged
from tests.support.ranks import error_of, run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY
from tf_fusedrec.exchange import collectives, model_state
from tf_fusedrec.exchange.dense_gradients import averaging

pytestmark = pytest.mark.both

STEPS, SAMPLES = 4, 12


def batches():
    """Yields the global batches, in one order."""
    random = np.random.default_rng(5)
    ids = random.integers(0, 9, (STEPS, SAMPLES, 2))
    return ids, random.normal(size=(STEPS, SAMPLES, 1)).astype(np.float32)


def make_embedding(name):
    return layer_of(fr.TableConfig("f", 4, fr.optimizers.Adagrad(0.1)), combiner="sum", name=name)


def functional(kind):
    """Returns a model with a frozen layer of random weights."""
    inputs = {"f": keras.Input([2], dtype="int64", name="f")}
    hidden = keras.layers.Dense(3, "tanh", trainable=False)(make_embedding("functional")(inputs)["f"])
    return kind(inputs, keras.layers.Dense(1)(hidden))


def subclassed(kind):
    """Weights appear in the first step."""

    class Clicks(kind):
        def __init__(self):
            super().__init__()
            self.embedding, self.dense = make_embedding("subclassed"), keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(self.embedding(inputs)["f"])

    return Clicks()


def looped(model, optimizer, data, minimize):
    """Trains in a traced loop. `minimize` sees weights of frozen layers on the tape."""

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        weights = model.trainable_variables
        if minimize:
            optimizer.minimize(loss, weights, tape=tape)
        else:
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    for x, y in data:
        step(x, y)


def resumed(folder, data):
    """Returns dense weights of a continued model, and of one resumed from its checkpoint. Each rank drew different
    weights.
    """

    def made():
        model = functional(keras.Model)
        model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.05)), "mse")
        return model

    model = made()
    model.fit(data.take(2), verbose=0)
    fr.checkpoint.save(folder, model, model.optimizer)
    other = made()
    fr.checkpoint.load(folder, other, other.optimizer)
    for one in (model, other):
        one.fit(data.take(1), verbose=0)
    return [weight.numpy() for weight in model.weights], [weight.numpy() for weight in other.weights]


def trained(folder):
    """Body: returns dense weights by case, after STEPS steps on this rank's samples."""
    rank, size = fr.rank(), fr.size()
    keras.utils.set_random_seed(7 + rank)  # as for dropout
    ids, labels = (of[:, rank::size] for of in batches())
    data = tf.data.Dataset.from_tensor_slices(({"f": ids}, labels))
    found, pipelined = {}, fr.schedules.PipelinedModel
    with logged("exchange.model_state", logging.INFO) as said:
        for case, make, kind in (
            ("functional", functional, keras.Model),
            ("subclassed", subclassed, keras.Model),
            ("pipelined", functional, pipelined),
            ("pipelined, subclassed", subclassed, pipelined),
            *([("loop, minimize", functional, keras.Model)] if KERAS_IS_LEGACY else []),
            ("loop", subclassed, keras.Model),
        ):
            model, optimizer = make(kind), fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.05))
            if case.startswith("loop"):
                looped(model, optimizer, data, minimize="minimize" in case)
            else:
                model.compile(optimizer, "mse")
                model.fit(data, verbose=0)
            assert int(optimizer.iterations) == STEPS
            found[case] = [weight.numpy() for weight in model.weights if weight.shape.rank]
    if size == 1:
        return found
    return found, said, resumed(folder, data), refusals(data)


def refusals(data):
    """Body: returns the refusals of models that differ in the middle of training."""
    rank, said = fr.rank(), {}
    plain = functional(keras.Model)
    plain.compile(keras.optimizers.Adam(0.05), "mse")
    model = functional(fr.schedules.PipelinedModel)
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.05)), "mse")
    model.fit(data.take(1), verbose=0)

    def change_bias():
        model.optimizer.iterations.assign(1)
        model.layers[-1].bias.assign([rank])

    for name, change, fitted in (
        ("loaded on one rank", lambda: model.optimizer.iterations.assign(1 + 5 * (rank == 0)), model),
        ("changed on one rank", change_bias, model),
        ("not distributed", lambda: None, plain),  # the last one: it ends in the middle of a step
    ):
        change()
        said[name] = error_of(fitted.fit, data, verbose=0)
    return said


@pytest.fixture(scope="module")
def alone():
    return run_ranks(trained, 1, folder=None)[0]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return run_ranks(trained, 2, folder=str(tmp_path_factory.mktemp("checkpoint") / "c"))


def test_ranks_end_with_one_model(on_two):
    (first, *_), (second, *_) = on_two
    for case, weights in first.items():
        assert weights
        for ours, theirs in zip(weights, second[case]):
            np.testing.assert_array_equal(ours, theirs, err_msg=case)


def test_rank_0_says_which_ranks_began_with_other_weights(on_two):
    (_, said, *_), (_, of_other, *_) = on_two
    assert len(said) == len(on_two[0][0]) and not of_other
    assert all("has other values on rank 0 than on ranks [1]; all ranks have rank 0's" in words for words in said)


def test_it_is_that_of_one_process(alone, on_two):
    for case, weights in on_two[0][0].items():
        for ours, theirs in zip(weights, alone[case]):
            # Four steps sum 12 float32 samples in another order, and Adam divides small gradients by their size.
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6, err_msg=case)


def test_a_checkpoint_is_gone_on_from_as_it_is(on_two):
    for *_, (went_on, began_again), _ in on_two:
        for ours, theirs in zip(began_again, went_on):
            # The gradients of a row come in another order where rows lie elsewhere.
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_models_that_differ_in_the_middle_are_refused_by_name(on_two):
    for *_, said in on_two:
        assert "Dense weight functional/anchor has left 0 on rank" in said["not distributed"]
        assert "Use model.compile(fr.collectives.distributed_optimizer" in said["not distributed"]
        assert "RuntimeError: Ranks do not have the same model" in said["loaded on one rank"]
        assert "after [6, 1] steps" in said["loaded on one rank"] and "iteration:0'" in said["loaded on one rank"]
        assert "/bias:0' has other values on rank 0 than on ranks [1]" in said["changed on one rank"]


def test_differences_are_named():
    one = [model_state.Digest("a", "(2,) float32", 1), model_state.Digest("b", "() int64", 2)]
    other = [one[0], one[1]._replace(content=3)]
    assert model_state.difference([one, one]) is None
    assert "'b' has other values on rank 0 than on ranks [2]" in model_state.difference([one, one, other])
    assert "rank 1 has 1 dense weights and slots, rank 0 has 2" in model_state.difference([one, one[:1]])
    other = [one[0]._replace(form="(3,) float32"), one[1]]
    assert "'a' is (2,) float32 on rank 0, 'a' is (3,) float32 on rank 1" in model_state.difference([one, other])
    values = [one[0]._replace(content=5), one[1]]
    for steps in ([0, 0], [3, 3]):
        assert model_state.difference_at_start(steps, [one, one]) is None
    assert "'a' has other values" in model_state.difference_at_start([0, 0], [one, values])
    for steps, second in (([0, 2], values), ([0, 0], other)):
        with pytest.raises(RuntimeError, match=rf"after \[0, {steps[1]}\] steps of the optimizer by rank: .*'a'"):
            model_state.difference_at_start(steps, [one, second])


@pytest.mark.parametrize("kind", ["Adam", "legacy.Adam"])
def test_every_order_of_wrappers_averages_once(kind, monkeypatch):
    from horovod.tensorflow import keras as horovod

    averaged, ours = [], averaging
    scaled = functools.partial(keras.mixed_precision.LossScaleOptimizer, initial_scale=8.0)
    monkeypatch.setattr(collectives, "average", lambda gradient: averaged.append(1) or gradient)

    for wrap in (
        ours,
        lambda one: ours(ours(one)),
        lambda one: ours(scaled(one)),
        lambda one: scaled(ours(one)),
        lambda one: ours(scaled(ours(one))),
    ):
        optimizer, weight = wrap(operator.attrgetter(kind)(keras.optimizers)(0.25)), tf.Variable(1.0)
        optimizer.apply_gradients([(tf.constant(2.0), weight)])
        assert averaged == [1] and float(weight) == pytest.approx(0.75, abs=1e-5)  # Adam's epsilon
        assert float(getattr(optimizer, "loss_scale", 8.0)) == 8.0
        averaged.clear()
    for wrap in (
        lambda one: ours(horovod.DistributedOptimizer(one)),
        lambda one: horovod.DistributedOptimizer(ours(one)),
        lambda one: ours(scaled(horovod.DistributedOptimizer(one))),
    ):
        with pytest.raises(ValueError, match="averaged twice. Use distributed_optimizer only"):
            wrap(operator.attrgetter(kind)(keras.optimizers)(0.25))
