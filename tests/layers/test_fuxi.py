"""fuxi.py: both forms against reference results and the loop oracle; time encodings; stages; refusals."""

import numpy as np
import pytest

from tests.layers import cases
from tests.layers.cases import ROW_LENGTHS, batch, rows_of, splits_of
from tests.oracles.fuxi import fuxi_block_oracle
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import FuXi
from tf_fusedrec.layers.relative_bias import bucket_thresholds

SIZES = {"num_heads": 2, "qk_dim": 3, "value_dim": 4, "max_sequence_length": 30}


@pytest.mark.parametrize(
    ("name", "form", "encoding", "multiple"),
    [("fuxi_alpha_block", "alpha", "buckets", 2), ("fuxi_beta_exp", "beta", "exponential", 3)],
)
def test_equals_the_reference_forward_and_backward(name, form, encoding, multiple):
    arrays, settings = cases.oracle_file(name)
    layer = FuXi(
        settings["heads"], settings["dqk"], settings["dv"], form, multiple, settings["n"], time_encoding=encoding
    )
    splits = tf.constant(arrays["seq_offsets"])
    layer.build([None, None, arrays["x"].shape[1]])
    variables = {
        "_uvqk": layer.projection.kernel,
        "_rel_attn_bias___pos_w": layer.bias_weights.position_weights,
        "_mffn__lin0__weight": layer.channel_projection.kernel,
        "_mffn__lin0__bias": layer.channel_projection.bias,
        "_mffn__lin1__weight": layer.ffn_gate.kernel,
        "_mffn__lin2__weight": layer.ffn_output.kernel,
        "_mffn__lin3__weight": layer.ffn_value.kernel,
    }
    if encoding == "buckets":
        variables["_rel_attn_bias___ts_w"] = layer.bias_weights.time_weights
    else:
        variables["_rel_attn_bias___exp_a"], variables["_rel_attn_bias___exp_b"] = layer.bias_weights.time_scalars
    assert len(variables) == len(layer.trainable_variables)
    times = cases.reference_times(arrays)

    def call(x):
        return layer(tf.RaggedTensor.from_row_splits(x, splits), timestamps=times).values

    # The reference results prescribe 1e-4 of the largest entry for layers and their gradients.
    cases.assert_equals_reference(call, {"x": arrays["x"]}, variables, arrays, 1e-4)


def time_map(layer, asks, answers):
    scalars = [float(w) for w in layer.bias_weights.time_scalars] if layer.time_encoding != "buckets" else []
    difference = asks[:, None] - answers[None, :]
    if layer.time_encoding == "buckets":
        bucket = np.searchsorted(bucket_thresholds(layer.time_buckets), np.abs(difference), side="right")
        return layer.bias_weights.time_weights.numpy()[bucket]
    past = np.maximum(difference, 0).astype(np.float64)
    if layer.time_encoding == "power":
        return scalars[0] * (past + 1) ** -scalars[1]
    if layer.time_encoding == "exponential":
        return scalars[0] * np.exp(-np.exp(scalars[1]) * past)
    return scalars[0] * np.exp(-np.log1p(np.exp(scalars[1])) * (past + 1) ** scalars[2])


@pytest.mark.parametrize("form", ["alpha", "beta"])
@pytest.mark.parametrize("encoding", ["buckets", "power", "exponential", "stretched"])
@pytest.mark.parametrize("multiple", [0, 2])
def test_against_the_loop_oracle(form, encoding, multiple):
    lengths = ROW_LENGTHS["mixed"]
    x, _ = batch(lengths)
    stamps = np.concatenate([np.sort(np.random.default_rng(n).integers(0, 10**5, n)) for n in lengths])
    layer = FuXi(**SIZES, form=form, time_encoding=encoding, ffn_multiple=multiple)
    out = layer(x, timestamps=tf.RaggedTensor.from_row_splits(stamps, x.row_splits)).values
    maps = []
    positions = layer.bias_weights.position_weights.numpy().astype(np.float64)
    for row in rows_of(stamps, lengths):
        places = np.arange(len(row))
        asks = np.append(row[1:], row[-1:])
        maps.append((positions[29 + places[None, :] - places[:, None]], time_map(layer, asks, row)))
    weights = {
        "projection": layer.projection.kernel.numpy(),
        "channel": [w.numpy() for w in layer.channel_projection.weights],
    }
    if multiple:
        weights["ffn"] = [w.kernel.numpy() for w in (layer.ffn_gate, layer.ffn_value, layer.ffn_output)]
        assert [w.shape for w in weights["ffn"]] == [(8, 16), (8, 16), (16, 8)]
    expected = fuxi_block_oracle(
        x.values.numpy().astype(np.float64), splits_of(lengths), maps, weights, 2, 3, 4, 1 / 30
    )
    np.testing.assert_allclose(out, expected, atol=1e-4)  # RMSNorm of small channels amplifies float32 rounding.


@pytest.mark.parametrize("form", ["alpha", "beta"])
def test_flops_by_hand(form):
    layer = FuXi(**SIZES, form=form, ffn_multiple=2)
    flops = layer.forward_flops(tf.constant([0, 3, 3, 7], tf.int64), 8)
    pairs, channels = 6 + 10, 3 if form == "alpha" else 2
    projection = 8 * ((channels + 1) * 8 + (12 if form == "alpha" else 0))
    by_token = projection + channels * 8 * 8 + 3 * 8 * 16
    by_pair = 2 * 8 + (6 + 8 if form == "alpha" else 0)
    assert float(flops) == 2 * (7 * by_token + pairs * by_pair)
