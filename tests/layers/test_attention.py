"""attention.py against the loop oracle, independent reference results, and numeric derivatives."""

import numpy as np
import pytest

from tests.layers.cases import (
    ROW_LENGTHS,
    assert_within_noise,
    oracle_file,
    rows_of,
    splits_of,
    times,
    tokens,
)
from tests.oracles.attention import attention_oracle
from tests.oracles.relative_bias import next_times_oracle, pair_bias_oracle
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import RelativeBias, jagged_attention, time_buckets

SCALE = 1.0 / 29.0


def padded_to_ragged(padded, lengths):
    flat = np.concatenate([row[:n] for row, n in zip(padded, lengths)])
    return tf.RaggedTensor.from_row_splits(flat, splits_of(lengths))


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("contextual_length", [0, 2])
@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_the_loop_oracle(lengths, contextual_length, with_targets, with_bias):
    q, k, v = (tokens(lengths, 2, d, seed=s).astype(np.float64) for s, d in enumerate((5, 5, 3)))
    targets = np.array([n // 3 for n in lengths], np.int64) if with_targets else None
    given = None if targets is None else tf.constant(targets)
    bias, biases = None, None
    if with_bias:
        generator = np.random.default_rng(2)
        position, time = generator.normal(size=59), generator.normal(size=129)
        flat = times(lengths)
        stamps = tf.RaggedTensor.from_row_splits(flat, splits_of(lengths))
        buckets = time_buckets(stamps, num_targets=given)
        bias = RelativeBias(tf.constant(position), tf.constant(time), buckets)
        counts = [0] * len(lengths) if targets is None else targets
        biases = [
            pair_bias_oracle(position, time, next_times_oracle(mine, n), mine, n, 128)
            for mine, n in zip((r.tolist() for r in rows_of(flat, lengths)), counts)
        ]
    splits = splits_of(lengths)
    ours = jagged_attention(
        *map(tf.constant, (q, k, v, splits)),
        scale=SCALE,
        num_targets=given,
        contextual_length=contextual_length,
        relative_bias=bias,
    )
    expected = attention_oracle(q, k, v, splits, SCALE, targets, contextual_length, biases)
    # float64 on both sides: sums of up to 24 terms of size 10.
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "name",
    [
        "attn_causal",
        "attn_causal_small_init",
        "attn_targets",
        "attn_context",
        "attn_context_targets",
        "attn_rab_pos",
        "attn_rab_time_log",
        "attn_rab_all_log",
        "research_attn_rab",
    ],
)
def test_against_reference_results_forward_and_backward(name):
    arrays, settings = oracle_file(name)
    splits, longest = arrays["seq_offsets"], settings.get("max_seq_len", settings.get("n"))
    lengths = np.diff(splits)
    heads = settings.get("heads", 2)
    inputs = {x: tf.constant(arrays[x].reshape(sum(lengths), heads, -1)) for x in "qkv"}
    kind = settings.get("bias_type", "ALL" if name == "research_attn_rab" else None)
    if kind in ("ALL", "POS"):
        inputs["pos_w"] = tf.constant(arrays["pos_w"])
    if kind in ("ALL", "TIME"):
        inputs["ts_w"] = tf.constant(arrays["ts_w"])
    with tf.GradientTape() as tape:
        tape.watch(list(inputs.values()))
        bias = None
        if kind is not None:
            bias = RelativeBias(inputs.get("pos_w", tf.zeros([2 * longest - 1])))
        if "ts_w" in inputs:
            stamps = np.concatenate([arrays["timestamps"], arrays["timestamps"][:, -1:]], axis=1)
            keys, asks = (padded_to_ragged(part, lengths) for part in (stamps, stamps[:, 1:]))
            num_buckets = inputs["ts_w"].shape[0] - 1
            buckets = time_buckets(keys, num_buckets, query_times=asks)
            bias = bias._replace(time_weights=inputs["ts_w"], buckets=buckets)
        out = jagged_attention(
            inputs["q"] * settings["alpha"],
            inputs["k"],
            inputs["v"],
            tf.constant(splits),
            scale=1.0 / longest,
            num_targets=arrays.get("num_targets"),
            contextual_length=settings.get("contextual_seq_len", 0),
            relative_bias=bias,
        )
        total = tf.reduce_sum(out * arrays["dout"].reshape(out.shape))
    assert_within_noise(out, arrays["out"].reshape(out.shape), arrays["noise_out"])
    for key, gradient in tape.gradient(total, inputs).items():
        assert isinstance(gradient, tf.Tensor), f"the gradient of {key} is not dense"
        expected = arrays[f"d_{key}" if key.endswith("_w") else f"d{key}"]
        assert_within_noise(gradient, expected.reshape(gradient.shape), arrays[f"noise_d_{key}"])


@pytest.mark.parametrize("with_targets", [False, True])
def test_gradients_equal_numeric_ones(with_targets):
    lengths = [3, 0, 4]
    splits = tf.constant(splits_of(lengths))
    targets = tf.constant([1, 0, 2]) if with_targets else None
    stamps = tf.RaggedTensor.from_row_splits(times(lengths) % 50, splits)
    buckets = time_buckets(stamps, 12, num_targets=targets)
    generator = np.random.default_rng(3)
    shapes = [(7, 2, 3), (7, 2, 3), (7, 2, 2), (9,), (13,)]
    inputs = [tf.constant(generator.normal(size=shape)) for shape in shapes]
    cotangent = tf.constant(generator.normal(size=(7, 2, 2)))

    def total(q, k, v, position, time):
        bias = RelativeBias(position, time, buckets)
        out = jagged_attention(q, k, v, splits, scale=0.5, num_targets=targets, contextual_length=1, relative_bias=bias)
        return tf.reduce_sum(out * cotangent)

    # Central differences in float64, step 1e-5: truncation and rounding are both near 1e-10.
    ours, numeric = tf.test.compute_gradient(total, inputs, delta=1e-5)
    for mine, theirs in zip(ours, numeric):
        np.testing.assert_allclose(mine, theirs, atol=1e-8, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_computed_in_float32(dtype):
    lengths = ROW_LENGTHS["mixed"]
    q, k, v = (tf.cast(tokens(lengths, 2, 4, seed=s), dtype) for s in range(3))
    splits = tf.constant(splits_of(lengths))
    half = jagged_attention(q, k, v, splits, scale=SCALE)
    full = jagged_attention(*(tf.cast(x, tf.float32) for x in (q, k, v)), splits, scale=SCALE)
    assert half.dtype == dtype
    np.testing.assert_array_equal(half, tf.cast(full, dtype))


def test_a_row_does_not_depend_on_its_neighbours_and_a_graph_on_its_sizes():
    signature = [tf.TensorSpec([None, 2, 4])] * 3 + [tf.TensorSpec([None], tf.int64)]

    @tf.function(input_signature=signature, autograph=False)
    def attend(q, k, v, splits):
        with tf.GradientTape() as tape:
            tape.watch(v)
            out = jagged_attention(q, k, v, splits, scale=SCALE)
        return out, tape.gradient(out, v)

    for lengths in ROW_LENGTHS.values():
        parts = [tokens(lengths, 2, 4, seed=s) for s in range(3)]
        together, gradient = attend(*parts, splits_of(lengths))
        assert gradient.shape == together.shape
        for row, (begin, end) in enumerate(zip(splits_of(lengths)[:-1], splits_of(lengths)[1:])):
            alone, _ = attend(*(part[begin:end] for part in parts), splits_of(lengths[row : row + 1]))
            # Another padded length makes the matmul sum in another order: float32 rounding.
            np.testing.assert_allclose(alone, together[begin:end], rtol=1e-5, atol=1e-7)


def test_what_cannot_be_done_is_named():
    q = tf.zeros([3, 1, 2])
    with pytest.raises(ValueError, match=r"key must be \[T, H, D\], got shape \(3, 2\)"):
        jagged_attention(q, q[:, 0], q, tf.constant([0, 3]), scale=1.0)
    with pytest.raises(ValueError, match="contextual_length must be >= 0, got -1"):
        jagged_attention(q, q, q, tf.constant([0, 3]), scale=1.0, contextual_length=-1)
    for wrong in ([4], [-1], [1, 1]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="num_targets must have one entry"):
            jagged_attention(q, q, q, tf.constant([0, 3]), scale=1.0, num_targets=tf.constant(wrong))
