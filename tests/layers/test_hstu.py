"""hstu.py: the research block against reference results, the MTGRBoost block against its equations, and its manners."""

import numpy as np
import pytest

from tests.layers.cases import (
    ROW_LENGTHS,
    assert_within_noise,
    oracle_file,
    splits_of,
    times,
    tokens,
)
from tests.oracles.attention import mtgrboost_block_oracle
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers import HSTU, PositionEmbedding, jagged, time_buckets

SIZES = {"num_heads": 2, "qk_dim": 4, "value_dim": 6, "max_sequence_length": 30}
SPECS = [
    tf.RaggedTensorSpec([None, None, 8], tf.float32, ragged_rank=1),
    tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1),
]


def batch(lengths, columns=8):
    splits = splits_of(lengths)
    x = tf.RaggedTensor.from_row_splits(tokens(lengths, columns), splits)
    return x, tf.RaggedTensor.from_row_splits(times(lengths), splits)


def test_research_block_equals_the_reference_forward_and_backward():
    arrays, settings = oracle_file("research_layer")
    layer = HSTU(settings["heads"], settings["dqk"], settings["dv"], max_sequence_length=settings["n"])
    lengths = np.diff(arrays["seq_offsets"])
    stamps = np.concatenate([arrays["timestamps"], arrays["timestamps"][:, -1:]], axis=1)
    flat, asks = (np.concatenate([row[begin : begin + n] for row, n in zip(stamps, lengths)]) for begin in (0, 1))
    splits = tf.constant(arrays["seq_offsets"])
    buckets = time_buckets(
        tf.RaggedTensor.from_row_splits(flat, splits),
        query_times=tf.RaggedTensor.from_row_splits(asks, splits),
    )
    x = tf.constant(arrays["x"])
    layer.build([None, None, x.shape[1]])
    names = {
        "_uvqk": layer.projection.kernel,
        "_o__weight": layer.output_projection.kernel,
        "_o__bias": layer.output_projection.bias,
        "_rel_attn_bias___pos_w": layer.position_weights,
        "_rel_attn_bias___ts_w": layer.time_weights,
    }
    assert len(names) == len(layer.trainable_variables)
    for name, variable in names.items():
        # The file keeps _o__weight as [out, in].
        variable.assign(arrays[name].T if name == "_o__weight" else arrays[name])
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = layer(tf.RaggedTensor.from_row_splits(x, splits), timestamps=buckets).values
        total = tf.reduce_sum(out * arrays["dout"])
    assert_within_noise(out, arrays["out"], arrays["noise_out"])
    gradients = tape.gradient(total, {"x": x, **names})
    for name, gradient in gradients.items():
        assert isinstance(gradient, tf.Tensor), f"the gradient of {name} is not dense"
        gradient = tf.transpose(gradient) if name == "_o__weight" else gradient
        assert_within_noise(gradient, arrays[f"d_{name}"], arrays[f"noise_d_{name}"])


def test_mtgrboost_block_equals_its_equations():
    lengths = ROW_LENGTHS["mixed"]
    x, _ = batch(lengths)
    layer = HSTU(**SIZES, form="mtgrboost", relative_bias=False)
    out = layer(x)
    projection, output = layer.projection, layer.output_projection
    projection.bias.assign(np.linspace(-0.5, 0.5, projection.bias.shape[0]))
    weights = [projection.kernel, projection.bias, output.kernel, output.bias]
    expected = mtgrboost_block_oracle(
        x.values.numpy().astype(np.float64),
        splits_of(lengths),
        [variable.numpy().astype(np.float64) for variable in weights],
        *(SIZES[name] for name in ("num_heads", "qk_dim", "value_dim")),
        scale=1.0 / 30.0,
    )
    # float32 sums of 8 to 24 terms; LayerNorm of small attended values multiplies their error.
    np.testing.assert_allclose(layer(x).values, expected, atol=2e-5)
    assert np.max(np.abs(out.values - expected)) > 1e-3  # the biases count


@pytest.mark.parametrize("form", ["research", "mtgrboost"])
def test_targets_in_one_row_equal_one_row_per_target(form):
    """One user with 3 exposures, and the same as 3 rows with one exposure each."""
    context, history, exposures = 2, 5, 3
    generator = np.random.default_rng(4)
    x = generator.normal(size=(context + history + exposures, 8)).astype(np.float32)
    stamps = np.sort(generator.integers(0, 10**6, len(x)))
    stack = [PositionEmbedding(30), HSTU(**SIZES, form=form), HSTU(**SIZES, form=form)]

    def targets(values, stamps, lengths, counts):
        splits, counts = tf.constant(splits_of(lengths)), tf.constant(counts)
        times_ = tf.RaggedTensor.from_row_splits(stamps, splits)
        hidden = stack[0](tf.RaggedTensor.from_row_splits(values, splits), num_targets=counts)
        buckets = time_buckets(times_, num_targets=counts)
        for block in stack[1:]:
            hidden = block(hidden, timestamps=buckets, num_targets=counts, contextual_length=context)
        return jagged.last(hidden, counts).values

    together = targets(x, stamps, [len(x)], [exposures])
    user = list(range(context + history))
    apart = [user + [context + history + number] for number in range(exposures)]
    each = targets(
        np.concatenate([x[rows] for rows in apart]),
        np.concatenate([stamps[rows] for rows in apart]),
        [context + history + 1] * exposures,
        [1] * exposures,
    )
    assert np.ptp(together, axis=0).min() > 1e-3  # targets do differ
    np.testing.assert_allclose(together, each, atol=5e-6)  # float32, other order of summation


