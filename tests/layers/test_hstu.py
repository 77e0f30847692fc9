"""hstu.py: the research block equals reference results, the other forms their equations; masks and refusals."""

import numpy as np
import pytest

from tests.layers import cases
from tests.layers.cases import ROW_LENGTHS, batch, rows_of, splits_of
from tests.oracles.hstu import mtgrboost_block_oracle, production_block_oracle, research_block_oracle
from tests.oracles.relative_bias import bucket_oracle
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import HSTU, PositionEmbedding, jagged, sequence_times

SIZES = {"num_heads": 2, "qk_dim": 4, "value_dim": 6, "max_sequence_length": 30}
SPECS = [
    tf.RaggedTensorSpec([None, None, 8], tf.float32, ragged_rank=1),
    tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1),
]


def test_research_block_equals_the_reference_forward_and_backward():
    arrays, settings = cases.oracle_file("research_layer")
    layer = HSTU(settings["heads"], settings["dqk"], settings["dv"], max_sequence_length=settings["n"])
    times, splits = cases.reference_times(arrays), tf.constant(arrays["seq_offsets"])
    layer.build([None, None, arrays["x"].shape[1]])
    variables = {
        "_uvqk": layer.projection.kernel,
        "_o__weight": layer.output_stage.projection.kernel,
        "_o__bias": layer.output_stage.projection.bias,
        "_rel_attn_bias___pos_w": layer.bias_weights.position_weights,
        "_rel_attn_bias___ts_w": layer.bias_weights.time_weights,
    }
    assert len(variables) == len(layer.trainable_variables)

    def call(x):
        return layer(tf.RaggedTensor.from_row_splits(x, splits), timestamps=times).values

    cases.assert_equals_reference(call, {"x": arrays["x"]}, variables, arrays)


def float64(*variables):
    return [variable.numpy().astype(np.float64) for variable in variables]


@pytest.mark.parametrize("form", ["research", "production", "mtgrboost"])
def test_a_block_equals_its_equations(form):
    lengths = ROW_LENGTHS["mixed"]
    x, stamps = batch(lengths)
    bias = {} if form == "research" else {"position_bias": False, "time_encoding": "none"}
    layer = HSTU(**SIZES, form=form, time_buckets=20, **bias)
    layer.build([None, None, 8])
    generator = np.random.default_rng(6)
    for variable in layer.trainable_variables:
        if form != "mtgrboost" or "norm" not in variable.name:  # the oracle has the norm as it begins
            variable.assign(generator.normal(size=variable.shape, scale=0.5))
    given = x.values.numpy().astype(np.float64), splits_of(lengths)
    sizes = [SIZES[name] for name in ("num_heads", "qk_dim", "value_dim")]
    projection, output = layer.projection, layer.output_stage.projection
    if form == "research":
        rows = rows_of(stamps.values.numpy(), lengths)
        of_place, of_age = float64(layer.bias_weights.position_weights, layer.bias_weights.time_weights)

        def bias_of(row, i, j):  # Token i asks at the time of the next token.
            age = rows[row][min(i + 1, lengths[row] - 1)] - rows[row][j]
            return of_place[SIZES["max_sequence_length"] - 1 + j - i] + of_age[bucket_oracle(age, 20)]

        weights = float64(projection.kernel, *output.weights)
        out, expected = layer(x, timestamps=stamps), research_block_oracle(*given, weights, bias_of, *sizes, 1 / 30)
    elif form == "production":
        weights = {
            "input_norm": float64(layer.input_norm_weight, layer.input_norm_bias),
            "projection": float64(projection.kernel, projection.bias),
            "norm": float64(layer.output_stage.norm_weight, layer.output_stage.norm_bias),
            "output": float64(output.kernel),
        }
        out, expected = layer(x), production_block_oracle(*given, weights, *sizes, 1 / 30)
    else:
        weights = float64(projection.kernel, projection.bias, output.kernel, output.bias)
        out, expected = layer(x), mtgrboost_block_oracle(*given, weights, *sizes, 1 / 30)
    # float32 sums of 8 to 24 terms; LayerNorm of small attended values multiplies their error.
    np.testing.assert_allclose(out.values, expected, atol=3e-5)


