"""jagged_attention against the dense definitions: lengths, masks and biases of all kinds, forward and backward."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention import Arrays, Case, assert_close
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import stock_attention

LENGTHS = {
    "mixed": (7, 24, 1, 0, 13),
    "around_a_panel": (63, 64, 65, 130),
    "one_row": (5,),
    "empty_rows": (0, 3, 0, 0),
    "all_rows_empty": (0, 0),
    "no_rows": (),
}
DIMS = (*range(1, 21), 25, 33, 50, 64)  # fewer columns than a vector, a rest behind vectors, and none
MASKS = {
    "causal": {},
    "targets": {"targets": 5},
    "context": {"contextual_length": 3},
    "context_targets": {"contextual_length": 3, "targets": 9},
    "window": {"attention_window": 4},
    "window_full": {"attention_window": 3, "min_full_length": 4},
    "semi_local": {"attention_window": 4, "global_window": 3},
    "semi_local_context": {"attention_window": 9, "global_window": 20, "contextual_length": 3, "targets": 5},
    "target_groups": {"targets": 9, "target_group_size": 2},
    "everything": {
        "contextual_length": 2, "targets": 70, "attention_window": 20, "min_full_length": 6, "target_group_size": 3,
        "global_window": 30,
    },
}  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("bias", [{}, {"position": True, "time": "buckets"}], ids=["plain", "biased"])
def test_masks(lengths, masks, bias):
    assert_close(Case(lengths, **masks, **bias))


@pytest.mark.parametrize(
    "case",
    [
        Case((7, 0, 63), 2, 16, 16, dropout=0.3),  # short rows
        Case((90, 0, 5), 2, dropout=0.5, position=True, time="buckets", targets=4, contextual_length=2),
        Case((600, 3), 1, 4, 4, dropout=0.1, time="power", attention_window=90),
        Case((90, 600, 4), 2, 4, 6, dropout=0.3, queries=(0, 520, 4)),
    ],
    ids=["short", "biased", "units", "queries"],
)
def test_dropout_hides_pairs_by_seed_row_head_key_and_query(case):
    assert_close(case)


def test_dropout_hides_the_share_that_is_asked_for():
    """With equal scores and one value, an output is the share of the kept keys; its mean over seeds is the output."""
    ones, splits = tf.ones([400, 3, 4]), tf.constant([0, 300, 400], tf.int64)
    attend = lambda **more: ops.jagged_attention(ones, ones, ones, splits, scale=1.0, **more).numpy()[:, :, 0]  # noqa: E731
    whole, found = attend(), []
    for seed in range(20):
        found.append(attend(dropout=0.25, dropout_seed=tf.constant(seed, tf.int64)))
        np.testing.assert_array_equal(found[-1], attend(dropout=0.25, dropout_seed=tf.constant(seed, tf.int64)))
    # One pair is 0 or 4/3 of itself, with deviation sqrt(1/3); five deviations of sums of independent pairs.
    pairs = np.round(whole / whole[0]) * len(found)
    assert np.all(np.abs(np.mean(found, axis=0) / whole - 1) < 5 * np.sqrt(1 / 3 / pairs))
    total = np.sum(found) / np.sum(whole) / len(found)
    assert abs(total - 1) < 5 * np.sqrt(1 / 3 / pairs.sum())
    assert np.any(found[0][:, 0] != found[0][:, 1]) and np.any(found[0][:100] != found[0][300:])
    for wrong in ({"dropout": 0.5}, {"dropout_seed": tf.constant(1, tf.int64)}, {"dropout": 1.0, "dropout_seed": 1}):
        with pytest.raises(ValueError, match="dropout must be >= 0 and < 1, with dropout_seed exactly where it is > 0"):
            attend(**wrong)


@pytest.mark.parametrize("heads", [1, 2])
def test_rows_of_several_units(heads):
    """The rows exceed the keys of one unit, so gradients of queries come from several units."""
    assert_close(Case((1100, 3, 700), heads, 4, 4))
    assert_close(Case((600,), heads, 4, 4, contextual_length=2, targets=80, position=True, time="buckets"))


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_any_case(data):
    draw = data.draw
    case = Case(
        lengths=tuple(draw(st.lists(st.one_of(st.integers(0, 12), st.integers(60, 140)), max_size=4))),
        heads=draw(st.integers(1, 3)),
        qk_dim=draw(st.sampled_from(DIMS)),
        value_dim=draw(st.sampled_from(DIMS)),
        targets=draw(st.one_of(st.none(), st.integers(0, 40))),
        contextual_length=draw(st.integers(0, 5)),
        attention_window=draw(st.sampled_from([0, 1, 7, 64])),
        min_full_length=draw(st.sampled_from([0, 1, 30])),
        global_window=draw(st.sampled_from([0, 1, 30, 2**62])),
        target_group_size=draw(st.sampled_from([1, 2, 5, 2**62])),
        position=draw(st.booleans()),
        time=draw(st.sampled_from([None, "buckets", "power", "exponential", "stretched"])),
        far=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    case = dataclasses.replace(case, one_time=case.targets is not None and draw(st.booleans()))
    if not case.attention_window:
        case = dataclasses.replace(case, global_window=0)
    if draw(st.booleans()):
        case = dataclasses.replace(case, queries=tuple(draw(st.integers(0, length)) for length in case.lengths))
    # Buckets take any difference. A function of 10^18 seconds is 0 in float32 or beyond its range.
    case = dataclasses.replace(case, far=case.far and case.time == "buckets")
    if draw(st.booleans()):
        lengths = st.sampled_from([0, 1, 4, 200, 2**62])
        contexts = draw(st.lists(lengths, min_size=len(case.lengths), max_size=len(case.lengths)))
        case = dataclasses.replace(case, contextual_length=tuple(contexts))
    assert_close(case)
    if case.position or case.time is not None:
        assert_close(case, channels=True)


@pytest.mark.parametrize("channels", [False, True])
def test_gradients_equal_differences_of_the_definitions(channels):
    """Compares with central differences of the float64 oracle along random directions, without another gradient."""
    arrays = Arrays(Case((6, 0, 9), targets=2, contextual_length=2, position=True, time="stretched"))
    found = arrays.results(arrays.ours, tf.float32, channels)
    names = [name.removeprefix("d_") for name in found if name != "out"]
    cotangent = arrays.cotangent(found["out"].shape)
    for seed, name in enumerate(names):
        step = 1e-5 * np.random.default_rng(seed).normal(size=arrays.weights[name].shape)

        def total(sign, name=name, step=step):
            moved = {n: w.astype(np.float64) for n, w in arrays.weights.items()}
            moved[name] += sign * step
            return np.sum(arrays.out(moved, channels) * cotangent)

        # Truncation and rounding of the difference are near 1e-10 of its size, the op's float32 near 1e-6.
        want = (total(1.0) - total(-1.0)) / 2
        scale = np.sum(np.abs(found[f"d_{name}"] * step))
        assert abs(np.sum(found[f"d_{name}"] * step) - want) <= 1e-5 * scale, name


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_no_worse_than_a_plain_implementation(dtype, channels):
    """NVIDIA's operators allow twice the error of a plain implementation in that type, five times backward."""
    arrays = Arrays(Case((90, 13), 2, 16, 16, targets=3, position=True, time="buckets"))
    dtype = tf.as_dtype(dtype)

    def plain(weights, channels):
        return arrays.computed(stock_attention, {name: tf.cast(w, dtype) for name, w in weights.items()}, channels)

    rounded = Arrays(arrays.case)
    rounded.weights = {n: tf.cast(tf.cast(w, dtype), tf.float32).numpy() for n, w in arrays.weights.items()}
    exact = rounded.exact(channels)
    ours = rounded.results(rounded.ours, dtype, channels)
    theirs = rounded.results(plain, dtype, channels)
    for name, want in exact.items():
        factor = 2.0 if name == "out" else 5.0
        error, limit = (np.max(np.abs(got[name] - want)) for got in (ours, theirs))
        assert error <= factor * limit, f"{name}: {error:.3g}, plain {limit:.3g}"


