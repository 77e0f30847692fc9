"""gated_output.py against reference results of the public operators' output stage, and its options by formula."""

import numpy as np
import pytest

from tests.layers.cases import assert_equals_reference, oracle_file
from tests.oracles.hstu import layer_norm, sigmoid, silu
from tf_fusedrec.layers.gated_output import GatedOutput


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layernorm_plain", {"norm": "affine"}),
        ("groupnorm", {"norm": "per_head", "num_heads": 2}),
        ("silu_gate", {"norm": "affine", "gate_activation": "silu"}),
    ],
)
def test_equals_the_reference_forward_and_backward(name, options):
    arrays, _ = oracle_file(f"output_stage_{name}")
    layer = GatedOutput(use_bias=False, **options)
    inputs = {key: arrays[key] for key in ("x", "u", "attn")}
    layer.build([value.shape for value in inputs.values()])
    variables = {"norm_w": layer.norm_weight, "norm_b": layer.norm_bias, "out_w": layer.projection.kernel}
    assert_equals_reference(lambda *parts: layer(list(parts)), inputs, variables, arrays)


@pytest.mark.parametrize("norm", ["plain", "affine", "per_head"])
@pytest.mark.parametrize("concat", ["none", "normalized", "raw"])
@pytest.mark.parametrize("activation", ["none", "sigmoid", "silu"])
def test_options_by_formula(norm, concat, activation):
    generator = np.random.default_rng(1)
    x, gate, attended = (generator.normal(size=(5, width)).astype(np.float32) for width in (3, 6, 6))
    layer = GatedOutput(2, norm=norm, concat=concat, gate_activation=activation)
    layer.build([x.shape, gate.shape, attended.shape])
    for variable in layer.trainable_variables:
        variable.assign(generator.normal(size=variable.shape))
    out = layer([x, gate, attended])
    gate = {"none": np.asarray, "sigmoid": sigmoid, "silu": silu}[activation](gate)
    heads = attended.reshape(5, 2, 3) if norm == "per_head" else attended
    normalized = layer_norm(heads)
    if norm != "plain":
        weight, bias = layer.norm_weight.numpy(), layer.norm_bias.numpy()
        normalized = (
            normalized * weight[..., None] + bias[..., None] if norm == "per_head" else normalized * weight + bias
        )
    normalized = normalized.reshape(5, 6)
    parts = [gate * normalized]
    if concat != "none":
        parts = [gate, normalized if concat == "normalized" else attended, *parts]
    expected = x + np.concatenate(parts, axis=1) @ layer.projection.kernel.numpy() + layer.projection.bias.numpy()
    np.testing.assert_allclose(out, expected, atol=5e-5)  # float32 sums of up to 18 terms


def test_gate_before_norm():
    generator = np.random.default_rng(2)
    x, gate, attended = (generator.normal(size=(5, width)).astype(np.float32) for width in (3, 4, 4))
    layer = GatedOutput(norm="affine", gate_before_norm=True, gate_activation="silu")
    out = layer([x, gate, attended])
    expected = x + layer_norm(attended * silu(gate)) @ layer.projection.kernel.numpy()
    np.testing.assert_allclose(out, expected, atol=1e-5)
