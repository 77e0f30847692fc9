"""DLRM, DIN and DCN-V2 equal NumPy exposure by exposure; their FLOPs; rare items; empty and shortened inputs."""

import dataclasses

import numpy as np
import pytest

from tests.models.batches import ragged
from tests.models.ranking import exposure_oracle as oracle
from tf_fusedrec import keras, tf
from tf_fusedrec.models.dcn import DCN
from tf_fusedrec.models.din import DIN
from tf_fusedrec.models.dlrm import DLRM
from tf_fusedrec.models.experiment.model_config import DCNConfig, DINConfig, DLRMConfig, GRMConfig
from tf_fusedrec.models.grm import GRM

DCN_FIELDS = {**oracle.FIELDS, "cross_layers": 3, "deep_units": (7, 6)}
DCN_COLUMNS = 4 + 8 * (4 + 3)
MODELS = {
    "grm": (GRM, GRMConfig(**oracle.FIELDS, num_blocks=1, qk_dim=4, value_dim=4)),
    "dlrm": (DLRM, DLRMConfig(**oracle.FIELDS, bottom_units=(5,), top_units=(7, 6))),
    "din": (DIN, DINConfig(**oracle.FIELDS, attention_units=(5, 3), top_units=(7, 6))),
    "dcn": (DCN, DCNConfig(**DCN_FIELDS)),
    "dcn_low_rank": (DCN, DCNConfig(**DCN_FIELDS, cross_rank=5)),
}


def made(kind, **changed):
    model, config = MODELS[kind]
    return oracle.make(model, dataclasses.replace(config, **changed))


def dlrm_logits(model, exposure):
    vectors = [oracle.relu_network(exposure.dense, model.bottom), *exposure.own, *exposure.means]
    pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i + 1, len(vectors))]
    return oracle.head(model, oracle.relu_network(np.concatenate([*vectors, pairs]), model.top))


def din_weight(attention, event, candidate, since):
    """The activation unit of Zhou et al. as one network over [event, candidate, event * candidate, since]."""
    kernel, bias = attention.kernel.numpy().astype(np.float64), attention.bias.numpy()
    x = np.concatenate([event, candidate, event[: len(candidate)] * candidate, [since]])
    x = np.maximum(x @ kernel + bias, 0)
    hidden, last = map(oracle.float64, attention.others)
    return (np.maximum(x @ hidden[0] + hidden[1], 0) @ last[0] + last[1])[0]


def din_logits(model, exposure):
    interest = np.zeros(24)
    for event, since in zip(exposure.events, exposure.since):
        interest += din_weight(model.attention, event, exposure.candidate, since) * event
    x = np.concatenate([exposure.dense, *exposure.own, interest])
    return oracle.head(model, oracle.relu_network(x, model.top))


def dcn_logits(model, exposure):
    x_0 = x = np.concatenate([exposure.dense, *exposure.own, *exposure.means])
    for cross in model.crosses:
        kernel, bias = oracle.float64(cross.wide)
        if model.config.cross_rank:
            kernel = oracle.float64(cross.narrow)[0] @ kernel
        assert kernel.shape == (DCN_COLUMNS, DCN_COLUMNS)
        assert np.linalg.matrix_rank(kernel) <= (model.config.cross_rank or DCN_COLUMNS)
        x = x_0 * (x @ kernel + bias) + x
    return oracle.head(model, np.concatenate([x, oracle.relu_network(x_0, model.deep)]))


# Weights that begin too small to show, and the tolerance: float32 sums of a few dozen to a hundred terms near 1.
NO_WEIGHTS = lambda model: []  # noqa: E731
BIASES = lambda model: [cross.wide.bias for cross in model.crosses]  # noqa: E731
ATTENTION = lambda model: model.attention.trainable_weights  # noqa: E731
TOLERANCE = {"rtol": 1e-5, "atol": 5e-6}


@pytest.mark.parametrize(
    ("kind", "logits", "weights", "tolerance"),
    [
        ("dlrm", dlrm_logits, NO_WEIGHTS, {"atol": 2e-6}), ("din", din_logits, ATTENTION, TOLERANCE),
        ("dcn", dcn_logits, BIASES, TOLERANCE), ("dcn_low_rank", dcn_logits, BIASES, TOLERANCE),
    ],
)  # fmt: skip
def test_logits_against_numpy(kind, logits, weights, tolerance):
    model, batch = made(kind), oracle.batch_of([5, 0, 12], [3, 2, 1])
    model(batch)
    for weight in weights(model):
        weight.assign(tf.random.normal(weight.shape, stddev=0.7, seed=1))
    outputs = model(batch)
    assert tuple(outputs) == ("ctr", "ctcvr", "conversion")
    expected = [logits(model, exposure) for exposure in oracle.exposures_of(model, batch)]
    np.testing.assert_allclose(tf.stack(list(outputs.values()), axis=1), expected, **tolerance)
    assert np.std(expected, axis=0).min() > 1e-3


@pytest.mark.parametrize("kind", ["dcn", "dcn_low_rank"])
def test_flops_of_dcn_are_those_of_the_weights(kind):
    model, batch = made(kind), oracle.batch_of([4, 2], [2, 3])
    model(batch)
    of_kernels = sum(np.prod(weight.shape) for weight in model.trainable_weights if "kernel" in weight.name)
    assert float(model.forward_flops(batch)) == 5 * 2 * of_kernels