def test_rows_do_not_depend_on_their_neighbours_and_a_graph_not_on_its_sizes():
    signature = [tf.TensorSpec([None, 2, 4])] * 3 + [tf.TensorSpec([None], tf.int64)]

    @tf.function(input_signature=signature, autograph=False)
    def attend(query, key, value, splits):
        with tf.GradientTape() as tape:
            tape.watch(value)
            out = ops.jagged_attention(query, key, value, splits, scale=0.1)
        return out, tape.gradient(out, value)

    for lengths in LENGTHS.values():
        arrays = Arrays(Case(lengths, 2, 4, 4))
        parts, splits = list(arrays.weights.values()), arrays.case.splits
        together, gradient = attend(*parts, splits)
        for begin, end in zip(splits[:-1], splits[1:]):
            alone, its_gradient = attend(*(part[begin:end] for part in parts), np.array([0, end - begin]))
            np.testing.assert_array_equal(alone, together[begin:end])
            np.testing.assert_array_equal(its_gradient, gradient[begin:end])


def test_results_do_not_depend_on_chance():
    arrays = Arrays(Case((1300, 700, 20), 2, 8, 8, position=True, time="buckets"))
    first = arrays.results(arrays.ours, tf.float32)
    for _ in range(3):
        for name, again in arrays.results(arrays.ours, tf.float32).items():
            np.testing.assert_array_equal(again, first[name])


