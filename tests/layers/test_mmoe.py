"""mmoe.py equals its dense form, and an expert is computed for the tokens that keep it only."""

import numpy as np
import pytest

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers import MMoE


def built(top_k, num_tasks=2):
    keras.utils.set_random_seed(1)  # A test below needs a pair of expert and token that no gate keeps.
    layer = MMoE(num_experts=4, expert_units=5, num_tasks=num_tasks, top_k=top_k)
    layer.build([None, 3])
    layer.expert_bias.assign(np.linspace(-0.5, 0.5, 20))
    return layer


def test_equal_gates_keep_the_first_experts():
    layer = built(top_k=2)
    layer.gate_kernel.assign(tf.zeros_like(layer.gate_kernel))
    x = np.ones((1, 3), np.float32)
    experts = np.maximum(x @ layer.expert_kernel.numpy() + layer.expert_bias.numpy(), 0)
    expected = experts.reshape(4, 5)[:2].mean(axis=0)
    np.testing.assert_allclose(layer(x)[0][0], expected, atol=1e-6)


def dense(layer, x):
    """Computes every expert for every token, and mixes with gates of which all but the largest are 0."""
    experts = tf.nn.relu(x @ layer.expert_kernel + layer.expert_bias)
    experts = tf.reshape(experts, [len(x), layer.num_experts, layer.expert_units])
    logits = tf.reshape(x @ layer.gate_kernel, [len(x), layer.num_tasks, layer.num_experts])
    _, largest = tf.math.top_k(logits, k=layer.top_k)
    gates = tf.nn.softmax(logits) * tf.reduce_sum(tf.one_hot(largest, layer.num_experts), axis=-2)
    gates /= tf.reduce_sum(gates, axis=-1, keepdims=True)
    return tf.unstack(tf.einsum("tge,teu->gtu", gates, experts))


@pytest.mark.parametrize(("top_k", "rows"), [(1, 9), (2, 40), (2, 1), (3, 2), (3, 0), (4, 9)])
def test_chosen_experts_equal_the_dense_form_in_both_passes(top_k, rows):
    layer = built(top_k, num_tasks=3)
    x = tf.constant(np.random.default_rng(1).normal(size=(rows, 3)).astype(np.float32))
    weigh = tf.constant(np.random.default_rng(2).normal(size=(3, rows, 5)).astype(np.float32))
    found = []
    for form in (layer, lambda tokens: dense(layer, tokens)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tf.stack(form(x))
            total = tf.reduce_sum(out * weigh)
        gradients = tape.gradient(total, [x, *layer.trainable_variables])
        found.append([out, *(tf.convert_to_tensor(gradient) for gradient in gradients)])
    for ours, wanted in zip(*found):
        np.testing.assert_allclose(ours, wanted, atol=2e-5)  # float32 sums of up to 40 tokens in another order


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_an_expert_is_computed_for_the_tokens_that_keep_it_only(top_k):
    layer = built(top_k, num_tasks=3)
    x = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    chosen = np.argsort(-(x @ layer.gate_kernel.numpy()).reshape(40, 3, 4), axis=-1)[..., :top_k]
    pairs = sorted({(expert, token) for token in range(40) for expert in chosen[token].ravel()})
    experts = np.maximum(x @ layer.expert_kernel.numpy() + layer.expert_bias.numpy(), 0).reshape(40, 4, 5)
    rows, _ = layer._chosen_experts(tf.constant(x), tf.constant(chosen, tf.int32))
    assert len(rows) == len(pairs) < 40 * 4
    expected = np.stack([experts[token, expert] for expert, token in pairs])
    np.testing.assert_allclose(rows, expected, atol=1e-6)  # float32 sums of 4 terms


@pytest.mark.parametrize(("top_k", "computed"), [(1, 2), (2, 4), (4, 4)])
def test_flops_by_hand(top_k, computed):
    assert built(top_k).forward_flops(3) == 2 * (3 * computed * 5 + 3 * 2 * 4 + 2 * top_k * 5)


def test_mixed_bfloat16():
    answers = MMoE(4, 5, 2, 3, dtype=keras.mixed_precision.Policy("mixed_bfloat16"))(tf.ones([2, 3]))
    assert answers[0].dtype == tf.bfloat16 and np.all(np.isfinite(tf.cast(answers[0], tf.float32)))
