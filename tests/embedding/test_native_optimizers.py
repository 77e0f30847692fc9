"""Rows of a native table train by the rule's formula and as in Keras, over 50 steps.

Gradients are given, so that they do not feed rounding back. Untouched rows keep their slots: the oracle skips them, and
Keras trains one variable for each row of the step.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.optimizers import CASES, OF_EACH_RULE, OptimizerOracle
from tests.support.layers import layer_of, train
from tf_fusedrec import keras, optimizers, tf

legacy, new = keras.optimizers.legacy, keras.optimizers
STEPS, IDS, BATCH, DIM = 50, 8, 12, 19  # 19 columns: sums over a row have a whole block of 16 and a rest
RATE, START = 0.1, 0.25  # START: a number that 16 bits hold


# Keras optimizers, as functions of the learning rate.
KERAS = {
    "sgd": new.SGD,
    "legacy.sgd": legacy.SGD,
    "momentum": lambda rate: new.SGD(rate, momentum=0.9),
    "legacy.momentum": lambda rate: legacy.SGD(rate, momentum=0.9),
    "nesterov": lambda rate: new.SGD(rate, momentum=0.9, nesterov=True),
    "legacy.nesterov": lambda rate: legacy.SGD(rate, momentum=0.9, nesterov=True),
    "legacy.adagrad": lambda rate: legacy.Adagrad(rate, initial_accumulator_value=0.25, epsilon=0.05),
    "legacy.adagrad.defaults": legacy.Adagrad,
    "adagrad.inside": lambda rate: new.Adagrad(rate, epsilon=0.05),
    "legacy.rmsprop": legacy.RMSprop,
    "rmsprop.inside": lambda rate: new.RMSprop(rate, 0.8, epsilon=0.05),
    "adam": new.Adam,
    "legacy.adam": legacy.Adam,
    "adam.options": lambda rate: new.Adam(rate, 0.8, 0.99, 0.05),
    "legacy.adam.options": lambda rate: legacy.Adam(rate, 0.8, 0.99, 0.05),
    "adamw": lambda rate: new.AdamW(rate, weight_decay=0.1),
    "adam.decay": lambda rate: new.Adam(rate, weight_decay=0.1),
    "ftrl": new.Ftrl,
    "legacy.ftrl": legacy.Ftrl,
    "ftrl.options": lambda rate: new.Ftrl(rate, -0.5, 0.25, 0.5, 0.1, 0.2, 0.3),
    "legacy.ftrl.options": lambda rate: legacy.Ftrl(
        rate, -0.5, 0.25, 0.5, 0.1, l2_shrinkage_regularization_strength=0.2, beta=0.3
    ),
    "ftrl.power": lambda rate: new.Ftrl(rate, -0.7, l1_regularization_strength=0.1),
    "legacy.ftrl.power": lambda rate: legacy.Ftrl(rate, -0.7, l1_regularization_strength=0.1),
}
WITH_A_RATE = ("legacy.momentum", "legacy.adam", "adam.decay", "legacy.ftrl")  # the others have a schedule


def schedule():
    return keras.optimizers.schedules.InverseTimeDecay(0.2, 10, 1.0)


class Trained:
    """A layer of one table, which trains rows with given gradients."""

    def __init__(self, optimizer, name, start=START, **table):
        config = fr.TableConfig("t", DIM, optimizer, initializer=fr.Constant(start), **table)
        self.emb = layer_of(config, name=f"native_optimizers.{name}")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM])])
    def step(self, ids, grads):
        train(self.emb, {"t": ids}, lambda rows: tf.reduce_sum(rows * grads))

    def rows(self):
        return dict(zip(*self.emb.export_table("t")))


def batches():
    """Returns STEPS pairs of ids [BATCH] and gradients. Many ids repeat, and some of IDS never come."""
    rng = np.random.default_rng(11)
    for _ in range(STEPS):
        seen = rng.choice(IDS, size=rng.integers(1, IDS), replace=False) - 3  # negative ids are ids too
        scale = np.exp(rng.normal(size=[BATCH, 1]))
        yield rng.choice(seen, BATCH), (rng.normal(size=[BATCH, DIM]) * scale).astype(np.float32)


def assert_equal_rows(ours, wanted, factor=1):
    """Every step rounds the row by at most 2^-24 of it. Rounding of the step itself is smaller, and signs differ."""
    assert ours.keys() == wanted.keys() and len(ours) == IDS
    largest = max(np.abs(row).max() for row in wanted.values())
    for id_, row in wanted.items():
        np.testing.assert_allclose(ours[id_], row, rtol=0, atol=factor * STEPS * 2.0**-24 * largest)


def trained_rows(optimizer, name, **table):
    trained = Trained(optimizer, name, **table)
    for ids, grads in batches():
        trained.step(ids, grads)
    return trained.rows()


@pytest.mark.parametrize("clipnorm", [0.0, 3.0])
@pytest.mark.parametrize("name", CASES)
def test_rows_train_as_the_formula_says(name, clipnorm):
    """With a schedule. The norm is taken of a row's summed gradient; most of these are clipped, some are not."""
    case = CASES[name]
    optimizer = getattr(optimizers, case.record)(schedule(), clipnorm=clipnorm, **case.options)
    rows = trained_rows(optimizer, f"{name}.{clipnorm}")
    oracle = OptimizerOracle(np.full(DIM, START), case.rule, clipnorm=clipnorm, **case.options)
    for step, (ids, grads) in enumerate(batches()):
        oracle.step(ids.tolist(), grads, 0.2 / (1 + step / 10))
    assert_equal_rows(rows, oracle.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERAS)