@pytest.mark.parametrize("form", ["research", "mtgrboost"])
def test_graph_of_unknown_sizes_gives_gradients_for_all_weights(form):
    layer = HSTU(**SIZES, form=form)
    layer.build([None, None, 8])

    @tf.function(input_signature=SPECS, autograph=False)
    def step(x, stamps):
        with tf.GradientTape() as tape:
            out = layer(x, timestamps=stamps)
            total = tf.reduce_sum(out.values**2)
        return out, tape.gradient(total, layer.trainable_variables)

    for lengths in ROW_LENGTHS.values():
        x, stamps = batch(lengths)
        out, gradients = step(x, stamps)
        np.testing.assert_array_equal(out.row_splits, x.row_splits)
        assert out.values.shape == x.values.shape
        for variable, gradient in zip(layer.trainable_variables, gradients):
            assert gradient.shape == variable.shape and np.all(np.isfinite(gradient))
            assert np.any(gradient) == (sum(lengths) > 0), variable.name


def test_buckets_made_once_equal_buckets_made_by_the_block():
    x, stamps = batch(ROW_LENGTHS["mixed"])
    layer = HSTU(**SIZES, time_buckets=40)
    for counts in (None, tf.constant([2, 5, 1, 0, 0])):
        shared = layer(x, timestamps=time_buckets(stamps, 40, num_targets=counts), num_targets=counts)
        own = layer(x, timestamps=stamps, num_targets=counts)
        np.testing.assert_array_equal(shared.values, own.values)


def test_config_round_trip_builds_the_same_layer():
    for layer in (
        HSTU(3, 5, 7, "mtgrboost", 20, 0.3, True, 17, name="block"),
        HSTU(relative_bias=False),
        HSTU(**SIZES, time_buckets=0),
    ):
        again = HSTU.from_config(layer.get_config())
        assert again.get_config() == layer.get_config()
        layer.build([None, None, 8])
        again.build([None, None, 8])
        assert [w.shape for w in again.weights] == [w.shape for w in layer.weights]


def test_new_weights_are_drawn_apart():
    layer = HSTU(num_heads=2, qk_dim=4, value_dim=4, max_sequence_length=65, time_buckets=128)
    layer.build([None, None, 8])
    position, time = layer.position_weights.numpy(), layer.time_weights.numpy()
    assert position.shape == time.shape and np.any(position != time)
    assert abs(np.std(position) - 0.02) < 0.005  # 129 draws: standard error 0.0012


def test_dropout_works_in_training_only():
    x, stamps = batch(ROW_LENGTHS["mixed"])
    layer = HSTU(**SIZES, dropout=0.5)
    still = layer(x, timestamps=stamps).values
    np.testing.assert_array_equal(layer(x, timestamps=stamps, training=False).values, still)
    assert np.any(layer(x, timestamps=stamps, training=True).values != still)


def test_mixed_bfloat16_runs_near_float32():
    x, stamps = batch(ROW_LENGTHS["mixed"])
    full = HSTU(**SIZES)
    expected = full(x, timestamps=stamps).values
    half = HSTU(**SIZES, dtype=keras.mixed_precision.Policy("mixed_bfloat16"))
    half.build([None, None, 8])
    half.set_weights(full.get_weights())
    with tf.GradientTape() as tape:
        out = half(x, timestamps=stamps).values
        total = tf.reduce_sum(tf.cast(out, tf.float32) ** 2)
    assert out.dtype == tf.bfloat16
    # bfloat16 keeps 8 bits; a few roundings of numbers up to 4.
    np.testing.assert_allclose(tf.cast(out, tf.float32), expected, atol=0.06)
    for gradient in tape.gradient(total, half.trainable_variables):
        assert gradient.dtype == tf.float32 and np.all(np.isfinite(gradient))


def test_a_saved_model_answers_alike(tmp_path):
    module = tf.Module()
    module.blocks = [HSTU(**SIZES), HSTU(**SIZES)]

    @tf.function(input_signature=SPECS, autograph=False)
    def serve(x, stamps):
        buckets = time_buckets(stamps)
        for block in module.blocks:
            x = block(x, timestamps=buckets)
        return x

    module.serve = serve
    x, stamps = batch(ROW_LENGTHS["mixed"])
    expected = serve(x, stamps)
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    out = loaded.serve(x, stamps)
    np.testing.assert_array_equal(out.values, expected.values)
    np.testing.assert_array_equal(out.row_splits, x.row_splits)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_heads": 0}, "num_heads must be >= 1, got 0"),
        ({"max_sequence_length": 0}, "max_sequence_length must be >= 1, got 0"),
        ({"form": "meta"}, r"form must be one of \('research', 'mtgrboost'\), got 'meta'"),
        ({"time_buckets": 146}, r"time_buckets must be 0 .* 145, got 146"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        HSTU(**arguments)


def test_wrong_calls_are_named():
    x, stamps = batch([3, 2])
    with pytest.raises(ValueError, match="'block' has a time bias and needs timestamps"):
        HSTU(**SIZES, name="block")(x)
    with pytest.raises(ValueError, match="'block' has no time bias, but got timestamps"):
        HSTU(**SIZES, time_buckets=0, name="block")(x, timestamps=stamps)
    with pytest.raises(ValueError, match="x must be a RaggedTensor"):
        HSTU(**SIZES)(x.to_tensor(), timestamps=stamps)
    with pytest.raises(tf.errors.InvalidArgumentError, match="longer than max_sequence_length = 2"):
        HSTU(max_sequence_length=2, relative_bias=False)(x)
    with pytest.raises(tf.errors.InvalidArgumentError, match="timestamps must have the row length"):
        HSTU(**SIZES)(x, timestamps=batch([4, 1])[1])