@pytest.mark.parametrize("divisor", ["row_length", "visible_keys"])
def test_divisors_scale_each_asking_token(divisor):
    """Records the op's `scale` by a replaced kernel, which gate and norm would hide in the output."""
    lengths, recorded = [5, 0, 3], []
    x, _ = batch(lengths)
    layer = HSTU(**SIZES, divisor=divisor, attention_window=2, position_bias=False, time_encoding="none")

    def attention(query, key, value, row_splits, *, scale, **masks):
        recorded.append((scale, masks))
        return ops.jagged_attention(query, key, value, row_splits, scale=scale, **masks)

    layer.kernels = layer.kernels._replace(attention=attention)
    layer(x)
    ((scale, masks),) = recorded
    wanted = [5] * 5 + [3] * 3 if divisor == "row_length" else [1, 2, 3, 3, 3, 1, 2, 3]
    np.testing.assert_allclose(1.0 / scale, wanted, rtol=1e-6)
    assert masks["attention_window"] == 2 and masks["min_full_length"] == 0 and masks["alpha"] == 1.0


@pytest.mark.parametrize("concat", [False, True])
def test_flops_by_hand(concat):
    layer = HSTU(**SIZES, concat=concat)  # H 2, dqk 4, dv 6
    splits, targets = tf.constant([0, 6, 6, 9], tf.int64), tf.constant([2, 0, 0])
    flops = layer.forward_flops(splits, 8, num_targets=targets, contextual_length=1)
    # Row 1: context sees context and 3 history tokens; history tokens see 2, 3, 4; a target sees all but targets.
    pairs = 4 + (2 + 3 + 4) + 2 * 5 + 3 + (2 + 3)
    by_token = 8 * 2 * (2 * 4 + 2 * 6) + (3 if concat else 1) * 12 * 8
    assert float(flops) == 2 * (9 * by_token + pairs * 2 * (4 + 6))


@pytest.mark.parametrize("form", ["research", "production", "mtgrboost"])
def test_targets_in_one_row_equal_one_row_per_target(form):
    """One user with 3 exposures equals 3 rows with one exposure each."""
    context, history, exposures = 2, 5, 3
    generator = np.random.default_rng(4)
    x = generator.normal(size=(context + history + exposures, 8)).astype(np.float32)
    stamps = np.sort(generator.integers(0, 10**6, len(x)))
    stack = [PositionEmbedding(30), HSTU(**SIZES, form=form), HSTU(**SIZES, form=form)]

    def targets(values, stamps, lengths, counts):
        splits, counts = tf.constant(splits_of(lengths)), tf.constant(counts)
        times_ = tf.RaggedTensor.from_row_splits(stamps, splits)
        hidden = stack[0](tf.RaggedTensor.from_row_splits(values, splits), num_targets=counts)
        asked = sequence_times(times_, num_targets=counts)
        for block in stack[1:]:
            hidden = block(hidden, timestamps=asked, num_targets=counts, contextual_length=context)
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
    assert np.ptp(together, axis=0).min() > 1e-3  # The targets differ.
    np.testing.assert_allclose(together, each, atol=5e-6)  # float32, other order of summation


@pytest.mark.parametrize("form", ["research", "production", "mtgrboost"])
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


def test_times_made_once_equal_times_made_by_the_block():
    x, stamps = batch(ROW_LENGTHS["mixed"])
    layer = HSTU(**SIZES, time_buckets=40)
    for counts in (None, tf.constant([2, 5, 1, 0, 0])):
        shared = layer(x, timestamps=sequence_times(stamps, num_targets=counts), num_targets=counts)
        own = layer(x, timestamps=stamps, num_targets=counts)
        np.testing.assert_array_equal(shared.values, own.values)


def test_new_weights_are_drawn_apart():
    layer = HSTU(num_heads=2, qk_dim=4, value_dim=4, max_sequence_length=65, time_buckets=128)
    layer.build([None, None, 8])
    position, time = (weights.numpy() for weights in layer.bias_weights.weights)
    assert position.shape == time.shape and np.any(position != time)
    assert abs(np.std(position) - 0.02) < 0.005  # 129 draws: standard error 0.0012


def test_wrong_calls_are_named():
    x, stamps = batch([3, 2])
    with pytest.raises(ValueError, match="'block_bias' has no time bias, but got timestamps"):
        HSTU(**SIZES, time_encoding="none", name="block")(x, timestamps=stamps)
    with pytest.raises(tf.errors.InvalidArgumentError, match="timestamps must have the row length"):
        HSTU(**SIZES)(x, timestamps=batch([4, 1])[1])
