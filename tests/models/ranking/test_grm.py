"""GRM: one row per user equals one row per exposure; the order of features does not matter."""

import dataclasses

import numpy as np
import pytest

from tests.models.batches import one_row_per_exposure, ragged, ranking_batch
from tests.models.ranking.exposure_oracle import make
from tests.oracles.visible_pairs import visible_pairs
from tf_fusedrec import keras, tf
from tf_fusedrec.models.experiment.model_config import GRMConfig
from tf_fusedrec.models.grm import GRM

CONFIG = GRMConfig(
    contextual=("user_id", "user_budget"), max_history=12, max_exposures=6, dim=8, qk_dim=4, value_dim=4,
    num_experts=3, expert_units=8, head_units=4,
)  # fmt: skip
CROSSED = {"time_features": True, "num_blocks": 1}


def make_grm(**changes):
    return make(GRM, dataclasses.replace(CONFIG, **changes))


def loss_of(model, batch):
    return float(model.compute_loss(x=batch, y_pred=model(batch)))


CROSSES = {"cross_layers": 2, "cross_rank": 5, "profiles": 2}
CHANGES = ({}, {"contextual": ()}, {"group_norm": True}, {"time_features": True}, CROSSES)


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES)
def test_one_row_per_user_answers_as_one_row_per_exposure(changes):
    model = make_grm(**changes)
    by_user = ranking_batch(histories=[5, 0, 12, 1], exposures=[3, 2, 6, 0])
    by_exposure = one_row_per_exposure(by_user)
    for task in model.config.tasks:
        # A float32 matmul over another padding rounds values near 1 by about 1e-7.
        np.testing.assert_allclose(model(by_user)[task], model(by_exposure)[task], atol=2e-6)
    assert loss_of(model, by_user) == pytest.approx(loss_of(model, by_exposure), rel=1e-6)


def test_loss_is_cross_entropy_of_click_and_of_click_with_conversion():
    model = make_grm()
    batch = ranking_batch(histories=[4, 2], exposures=[2, 3])
    # All four pairs of click and conversion occur. A conversion without a click does not count.
    batch["exposed_click"] = ragged([2, 3], [1, 0, 1, 0, 1], np.float32)
    batch["exposed_conversion"] = ragged([2, 3], [1, 1, 0, 0, 1], np.float32)
    click = batch["exposed_click"].values.numpy()
    labels = {"ctr": click, "ctcvr": click * batch["exposed_conversion"].values.numpy()}
    logits = {task: logit.numpy().astype(np.float64) for task, logit in model(batch).items()}
    expected = sum(np.mean(np.log1p(np.exp(logits[task])) - labels[task] * logits[task]) for task in model.config.tasks)
    assert loss_of(model, batch) == pytest.approx(expected, rel=1e-6)


def test_weights_after_one_step_do_not_depend_on_feature_order():
    batch = ranking_batch(histories=[5, 0, 12, 1], exposures=[3, 2, 6, 0])
    weights = []
    for names in (list(batch), list(reversed(batch))):
        model = make_grm()
        model.compile(keras.optimizers.SGD(0.1))
        model.train_step({name: batch[name] for name in names})
        weights.append([variable.numpy() for variable in model.trainable_variables])
    assert len(weights[0]) == len(weights[1])
    for first, second in zip(*weights):
        np.testing.assert_array_equal(first, second)


def test_group_norm_has_weights_for_each_kind_of_token():
    model = make_grm(group_norm=True)
    batch = ranking_batch(histories=[2, 0], exposures=[1, 2])
    np.testing.assert_array_equal(model._kinds(batch), [0, 0, 1, 1, 2, 0, 0, 2, 2])
    model(batch)
    rng = np.random.default_rng(0)
    layer, x, kind = model.group_norms[1], rng.normal(3, 2, [5, 8]), np.array([2, 0, 1, 1, 2])
    for weight in layer.weights:
        weight.assign(rng.normal(0, 1, weight.shape))
    weight, bias = (variable.numpy() for variable in layer.weights)
    centred = x - x.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt(x.var(axis=1, keepdims=True) + 1e-6) * weight[kind] + bias[kind]
    # float32: sums of eight terms near 1.
    np.testing.assert_allclose(layer(tf.constant(x, tf.float32), tf.constant(kind)), expected, atol=1e-5)
    before = model(batch)["ctr"].numpy()
    model.group_norms[0].weight.assign_add([[0.0] * 8, [0.0] * 8, [1.0] * 8])
    assert (model(batch)["ctr"].numpy() != before).all()


def test_group_norm_keeps_the_tokens_beside_their_norm():
    model, plain = make_grm(group_norm=True), make_grm()
    batch = ranking_batch(histories=[3, 1], exposures=[2, 2])
    for one in (model, plain):
        one(batch)
        for block in one.blocks:  # Blocks that add nothing leave the tokens, normalised or not, as they are.
            block.output_stage.projection.kernel.assign(tf.zeros_like(block.output_stage.projection.kernel))
    own = {id(weight) for layer in model.group_norms for weight in layer.weights}
    others = [weight for weight in model.trainable_variables if id(weight) not in own]
    for mine, theirs in zip(others, plain.trainable_variables):
        mine.assign(theirs)
    assert len(own) == 4 and len(others) == len(plain.trainable_variables)
    np.testing.assert_allclose(model(batch)["ctr"], plain(batch)["ctr"], atol=1e-6)  # float32: x + (y - y)


