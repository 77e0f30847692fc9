"""Gate and norm behind the attention, forward and backward, against NumPy in float64."""

from __future__ import annotations

import numpy as np

from tests.cuda.checks.jagged_attention_call import assert_near, from_bits, random_case, rounded, run, to_bits
from tests.oracles import jagged_attention as oracle


def gated_case(lengths, heads, dim, *, weights=True, per_head=False, gate_first=False, seed=0, **more):
    random = np.random.default_rng(seed)
    case = random_case(lengths, heads, dim, dim, seed=seed, **more)
    case.update(gate=random.normal(size=case["value"].shape), per_head=per_head, gate_first=gate_first, epsilon=1e-2)
    if weights:
        case.update({name: random.normal(size=heads * dim) for name in ("norm_weight", "norm_bias")})
    return case


def compare_gated(kernels, type_, case):
    exact = rounded(type_, case)
    attended = oracle.attention(**exact)
    grads = from_bits(type_, to_bits(type_, np.random.default_rng(9).normal(size=attended.shape)))
    found = run(kernels, type_, case)
    assert_near(type_, found["out"], attended, "attended")
    # The kernel gates the attention that it has rounded.
    attended = found["out"].astype(np.float64)
    gated, wanted = oracle.gate(attended, grads=grads, **exact)
    assert_near(type_, found["gated"], gated, "gated")
    of_attended = from_bits(type_, to_bits(type_, wanted["attended_grads"]))
    wanted.update(oracle.attention_grad(grads=of_attended, **exact))
    for name, ours in run(kernels, type_, {**case, "attended": attended}, grads).items():
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
    whole = run(kernels, 0, case)
    asking = np.concatenate([np.arange(7, 40), np.arange(49, 49)])
    fewer = {**case, "query_splits": np.array([0, 33, 33])}
    fewer.update({name: case[name][asking] for name in ("query", "gate")})
    for name, ours in run(kernels, 0, fewer).items():
        np.testing.assert_array_equal(ours, whole[name][asking], name)
