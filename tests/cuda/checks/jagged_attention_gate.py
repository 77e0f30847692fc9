"""Gate and norm behind the attention, forward and backward, against NumPy in float64."""

from __future__ import annotations

import numpy as np

from tests.cuda.checks.jagged_attention_call import assert_near, from_bits, random_case, run, to_bits
from tests.cuda.checks.jagged_attention_oracle import attention, attention_grad

TOKENS = ("query", "key", "value", "gate", "attended")


def gated_case(lengths, heads, dim, *, weights=True, per_head=False, gate_first=False, seed=0, **more):
    random = np.random.default_rng(seed)
    case = random_case(lengths, heads, dim, dim, seed=seed, **more)
    case.update(gate=random.normal(size=case["value"].shape), per_head=per_head, gate_first=gate_first, epsilon=1e-2)
    if weights:
        case.update({name: random.normal(size=heads * dim) for name in ("norm_weight", "norm_bias")})
    return case


def gate_oracle(case, attended, grads):
    """Returns the gated result and, by name, the gradients of the attention, the gate and the norm's weights."""
    tokens, heads, dim = attended.shape
    groups = [tokens, heads if case["per_head"] else 1, -1]
    gate = case["gate"]
    inputs = attended * gate if case["gate_first"] else attended
    inputs = inputs.reshape(groups)
    deviation = np.sqrt(inputs.var(-1, keepdims=True) + case["epsilon"])
    norm = ((inputs - inputs.mean(-1, keepdims=True)) / deviation).reshape(attended.shape)
    weight, bias = (
        np.asarray(case.get(name, number)) * np.ones(heads * dim)
        for name, number in (("norm_weight", 1.0), ("norm_bias", 0.0))
    )
    y = norm * weight.reshape(heads, dim) + bias.reshape(heads, dim)
    behind = grads if case["gate_first"] else grads * gate
    of_norm = (behind * weight.reshape(heads, dim)).reshape(groups)
    flat = norm.reshape(groups)
    means = of_norm.mean(-1, keepdims=True), (of_norm * flat).mean(-1, keepdims=True)
    of_input = ((of_norm - means[0] - flat * means[1]) / deviation).reshape(attended.shape)
    return (y if case["gate_first"] else y * gate), {
        "attended": of_input * gate if case["gate_first"] else of_input,
        "gate_grads": of_input * attended if case["gate_first"] else grads * y,
        "norm_weight_grads": (behind * norm).sum(axis=0).reshape(-1),
        "norm_bias_grads": behind.sum(axis=0).reshape(-1),
    }


def compare_gated(kernels, type_, case):
    exact = {**case, **{name: from_bits(type_, to_bits(type_, case[name])) for name in TOKENS if name in case}}
    of_attention = {name: x for name, x in exact.items() if name in ("query", "key", "value") or name not in TOKENS}
    for name in ("norm_weight", "norm_bias", "per_head", "gate_first", "epsilon"):
        of_attention.pop(name, None)
    attended = attention(**of_attention)
    grads = from_bits(type_, to_bits(type_, np.random.default_rng(9).normal(size=attended.shape)))
    found = run(kernels, "jagged_attention", type_, case)
    assert_near(type_, found["out"], attended, "attended")
    # The kernel gates the attention that it has rounded.
    rounded = found["out"].astype(np.float64)
    gated, wanted = gate_oracle(exact, rounded, grads)
    assert_near(type_, found["gated"], gated, "gated")
    backward = run(kernels, "jagged_attention", type_, {**case, "attended": rounded}, grads)
    of_attended = from_bits(type_, to_bits(type_, wanted.pop("attended")))
    wanted.update(attention_grad(grads=of_attended, **of_attention))
    for name, ours in backward.items():
        assert_near(type_, ours, wanted[name], name, 4 if type_ == 0 else 1)  # through two gradients


def check_gate_and_norm(kernels):
    for number, options in enumerate((
        {"weights": False}, {}, {"per_head": True}, {"gate_first": True, "targets": [3, 0, 5]},
        {"gate_first": True, "per_head": True, "weights": False},
    )):  # fmt: skip
        case = gated_case([33, 0, 5], 2, 20, seed=number, bias=number == 1, **options)
        compare_gated(kernels, number % 3, case)


def check_weights_of_the_norm_with_more_tokens_than_a_slot(kernels):
    compare_gated(kernels, 0, gated_case([60, 70], 2, 4, bias=False))


def check_a_gate_of_fewer_queries_than_keys(kernels):
    """The queries have the bits that they have when every token asks."""
    case = gated_case([40, 9], 2, 8, bias=False)
    whole = run(kernels, "jagged_attention", 0, case)
    asking = np.concatenate([np.arange(7, 40), np.arange(49, 49)])
    fewer = {**case, "query_splits": np.array([0, 33, 33])}
    fewer.update({name: case[name][asking] for name in ("query", "gate")})
    for name, ours in run(kernels, "jagged_attention", 0, fewer).items():
        np.testing.assert_array_equal(ours, whole[name][asking], name)