def test_large_scores_stay_finite():
    query = tf.constant(np.array([[[300.0]], [[-300.0]]], np.float32))
    with tf.GradientTape() as tape:
        tape.watch(query)
        out = ops.jagged_attention(query, query, tf.ones([2, 1, 1]), [0, 2], scale=1.0)
    np.testing.assert_allclose(out, [[[90_000.0]], [[90_000.0]]], rtol=1e-6)  # SiLU(-90000) is 0
    np.testing.assert_allclose(tape.gradient(out, query), [[[600.0]], [[-600.0]]], rtol=1e-6)


def test_sequence_times_follow_the_research_rule():
    stamps = tf.RaggedTensor.from_row_lengths(tf.constant([10, 20, 30, 5, 7, 9], tf.int64), [3, 0, 2, 1])
    asks, answers = ops.sequence_times(stamps)
    np.testing.assert_array_equal(answers, stamps.values)
    np.testing.assert_array_equal(asks, [20, 30, 30, 7, 7, 9])
    asks, _ = ops.sequence_times(stamps, num_targets=tf.constant([2, 0, 1, 1]))
    np.testing.assert_array_equal(asks, [10, 20, 30, 5, 7, 9])
    asks, _ = ops.sequence_times(stamps, query_times=stamps + 1)
    np.testing.assert_array_equal(asks, stamps.values + 1)


def test_shape_functions():
    def attend(q, k, v, splits):
        return ops.jagged_attention(q, k, v, splits, scale=1.0)

    def channels(v, splits, weights):
        return ops.bias_attention(v, splits, bias=ops.RelativeBias(weights))

    tokens = (tf.float32, [None, 2, 8])
    assert inferred(attend, tokens, (tf.float32, [7, None, 8]), (tf.float32, [None, None, 3]), (tf.int64, [3])) == [
        [7, 2, 3]
    ]
    assert inferred(channels, tokens, (tf.int64, [3]), (tf.float32, [None])) == [[None, 2, 8]]
    with pytest.raises(ValueError, match="must be rank 3"):
        inferred(attend, tokens, (tf.float32, [7, 16]), (tf.float32, [None, 2, 3]), (tf.int64, [3]))
