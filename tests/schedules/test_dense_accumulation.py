"""accumulate_steps=k of a model's tables also accumulates dense gradients: k batches train as one large batch.

Weights, slots and rows of both. test_frozen_window.py has one process.
"""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.support.ranks import run_ranks
from tf_fusedrec import collectives, keras, schedules, tf
from tf_fusedrec._tf_compat import keras_api
from tf_fusedrec.exchange import dense_gradients

K, UPDATES, SAMPLES = 3, 3, 12  # samples of all ranks in one of K small batches
KINDS = {"sync": schedules.Sync(), "nested": schedules.Nested(2)}
OPTIMIZERS = {
    "legacy": lambda: keras.optimizers.legacy.Adam(0.05, clipnorm=0.5),
    "new": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5),
}


def small_batches(rank, size):
    """This rank's K small batches of each update, a large batch after another."""
    for update in range(UPDATES):
        whole = clicks.batch(K * SAMPLES, update)
        for part in range(K):
            begin, end = (part * SAMPLES + SAMPLES * r // size for r in (rank, rank + 1))
            yield tf.nest.map_structure(lambda t, b=begin, e=end: t[b:e], whole)


def large_batches(rank, size):
    return (clicks.batch(K * SAMPLES, update) for update in range(UPDATES))


def fit(kinds, steps, batches, optimizer="new"):
    """Body: the state of each kind of model after UPDATES updates: dense weights, slots, updates, this rank's rows."""
    rank, size, found = fr.rank(), fr.size(), {}
    for kind in kinds:
        embedding = clicks.make_embedding("Adam", name=f"embedding_{kind}", accumulate_steps=steps)
        dense = collectives.distributed_optimizer(OPTIMIZERS[optimizer]())
        model = clicks.make_model(embedding, KINDS[kind], dense)
        data = tf.data.Dataset.from_generator(lambda: batches(rank, size), output_signature=clicks.SIGNATURE)
        model.fit(data, verbose=0)
        slots = [variable.numpy() for variable in keras_api.optimizer_variables(model.optimizer)]
        weights = [weight.numpy() for weight in model.trainable_weights]
        found[kind] = weights, slots, {name: embedding.export_table(name) for name in ("item", "user")}
    return found


def assert_equal(of_ranks, wanted):
    """Float32 sums of 36 samples in another order; Adam's quotients of small numbers multiply the difference."""
    weights, slots, rows = wanted
    for mine, mine_slots, _ in of_ranks:
        for got, want in zip([*mine, *mine_slots], [*weights, *slots]):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    for name, (ids, values) in rows.items():
        found, vectors = clicks.joined([table[name] for _, _, table in of_ranks])
        np.testing.assert_array_equal(found, ids)
        np.testing.assert_allclose(vectors, values, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def large():
    """One process with large batches and no accumulation."""
    return fit(["sync"], 1, large_batches)["sync"]


def test_k_batches_train_as_the_large_batch(large):
    results = run_ranks(fit, 2, kinds=list(KINDS), steps=K, batches=small_batches)
    for kind in KINDS:
        assert_equal([of_rank[kind] for of_rank in results], large)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_both_kinds_of_keras_optimizers_accumulate(kind, monkeypatch):
    wanted = fit(["sync"], 1, large_batches, kind)["sync"]
    traced = []
    train_step = schedules.Sync.train_step
    monkeypatch.setattr(schedules.Sync, "train_step", lambda *args: traced.append(args) or train_step(*args))
    assert_equal([fit(["sync"], K, small_batches, kind)["sync"]], wanted)
    assert len(traced) == 1, "a variable that the first trace makes demands a second one"


def test_weights_move_in_every_kth_step_and_rates_count_updates():
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
    optimizer = keras.optimizers.legacy.SGD(rate)
    weight = tf.Variable([8.0])
    dense_gradients.accumulate(optimizer, 2)
    dense_gradients.accumulate(optimizer, 2)  # as a second compile does
    step = tf.function(lambda g: optimizer.apply_gradients([(g, weight)]))
    moved = []
    for gradient in (1.0, 3.0, 2.0, 2.0, 5.0):
        step(tf.constant([gradient]))
        moved.append(float(weight[0]))
    assert moved == [8, 6, 6, 5, 5]  # means of two: 2 with rate 1, then 2 with rate 0.5
    dense_gradients.forget(optimizer)
    for gradient in (2.0, 4.0):
        step(tf.constant([gradient]))
    assert float(weight[0]) == 3.5  # the gradient 5 is dropped


def test_slices_and_missing_gradients():
    weight, unused = tf.Variable(tf.zeros([3, 2])), tf.Variable(1.0)
    optimizer = keras.optimizers.legacy.SGD(1.0)
    dense_gradients.accumulate(optimizer, 2)
    for row in (0, 2):
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([row]), tf.constant([3, 2]))
        optimizer.apply_gradients([(slices, weight), (None, unused)])
    np.testing.assert_array_equal(weight, [[-0.5, -0.5], [0, 0], [-0.5, -0.5]])
    assert float(unused) == 1


def test_a_plain_keras_model_gets_the_number_from_its_optimizer():
    weights = []
    for steps, size in ((1, 8), (4, 2)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(collectives.distributed_optimizer(keras.optimizers.SGD(0.1), accumulate_steps=steps), "mse")
        x = np.random.default_rng(0).normal(size=[32, 3]).astype(np.float32)
        model.fit(x, x[:, :1], batch_size=size, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    np.testing.assert_allclose(weights[1][0], weights[0][0], rtol=1e-5)


def test_what_does_not_fit_is_refused_where_the_model_is_compiled():
    for steps in (0, 1.5, True):
        with pytest.raises(ValueError, match="accumulate_steps must be an int >= 1, got"):
            collectives.distributed_optimizer(keras.optimizers.SGD(0.1), accumulate_steps=steps)
    other = collectives.distributed_optimizer(keras.optimizers.SGD(0.1), accumulate_steps=2)
    with pytest.raises(ValueError, match=r"accumulates 2 steps, and the tables of the model 1. Use distributed_opt"):
        clicks.make_model(clicks.make_embedding(), optimizer=other)
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(
        ValueError, match="accumulate_steps 2 does not work with a LossScaleOptimizer, .*mixed_bfloat16"
    ):
        clicks.make_model(clicks.make_embedding(accumulate_steps=2), optimizer=scaled)
