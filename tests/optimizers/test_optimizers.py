"""Records of update rules, their Keras counterparts and their state. tests/embedding checks trained rows."""

import dataclasses
import json
import math

import numpy as np
import pytest

from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.optimizers.keras_counterparts import from_keras, resolve
from tf_fusedrec.optimizers.rules import from_dict

legacy, new, schedules = keras.optimizers.legacy, keras.optimizers, keras.optimizers.schedules
RECORDS = {
    "sgd": optimizers.SGD(0.5),
    "momentum": optimizers.SGD(0.5, momentum=0.9, nesterov=True, clipnorm=2.0),
    "adagrad": optimizers.Adagrad(0.5, 0.25, 1e-3, True, 2.0),
    "rmsprop": optimizers.RMSprop(0.5, 0.75, 1e-3, True, 2.0, 4.0),
    "rowwise_adagrad": optimizers.RowWiseAdagrad(0.5, 0.25, 1e-3, "torchrec", 4.0, 2.0),
    "adam": optimizers.Adam(0.5, 0.75, 0.875, 1e-3, 2.0),
    "adamw": optimizers.AdamW(0.5, 0.125, 0.75, 0.875, 1e-3, 2.0),
    "ftrl": optimizers.Ftrl(0.5, -0.75, 0.25, 1.0, 2.0, 3.0, 4.0, 5.0),
}
# Parameters by the names of custom_ops/hash_table/rules, slots of D numbers, slots of one number.
ADAM = {"clipnorm": 2, "one_minus_beta_1": 0.25, "one_minus_beta_2": 0.125, "epsilon": 1e-3}
ACCUMULATES = {"clipnorm": 2, "initial_accumulator_value": 0.25, "epsilon": 1e-3}
WANTED = {
    "sgd": ({"clipnorm": 0}, (), ()),
    "momentum": ({"clipnorm": 2, "momentum": 0.9, "nesterov": True}, ("momentum",), ()),
    "adagrad": ({**ACCUMULATES, "epsilon_inside": True, "moment_offset": 0}, ("accumulator",), ()),
    "rmsprop": ({"clipnorm": 2, "one_minus_rho": 0.25, "epsilon": 4e-3, "epsilon_inside": True}, ("v",), ()),
    "rowwise_adagrad": (
        {**ACCUMULATES, "epsilon_inside": False, "mean": True, "moment_scale": 4}, (), ("accumulator",)
    ),
    "adam": ({**ADAM, "weight_decay": 0}, ("m", "v"), ()),
    "adamw": ({**ADAM, "weight_decay": 0.125}, ("m", "v"), ()),
    "ftrl": (
        {"clipnorm": 5, "initial_accumulator_value": 0.25, "learning_rate_power": -0.75, "l1": 1, "l2": 2,
         "l2_shrinkage": 3, "beta": 4}, ("accumulator", "linear"), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RECORDS)
def test_a_record_gives_rule_parameters_and_slots(rule):
    record = RECORDS[rule]
    parameters, wide, scalar = WANTED[rule]
    assert record.rule == rule.removesuffix("w")
    assert (record.parameters, record.wide_slots, record.scalar_slots) == (parameters, wide, scalar)
    assert [*record.parameters] == [*parameters]  # the order of the op
    assert record.slot_starts == {slot: 0.25 if slot == "accumulator" else 0.0 for slot in (*wide, *scalar)}


@pytest.mark.parametrize("rule", RECORDS)
@pytest.mark.parametrize("rate", [0.5, np.float32(0.5), schedules.ExponentialDecay(0.5, 10, 0.9)])
def test_a_record_survives_json(rule, rate):
    record = dataclasses.replace(RECORDS[rule], learning_rate=rate)
    described = record.to_dict()
    again = from_dict(json.loads(json.dumps(described)))
    assert type(again) is type(record) and again.to_dict() == described
    if isinstance(rate, schedules.LearningRateSchedule):
        assert again.learning_rate.get_config() == rate.get_config()
    else:
        assert again == record
    assert "learning_rate" in described  # from_dict must not change its argument.


def test_a_description_of_nothing_is_refused():
    with pytest.raises(ValueError, match="class_name must be one of .*'SGD'.*, got 'Lion'"):
        from_dict({"class_name": "Lion", "learning_rate": 0.1})


def test_slots_pass_only_between_rules_that_read_them_alike():
    adam, rows = optimizers.Adam(0.1), optimizers.RowWiseAdagrad(0.1, variant="2d_sp")
    # Rates, clipping, decay, epsilon and its position change the meaning of no slot.
    assert adam.spec == optimizers.Adam(0.2, clipnorm=1.0, epsilon=0.1).spec == optimizers.AdamW(0.1).spec
    assert rows.spec == optimizers.RowWiseAdagrad(schedules.CosineDecay(0.1, 5), variant="hsp", moment_scale=2.0).spec
    specs = [json.dumps(record.spec) for record in (*RECORDS.values(), rows, optimizers.Ftrl(0.1))]
    # SGD, momentum, Adagrad, RMSprop, row-wise by mean and by sum, Adam = AdamW, FTRL of two powers.
    assert len(specs) == 10 and len(set(specs)) == 9


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optimizers.SGD("fast"), "SGD.learning_rate must be a finite number >= 0, or a LearningRateSchedule"),
        (lambda: optimizers.SGD(-0.1), "SGD.learning_rate must be .*, got -0.1"),
        (lambda: optimizers.SGD(math.inf), "SGD.learning_rate must be a finite number"),
        (lambda: optimizers.SGD(0.1, momentum=1.5), "SGD.momentum must be a finite number from 0 to 1, got 1.5"),
        (lambda: optimizers.SGD(0.1, clipnorm=-1), "SGD.clipnorm must be a finite number >= 0, got -1"),
        (lambda: optimizers.SGD(0.1, clipnorm=None), "SGD.clipnorm must be a finite number >= 0, got None"),
        (lambda: optimizers.Adagrad(0.1, -1.0), "Adagrad.initial_accumulator_value must be .* >= 0, got -1.0"),
        (lambda: optimizers.Adagrad(0.1, 0.0, 0.0), "Adagrad.epsilon must be a finite number > 0 .*0 / 0.*, got 0.0"),
        (lambda: optimizers.RowWiseAdagrad(0.1, variant="mean"), "variant must be one of .*2d_sp.*, got 'mean'"),
        (lambda: optimizers.RowWiseAdagrad(0.1, epsilon=0), "RowWiseAdagrad.epsilon must be a finite number > 0"),
        (lambda: optimizers.RowWiseAdagrad(0.1, moment_scale=0), "moment_scale must be a finite number > 0, got 0"),
        (lambda: optimizers.Adagrad(0.1, moment_scale=0), "Adagrad.moment_scale must be a finite number > 0, got 0"),
        (lambda: optimizers.AdamW(0.1, moment_scale=0), "AdamW.moment_scale must be a finite number > 0, got 0"),
        (lambda: optimizers.RMSprop(0.1, 1.0), "RMSprop.rho must be a finite number >= 0 and < 1, got 1.0"),
        (lambda: optimizers.RMSprop(0.1, moment_scale=0), "RMSprop.moment_scale must be a finite number > 0, got 0"),
        (lambda: optimizers.Adam(0.1, beta_1=1.0), "Adam.beta_1 must be a finite number >= 0 and < 1, got 1.0"),
        (lambda: optimizers.Adam(0.1, beta_2=-0.1), "Adam.beta_2 must be .* >= 0 and < 1, got -0.1"),
        (lambda: optimizers.Adam(0.1, epsilon=0.0), "Adam.epsilon must be a finite number > 0"),
        (lambda: optimizers.AdamW(0.1, -0.1), "AdamW.weight_decay must be a finite number >= 0, got -0.1"),
        (lambda: optimizers.Ftrl(0.1, 0.5), "Ftrl.learning_rate_power must be a finite number <= 0, got 0.5"),
        (lambda: optimizers.Ftrl(0.1, l1=math.nan), "Ftrl.l1 must be a finite number >= 0, got nan"),
        (lambda: optimizers.Ftrl(0.1, beta=-1), "Ftrl.beta must be a finite number >= 0, got -1"),
    ],
)
def test_arguments_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_epsilon_may_be_0_where_accumulators_start_above_it():
    assert optimizers.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=0.0).epsilon == 0.0


