"""jagged_attention against results of independent reference implementations, forward and backward."""

import numpy as np
import pytest

from tests.layers.cases import oracle_file
from tests.oracles.visible_pairs import visible_pairs
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers.relative_bias import bucket_thresholds

# Tolerances of the op in float32, from the reference's own comparison: torch.testing.assert_close. The gradient of a
# weight of the bias sums all pairs that use the weight; the same tolerances hold for it.
ABSOLUTE, RELATIVE = 1e-5, 1.3e-6
FILES = (
    "attn_causal", "attn_causal_small_init", "attn_targets", "attn_context", "attn_context_targets", "attn_window",
    "attn_window_minfull", "attn_context_window_targets", "attn_scalar_attn_scale", "attn_nv_scaling_seqlen",
    "attn_rab_pos", "attn_rab_time_log", "attn_rab_all_log", "attn_rab_all_sqrt60", "research_attn_rab",
)  # fmt: skip


def scale_of(arrays, settings):
    if "attn_scale" in arrays:
        return arrays["attn_scale"]
    return 1.0 / settings.get("scaling_seqlen", settings.get("max_seq_len", settings.get("n")))


def thresholds_of(settings, num_buckets):
    """Returns the thresholds of bucket = trunc(sqrt(difference / 60)): bucket b begins at 60 b^2."""
    if settings.get("bucket_function") == "sqrt":
        return 60 * np.arange(1, num_buckets + 1, dtype=np.int64) ** 2
    return bucket_thresholds(num_buckets)


def times_of(arrays, lengths):
    """Returns the times. Token i asks at the time of token i + 1, which the padded files hold for the last one, too."""
    stamps = arrays["timestamps"]
    stamps = np.concatenate([stamps, stamps[:, -1:]], axis=1)
    rows = [(row[1 : n + 1], row[:n]) for row, n in zip(stamps, lengths)]
    asks, answers = (np.concatenate(part) for part in zip(*rows))
    return ops.SequenceTimes(tf.constant(asks), tf.constant(answers))


@pytest.mark.parametrize("name", FILES)
def test_file(name):
    arrays, settings = oracle_file(name)
    splits = arrays["seq_offsets"]
    lengths, heads = np.diff(splits), settings.get("heads", 2)
    kind = settings.get("bias_type", "ALL" if name == "research_attn_rab" else None)
    inputs = {x: tf.constant(arrays[x].reshape(sum(lengths), heads, -1)) for x in "qkv"}
    inputs.update({x: tf.constant(arrays[x]) for x, of in (("pos_w", "POS"), ("ts_w", "TIME")) if kind in ("ALL", of)})
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        bias = None
        if kind is not None:
            time, times = None, None
            if "ts_w" in inputs:
                num_buckets = inputs["ts_w"].shape[0] - 1
                time = ops.BucketTable(inputs["ts_w"], tf.constant(thresholds_of(settings, num_buckets)))
                times = times_of(arrays, lengths)
            bias = ops.RelativeBias(inputs.get("pos_w"), time, times)
        out = ops.jagged_attention(
            inputs["q"], inputs["k"], inputs["v"], splits,
            scale=scale_of(arrays, settings), alpha=settings["alpha"], num_targets=arrays.get("num_targets"),
            contextual_length=settings.get("contextual_seq_len", 0),
            attention_window=settings.get("max_attn_len", 0),
            min_full_length=settings.get("min_full_attn_seq_len", 0), bias=bias,
        )  # fmt: skip
        total = tf.reduce_sum(out * arrays["dout"].reshape(out.shape))
    np.testing.assert_allclose(out, arrays["out"].reshape(out.shape), RELATIVE, ABSOLUTE)
    for key, gradient in tape.gradient(total, inputs).items():
        wanted = arrays[f"d_{key}" if key.endswith("_w") else f"d{key}"].reshape(gradient.shape)
        np.testing.assert_allclose(gradient, wanted, RELATIVE, ABSOLUTE, err_msg=key)


@pytest.mark.parametrize("name", [name for name in FILES if "rab" not in name and "nv" not in name])
def test_the_oracle_of_the_masks_is_the_reference(name):
    arrays, settings = oracle_file(name)
    lengths = np.diff(arrays["seq_offsets"])
    for mask, length, targets in zip(arrays["mask"], lengths, arrays.get("num_targets", np.zeros_like(lengths))):
        visible = visible_pairs(
            length, targets, settings.get("contextual_seq_len", 0), settings.get("max_attn_len", 0),
            settings.get("min_full_attn_seq_len", 0),
        )  # fmt: skip
        np.testing.assert_array_equal(visible, mask[:length, :length].astype(bool))


def test_the_picture_in_the_docstring():
    drawn = [line for line in ops.jagged_attention.__doc__.splitlines() if line.count(" 1") > 1 and "," not in line]
    expected = np.array([[int(digit) for digit in line.split()] for line in drawn])
    np.testing.assert_array_equal(visible_pairs(7, 2, 2), expected == 1)