def test_flops_of_din_count_events_exposures_and_pairs():
    model, batch = made("din"), oracle.batch_of([4, 0, 2], [2, 2, 3])
    events, exposures, joined = 4 + 2, 2 + 2 + 3, 4 * 2 + 2 * 3
    top = (4 + 8 * 4 + 24) * 7 + 7 * 6 + 6 * 3
    of_pair = 17 * 5 + 5 * 3 + 3 * 1 + 24  # with the product of the weight and the event
    expected = 2 * (events * 24 * 5 + exposures * (16 * 5 + top) + joined * of_pair)
    assert float(model.forward_flops(batch)) == expected


def test_rare_items_share_a_row_and_are_told_from_frequent_ones():
    popularity = np.where(oracle.CATALOGUE % 2, 3, 1)
    for least, ids, known in (
        (3, [1, 2, 3, 58, 59, 60, 1000], [1, -1, 3, -1, 59, -1, -1]), (9, [1, 2], [-1, -1]),
    ):  # fmt: skip
        config = dataclasses.replace(MODELS["dlrm"][1], min_item_count=least)
        model = oracle.make(DLRM, config, popularity)
        np.testing.assert_array_equal(model._frequent_or_rare(tf.constant(ids, tf.int64)), known)


def test_a_step_trains_every_task_and_counts():
    model, batch = made("dlrm"), oracle.batch_of([4, 2], [2, 3])
    model.compile(keras.optimizers.SGD(0.1))
    before = [weight.numpy() for weight in (model(batch), model.head.kernel)[1:]]
    logs = model.train_step(batch)
    assert (before[0] != model.head.kernel.numpy()).any(axis=0).all()  # a column for each task
    assert float(logs["samples"]) == 2 and float(logs["tokens"]) == 4 + 2 + 2 + 3
    vectors = 1 + 2 + 2 + 3
    bottom, top = 4 * 5 + 5 * 8, (vectors * 8 + vectors * (vectors - 1) // 2) * 7 + 7 * 6 + 6 * 3
    assert float(logs["gflops"]) * 1e9 == pytest.approx(3 * 5 * 2 * (bottom + top + vectors**2 * 8))


@pytest.mark.parametrize("kind", ["grm", "dlrm", "din", "dcn"])
@pytest.mark.parametrize(("histories", "exposures"), [([], []), ([0, 3], [2, 1]), ([3, 2], [0, 0]), ([0], [0])])
def test_empty_inputs_have_finite_gradients(histories, exposures, kind):
    model, batch = made(kind), oracle.batch_of(histories, exposures)
    with tf.GradientTape() as tape:
        outputs = model(batch, training=True)
        loss = model.compute_loss(x=batch, y_pred=outputs)
    assert outputs["ctr"].shape == [sum(exposures)] and np.isfinite(float(loss))
    assert sum(exposures) or float(loss) == 0.0
    for gradient in tape.gradient(loss, model.trainable_variables):
        assert gradient is None or np.isfinite(tf.convert_to_tensor(gradient)).all()


def test_a_step_leaves_events_out_of_the_history_and_keeps_what_the_exposures_show():
    batch = oracle.batch_of([12, 0, 12], [2, 1, 3])
    batch["history_rating"] = ragged([12, 0, 12], np.arange(24), np.float32)
    given = {**oracle.FIELDS, "item_features": (), "history_dense": ("rating",), "history_dropout": 0.5}
    model = oracle.make(DLRM, DLRMConfig(**given))
    whole, rows, numbers = model.read(batch, training=False)
    assert whole is batch
    np.testing.assert_array_equal(numbers.exposed, model.dense_of(batch).exposed)
    cut, fewer, left = model.read(batch, training=True)
    lengths = cut["history_item"].row_lengths().numpy()
    assert lengths[1] == 0 and 0 < lengths.sum() < 24
    at = left.history.values.numpy()[:, 0].round().astype(int)  # the statistics are those of no data: mean 0
    assert list(at) == sorted(set(at)) and [(at < 12).sum(), (at >= 12).sum()] == [lengths[0], lengths[2]]
    for name in ("history_item", "history_time"):
        np.testing.assert_array_equal(cut[name].values, batch[name].values.numpy()[at])
    for name in ("history_item", "history_action"):
        np.testing.assert_array_equal(fewer[name].values, rows[name].values.numpy()[at])
        np.testing.assert_array_equal(fewer[name].row_lengths(), lengths)
    np.testing.assert_array_equal(left.exposed, numbers.exposed)  # with the length of the whole history
    np.testing.assert_array_equal(fewer["exposed_item"].values, rows["exposed_item"].values)


@pytest.mark.parametrize("kind", ["grm", "dlrm", "din", "dcn"])
def test_every_model_trains_on_fewer_events_and_answers_from_all(kind):
    batch = oracle.batch_of([12, 12], [2, 2])
    answers = []
    for share in (0.0, 0.5):
        one = made(kind, history_dropout=share)
        answers += [one(batch, training=training)["ctr"] for training in (False, True)]
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])
    assert (answers[2].numpy() != answers[3].numpy()).all()