COUNTERPARTS = {
    "SGD": (lambda: new.SGD(0.5), optimizers.SGD(0.5)),
    "legacy.SGD": (lambda: legacy.SGD(0.5), optimizers.SGD(0.5)),
    "momentum": (lambda: new.SGD(0.5, 0.75, True), optimizers.SGD(0.5, 0.75, True)),
    "legacy.momentum": (lambda: legacy.SGD(0.5, 0.75, True), optimizers.SGD(0.5, 0.75, True)),
    "Adagrad": (lambda: new.Adagrad(0.5, 0.25, 0.125), optimizers.Adagrad(0.5, 0.25, 0.125, epsilon_inside=True)),
    "legacy.Adagrad": (lambda: legacy.Adagrad(0.5, 0.25, 0.125), optimizers.Adagrad(0.5, 0.25, 0.125)),
    "Adam": (lambda: new.Adam(0.5, 0.75, 0.875, 0.125), optimizers.Adam(0.5, 0.75, 0.875, 0.125)),
    "legacy.Adam": (lambda: legacy.Adam(0.5, 0.75, 0.875, 0.125), optimizers.Adam(0.5, 0.75, 0.875, 0.125)),
    "Adam.weight_decay": (lambda: new.Adam(0.5, weight_decay=0.25), optimizers.AdamW(0.5, 0.25)),
    "AdamW": (lambda: new.AdamW(0.5, 0.25, 0.75, 0.875, 0.125), optimizers.AdamW(0.5, 0.25, 0.75, 0.875, 0.125)),
    "RMSprop": (lambda: new.RMSprop(0.5, 0.75, epsilon=0.125), optimizers.RMSprop(0.5, 0.75, 0.125, True)),
    "legacy.RMSprop": (lambda: legacy.RMSprop(0.5, 0.75, epsilon=0.125), optimizers.RMSprop(0.5, 0.75, 0.125)),
    "Ftrl": (
        lambda: new.Ftrl(0.5, -0.75, 0.25, 0.125, 1.0, 2.0, 3.0),
        optimizers.Ftrl(0.5, -0.75, 0.25, 0.125, 1.0, 2.0, 3.0),
    ),
    "legacy.Ftrl": (
        lambda: legacy.Ftrl(0.5, -0.75, 0.25, 0.125, 1.0, l2_shrinkage_regularization_strength=2.0, beta=3.0),
        optimizers.Ftrl(0.5, -0.75, 0.25, 0.125, 1.0, 2.0, 3.0),
    ),
}


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_keras_optimizers_become_their_counterparts(name):
    make, record = COUNTERPARTS[name]
    assert from_keras(make()) == resolve(make()) == record
    assert resolve(record) is record