def test_rows_train_as_in_keras(name):
    """The table gets Keras' own optimizer, so the test covers its conversion too."""

    def make():
        return KERAS[name](RATE if name in WITH_A_RATE else schedule())

    optimizer = make()
    rows = [tf.Variable(tf.fill([1, DIM], START), name=f"row{id_}") for id_ in range(IDS)]
    if isinstance(optimizer, new.Optimizer):
        optimizer.build(rows)
    for ids, grads in batches():
        sums = {id_: sum(grad for other, grad in zip(ids, grads) if other == id_) for id_ in sorted(set(ids))}
        optimizer.apply_gradients([(tf.constant(grad[None]), rows[id_ + 3]) for id_, grad in sums.items()])
    keras_rows = {id_ - 3: row.numpy()[0] for id_, row in enumerate(rows)}
    # Keras rounds as often as the table. Its new Adam has early 1 - beta_2^t to five digits only.
    assert_equal_rows(trained_rows(make(), name), keras_rows, factor=4)


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OF_EACH_RULE)
def test_16_bit_rows_train_in_float32(name, storage):
    """One step from numbers that 16 bits hold ends at the float32 result, rounded once."""
    case = CASES[name]
    start = {"initial_accumulator_value": 0.25} if case.rule in ("adagrad", "ftrl") else {}
    record = getattr(optimizers, case.record)(RATE, **{**case.options, **start})
    ids, grads = next(batches())
    exact = Trained(record, f"{name}.exact")
    narrow = Trained(record, f"{name}.{storage}", storage=fr.Storage(dtype=storage))
    for trained in (exact, narrow):
        trained.step(ids, grads)
    dtype = tf.as_dtype(storage).as_numpy_dtype
    for id_, row in exact.rows().items():
        np.testing.assert_array_equal(narrow.rows()[id_], row.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("name", OF_EACH_RULE)
def test_a_row_does_not_depend_on_its_company(name):
    """A row is equal bit for bit, also clipped: alone in the batch, among others, in a group of several tables."""
    case = CASES[name]
    record = dataclasses.replace(getattr(optimizers, case.record)(RATE, **case.options), clipnorm=1.0)
    grads = np.random.default_rng(3).normal(size=[3, 5, DIM]).astype(np.float32)
    alone, among = Trained(record, f"{name}.alone"), Trained(record, f"{name}.among")
    tables = [fr.TableConfig(table, DIM, record, initializer=fr.Constant(START)) for table in ("s", "t")]
    fused = layer_of(*tables, name=f"native_optimizers.{name}.fused")
    for grad in grads:
        alone.step([7], grad[:1])
        among.step([7, 5, -1, 6, 5], grad)
        with tf.GradientTape() as tape:
            found = fused({"s": tf.constant([7, 8], tf.int64), "t": tf.constant([7], tf.int64)})
            loss = tf.reduce_sum(found["s"] * grad[3:]) + tf.reduce_sum(found["t"] * grad[:1])
        tape.gradient(loss, fused.trainable_variables)
    np.testing.assert_array_equal(alone.rows()[7], among.rows()[7])
    np.testing.assert_array_equal(alone.rows()[7], dict(zip(*fused.export_table("t")))[7])


def test_the_learning_rate_may_be_set_and_updates_are_counted():
    trained = Trained(optimizers.SGD(0.5), "set_rate")
    optimizer = trained.emb.optimizers["t"]
    ones = np.ones([1, DIM], np.float32)
    trained.step([4], ones)
    np.testing.assert_array_equal(trained.rows()[4], START - 0.5 * ones[0])
    for rate, sum_of_rates in ((0.125, 0.625), (np.float32(0.25), 0.875), (tf.Variable(1.0), 1.875)):
        optimizer.learning_rate = rate  # `step` is traced already
        trained.step([4], ones)
        np.testing.assert_array_equal(trained.rows()[4], START - sum_of_rates * ones[0])
        assert float(optimizer.learning_rate) == float(rate)
    optimizer.learning_rate.assign(0.0)
    trained.step([4], ones)
    np.testing.assert_array_equal(trained.rows()[4], START - 1.875 * ones[0])
    assert optimizer.iterations.numpy() == 5


OF_KERAS = {"new": lambda: new.SGD(0.5), "legacy": lambda: legacy.SGD(0.5),
            "legacy, of a variable": lambda: new.SGD(tf.Variable(0.5))}  # fmt: skip


@pytest.mark.parametrize(  # TFRA takes no record.
    ("backend", "kind"), [*itertools.product(["native", "tfra"], OF_KERAS), ("native", "record")]
)
def test_an_assigned_rate_counts_in_traced_functions(kind, backend):
    optimizer = OF_KERAS[kind]() if kind in OF_KERAS else optimizers.SGD(0.5)
    config = fr.TableConfig("t", 1, optimizer, initializer=fr.Constant(0.0))
    emb = layer_of(config, backend=backend)
    step = tf.function(lambda: train(emb, {"t": tf.constant([4])}))
    step()
    emb.optimizers["t"].learning_rate = 0.125
    step()
    assert emb.export_table("t")[1].item() == -0.625 and float(emb.optimizers["t"].learning_rate) == 0.125


@pytest.mark.parametrize(
    ("rate", "name", "value", "words"),
    [
        (0.5, "learning_rate", -1.0, "must be a finite number >= 0, got -1.0"),
        (0.5, "learning_rate", math.nan, "must be a finite number >= 0, got nan"),
        (0.5, "learning_rate", schedule(), "must be a number, got InverseTimeDecay. Use the schedule as"),
        (schedule(), "learning_rate", 0.1, "follows InverseTimeDecay, got 0.1. Use a number"),
        (0.5, "lr", 0.1, "lr of the optimizer of .* cannot be set, got 0.1"),
        (0.5, "epsilon", 0.1, "epsilon of the optimizer of .* cannot be set, got 0.1.*Pass another rec"),
        (0.5, "iterations", 3, "iterations of the optimizer of .* cannot be set"),
        (0.5, "rule", optimizers.SGD(0.1), "rule of the optimizer of .* cannot be set"),
    ],
)
def test_attributes_without_effect_cannot_be_set(rate, name, value, words):
    optimizer = Trained(optimizers.Adam(rate), "not_set").emb.optimizers["t"]
    with pytest.raises(ValueError if name == "learning_rate" else AttributeError, match=words):
        setattr(optimizer, name, value)
    assert float(optimizer.learning_rate) == pytest.approx(0.5 if rate == 0.5 else 0.2)


def test_ftrl_leaves_a_row_alone_where_the_rate_is_0():
    """FTRL's formula divides by the rate, and a schedule may begin with 0."""
    trained = Trained(optimizers.Ftrl(keras.optimizers.schedules.PolynomialDecay(0.0, 1, 0.1)), "ftrl_rate_0")
    ones = np.ones([1, DIM], np.float32)
    trained.step([4], ones)
    np.testing.assert_array_equal(trained.rows()[4], START * ones[0])
    trained.step([4], ones)
    assert np.isfinite(trained.rows()[4]).all() and (trained.rows()[4] != START).all()


@pytest.mark.parametrize("exponent", [-25, 25])
def test_clipping_where_float32_has_no_square(exponent):
    clipnorm = 10.0**exponent
    trained = Trained(optimizers.SGD(1.0, clipnorm=clipnorm), f"clip.{exponent}", start=0.0)
    trained.step([1], np.full([1, DIM], clipnorm, np.float32))
    # Four roundings: of the norm, the factor, the product and what float32 makes of clipnorm.
    np.testing.assert_allclose(trained.rows()[1], np.full(DIM, -clipnorm / np.sqrt(DIM)), rtol=4 * 2.0**-24)