def test_the_experts_take_crosses_of_the_targets_output_its_own_columns_its_users_and_the_historys():
    plain, batch = make_grm(**CROSSED), ranking_batch(histories=[3, 0, 2], exposures=[2, 1, 2])
    model = make_grm(**CROSSED, **CROSSES)
    plain(batch), model(batch)
    more = float(model.forward_flops(batch)) - float(plain.forward_flops(batch))
    taken = []
    for one in (plain, model):
        for mine, theirs in zip(one.trainable_variables, plain.trainable_variables):
            if mine.shape == theirs.shape:  # all but the experts' and the crosses' own weights
                mine.assign(theirs)
        experts = one.experts
        one.experts = lambda x, experts=experts: taken.append(x.numpy()) or experts(x)
        one(batch)
    output, x = taken
    tables = {name: table.numpy() for name, table in model.embedding.tables.items()}
    user = np.array([0, 0, 1, 2, 2])
    rows = [tables[name][batch[name].numpy()[user]] for name in ("user_id", "user_budget")]
    rows.append(tables["item"][batch["exposed_item"].values.numpy()])
    of_users = np.zeros([2, 3, 8]), np.zeros([2, 3, 8])
    kernel, bias = (weight.numpy() for weight in model.profiles.weights_of.weights)
    for number, (items, actions) in enumerate(zip(batch["history_item"].to_list(), batch["history_action"].to_list())):
        if items:
            events = np.concatenate([tables["item"][items], tables["action"][actions]], axis=1)
            of_users[0][:, number] = events[:, :8].mean(axis=0), events[:, 8:].mean(axis=0)
            of_users[1][:, number] = (events @ kernel + bias).T @ events[:, :8] * 8**0.5 / len(items) ** 0.5
    means, profiles = (list(vectors[:, user]) for vectors in of_users)
    past = [*means, *profiles, *(profile * rows[2] for profile in profiles)]
    normalized = (output - output.mean(axis=1, keepdims=True)) / np.sqrt(output.var(axis=1, keepdims=True) + 1e-6)
    x_0 = expected = np.concatenate([normalized, model.dense_of(batch).exposed, *rows, *past], axis=1).astype(
        np.float64
    )
    assert x_0.shape == (5, 8 + 4 + 9 * 8) == (5, model.expert_columns)
    for cross in model.crosses:
        narrow, kernel, bias = (weight.numpy().astype(np.float64) for weight in cross.weights)
        expected = x_0 * (expected @ narrow @ kernel + bias) + expected
    # float32: two layers with sums of 84 terms near 1.
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=5e-6)
    of_experts = 2 * (3 * 8 + 2 * 3) * (84 - 8)  # wider experts and gates
    assert more == 5 * (of_experts + 2 * 2 * 84 * (5 + 5)) + 5 * 2 * (8 + 8) * 2  # and the weights of 5 events


def test_profiles_of_fewer_events_are_as_large_as_those_of_all():
    batch = ranking_batch(histories=[12], exposures=[1])
    for name in ("history_item", "history_action", "history_time"):  # twelve equal events: any half is as good
        batch[name] = ragged([12], np.full(12, batch[name].values.numpy()[0]))
    model = make_grm(**CROSSED, **CROSSES, history_dropout=0.5)
    whole = model._profiles(*model.read(batch, training=False), False)[0].numpy()
    cut = model.read(batch, training=True)
    share = int(tf.size(cut[0]["history_item"].values)) / 12
    np.testing.assert_allclose(model._profiles(*cut, True)[0], whole * (share / 0.5) ** 0.5, rtol=1e-5)  # float32


def test_too_many_exposures_are_refused():
    batch = ranking_batch(histories=[12], exposures=[9])
    with pytest.raises(tf.errors.InvalidArgumentError, match="max_sequence_length = 20"):
        make_grm()(batch)


def test_labels_beside_the_batch_are_refused():
    batch = ranking_batch(histories=[2], exposures=[1])
    with pytest.raises(ValueError, match="takes one dict of features and labels per batch"):
        make_grm().compute_loss(x=batch, y=tf.zeros([1]), y_pred=None)


def test_a_step_counts_flops_samples_and_tokens():
    """Attention counts the pairs that the mask shows. Training counts three times as much."""
    sizes = {"num_blocks": 3, "num_heads": 2, "value_dim": 5, "expert_units": 6, "head_units": 7}
    model, history, exposed = make_grm(**sizes), [5, 0, 12, 1], [3, 2, 6, 0]
    tokens = sum(history) + sum(exposed) + 2 * 4
    pairs = sum(int(visible_pairs(2 + h + e, e, contextual_length=2).sum()) for h, e in zip(history, exposed))
    to_uqkv, back = 2 * 8 * (2 * 2 * (4 + 5)), 2 * (2 * 5) * 8
    # Two tasks that keep 2 experts each may need all 3.
    experts, gates, mixing, heads = 2 * 8 * 18, 2 * 2 * 8 * 3, 2 * 2 * 2 * 6, 2 * 2 * (6 * 7 + 7)
    expected = 3 * (tokens * (to_uqkv + back) + pairs * 2 * (4 + 5) * 2)
    expected += sum(exposed) * (experts + gates + mixing + heads)
    batch = ranking_batch(histories=history, exposures=exposed)
    assert float(model.forward_flops(batch)) == expected
    model.compile(keras.optimizers.SGD(0.1))
    logs = model.train_step(batch)
    assert float(logs["gflops"]) * 1e9 == pytest.approx(3 * expected)
    assert int(model.step) == 1 and (float(logs["samples"]), float(logs["tokens"])) == (4.0, tokens)
    assert float(model.forward_flops(ranking_batch(histories=[], exposures=[]))) == 0