@pytest.mark.parametrize("make", [new.Adam, legacy.Adam], ids=["new", "legacy"])
def test_a_schedule_stays_the_same_object(make):
    class Own(schedules.LearningRateSchedule):  # not registered with Keras
        def __call__(self, step):
            return 0.5 / (tf.cast(step, tf.float32) + 1.0)

        def get_config(self):
            return {}

    schedule = Own()
    assert from_keras(make(schedule)).learning_rate is schedule


@pytest.mark.parametrize("make", [new.Adam, legacy.Adam], ids=["new", "legacy"])
def test_a_keras_optimizer_in_use_converts_as_it_is_now(make):
    optimizer, variable = make(0.5, beta_1=0.75), tf.Variable([1.0])
    optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    optimizer.learning_rate = 0.25
    record = from_keras(optimizer)
    assert (record.learning_rate, record.beta_1) == (0.25, 0.75)


def excluding():
    optimizer = new.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["item"])
    return optimizer


class OwnAdam(new.Adam):
    """A subclass may change formulas, so it has no counterpart."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: new.Adam(0.1, clipnorm=1.0), r"Adam.clipnorm, got 1.0. Use tf_fusedrec.optimizers.Adam\(clipnorm"),
        (lambda: legacy.SGD(0.1, clipnorm=1.0), "SGD.clipnorm, got 1.0"),
        (lambda: new.SGD(0.1, clipvalue=1.0), "SGD.clipvalue, got 1.0"),
        (lambda: legacy.Ftrl(0.1, global_clipnorm=1.0), "Ftrl.global_clipnorm, got 1.0"),
        (lambda: new.SGD(0.1, weight_decay=0.1), "SGD.weight_decay, got 0.1. Use tf_fusedrec.optimizers.AdamW"),
        (lambda: new.Adagrad(0.1, weight_decay=0.1), "Adagrad.weight_decay, got 0.1"),
        (excluding, r"AdamW.exclude_from_weight_decay, got \['item'\]. Use tf_fusedrec.optimizers.Adam for"),
        (lambda: legacy.Adagrad(0.1, decay=0.5), "Adagrad.decay, got 0.5. Use .*InverseTimeDecay"),
        (lambda: new.Adam(0.1, amsgrad=True), "Adam.amsgrad, got True"),
        (lambda: legacy.Adam(0.1, amsgrad=True), "Adam.amsgrad, got True"),
        (lambda: new.AdamW(0.1, use_ema=True), "AdamW.use_ema, got True"),
        pytest.param(
            lambda: new.Adam(0.1, adaptive_epsilon=True), "Adam.adaptive_epsilon, got True", marks=pytest.mark.legacy
        ),
        (lambda: legacy.SGD(0.1, gradient_transformers=[abs]), "SGD.gradient_transformers, got"),
        (lambda: legacy.SGD(lambda: 0.1), "SGD.learning_rate, got <function .*Use a number or a schedule"),
        (lambda: legacy.Adam(0.1, beta_1=lambda: 0.9), "Adam.beta_1, got <function .*Use a number, or"),
        (lambda: legacy.RMSprop(0.1, centered=True), "RMSprop.centered, got True"),
        (lambda: new.RMSprop(0.1, momentum=0.5), "RMSprop.momentum, got 0.5"),
        (lambda: legacy.Adadelta(0.1), "optimizer .*adadelta.Adadelta. Use a record of .*RowWiseAdagrad"),
        (lambda: new.Lion(0.1), "optimizer .*Lion"),
        (lambda: OwnAdam(0.1), "optimizer tests.optimizers.test_optimizers.OwnAdam"),
        (lambda: tf.compat.v1.train.AdagradOptimizer(0.1), "optimizer tensorflow.*AdagradOptimizer"),
        (lambda: "adam", "optimizer builtins.str"),
    ],
)
def test_optimizers_without_a_record_are_refused_by_name(make, words):
    with pytest.raises(ValueError, match=f"Native tables have no counterpart of {words}") as error:
        resolve(make())
    assert "FusedEmbedding(backend='tfra')" in str(error.value)
