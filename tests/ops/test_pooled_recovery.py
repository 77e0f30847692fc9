"""Recovery and pooling in one op, and its gradient."""

import resource

import numpy as np
import pytest

from tests.oracles.recovery import pooled_recover_grad_oracle, pooled_recover_oracle
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

DTYPES = ["float32", "float16", "bfloat16"]
# rows, lengths of the bags, columns
CASES = [(5, [3, 0, 1, 4], 3), (1, [7], 16), (40, [25] * 40, 8), (3, [], 4), (3, [0, 0], 4), (9, [1] * 50, 17)]


def case(rows, lengths, dim, dtype, seed=0):
    """Returns small integers as floats, and powers of two as scales, which are exact in all three types and orders."""
    random = np.random.default_rng(seed)
    kind = tf.as_dtype(dtype).as_numpy_dtype
    values = random.integers(-3, 4, (rows, dim)).astype(kind)
    grads = random.integers(-3, 4, (len(lengths), dim)).astype(kind)
    index = random.integers(0, rows, sum(lengths)).astype(np.int32)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    scale = (2.0 ** random.integers(-2, 2, len(lengths))).astype(np.float32)
    return values, grads, index, splits, scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "lengths", "dim"), CASES)
def test_against_the_oracle(rows, lengths, dim, dtype):
    values, grads, index, splits, scale = case(rows, lengths, dim, dtype)
    out = ops.pooled_recover(values, index, splits, scale)
    np.testing.assert_array_equal(out, pooled_recover_oracle(values, index, splits, scale))
    back = ops.pooled_recover_grad(grads, index, splits, scale, rows)
    np.testing.assert_array_equal(back, pooled_recover_grad_oracle(grads, index, splits, scale, rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[9], [0, 4, 0, 5], [1] * 9, [9, 0]])
def test_parts_of_rows_are_one_table_of_rows(sizes, dtype):
    values, _, index, splits, scale = case(9, [3, 0, 1, 4], 5, dtype)
    parts = np.split(values, np.cumsum(sizes)[:-1])
    want = pooled_recover_oracle(values, index, splits, scale)
    np.testing.assert_array_equal(ops.pooled_recover_parts(parts, index, splits, scale), want)
    padded = ops.pooled_recover_parts(parts, index, splits, scale, pad=True)
    np.testing.assert_array_equal(padded, np.concatenate([want, np.zeros([252, 5], want.dtype)]))


def test_sums_over_parts_are_in_the_order_of_n_bit_for_bit():
    random = np.random.default_rng(0)
    rows = (random.normal(size=(60, 5)) * 10.0 ** np.arange(5)).astype(np.float32)
    index, splits, ones = (
        random.integers(0, 60, 2000).astype(np.int32),
        np.arange(0, 2001, 20),
        np.ones(100, np.float32),
    )
    got = ops.pooled_recover_parts(np.split(rows, 3), index, splits, ones)
    np.testing.assert_array_equal(got, pooled_recover_oracle(rows, index, splits, ones))


@pytest.mark.parametrize(
    ("parts", "index", "words"),
    [
        ([[2, 3], [2, 4]], [0], r"rows\[1\] must have the 3 columns of rows\[0\], got 4"),
        ([[2, 3], [6]], [0], r"rows\[1\] must have rank 2"),
        ([[2, 3], [1, 3]], [3], r"index\[0\] must lie in \[0, 3\), got 3"),
        ([[2, 3], [1, 3]], [-1], r"index\[0\] must lie in \[0, 3\), got -1"),
        ([[2, 3], [1, 3]], [0, 1], "bag_splits must run from 0 to 2, got first 0, last 1"),
    ],
)
def test_wrong_parts_are_refused(parts, index, words):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=words):
        ops.pooled_recover_parts([tf.zeros(shape) for shape in parts], index, [0, 1], [1.0])


def test_sums_are_in_the_order_of_n_bit_for_bit():
    """The sum of these numbers depends on the order, so equality with the ordered oracle shows the order."""
    random = np.random.default_rng(0)
    splits = np.arange(0, 20_001, 20)
    index = random.integers(0, 37, 20_000).astype(np.int32)
    grads = (random.normal(size=(1000, 5)) * 10.0 ** np.arange(5)).astype(np.float32)
    rows, scale = grads[:37], np.full(1000, 0.3, np.float32)
    for _ in range(3):
        got = ops.pooled_recover_grad(grads, index, splits, scale, 37)
        np.testing.assert_array_equal(got, pooled_recover_grad_oracle(grads, index, splits, scale, 37))
        got = ops.pooled_recover(rows, index, splits, scale)
        np.testing.assert_array_equal(got, pooled_recover_oracle(rows, index, splits, scale))


def test_16_bit_sums_are_kept_in_float32_and_rounded_once():
    """Sums 4096 ones in float16. A float16 sum would stop at 2048, and late scaling would overflow."""
    ones, zeros = tf.ones([1, 2], tf.float16), tf.zeros([4096], tf.int32)
    np.testing.assert_array_equal(ops.pooled_recover(ones, zeros, [0, 4096], [1.0]), [[4096, 4096]])
    large = tf.fill([1, 2], tf.constant(60000.0, tf.float16))
    np.testing.assert_array_equal(ops.pooled_recover(large, zeros, [0, 4096], [1 / 4096]), large)


def test_the_gradient_is_registered_and_padding_is_zero():
    values, grads, index, splits, scale = case(6, [2, 3, 0, 1], 4, "float32")
    rows = tf.constant(values)
    with tf.GradientTape() as tape:
        tape.watch(rows)
        loss = tf.reduce_sum(ops.pooled_recover(rows, index, splits, scale) * grads)
    want = pooled_recover_grad_oracle(grads, index, splits, scale, 6)
    np.testing.assert_array_equal(tape.gradient(loss, rows), want)
    padded = ops.pooled_recover_grad(grads, index, splits, scale, 6, pad=True)
    assert padded.shape == [256, 4]
    np.testing.assert_array_equal(padded[:6], want)
    np.testing.assert_array_equal(padded[6:], np.zeros([250, 4]))


@pytest.mark.parametrize(
    ("index", "splits", "scale", "words"),
    [
        ([0, 4], [0, 2], [1.0], r"index\[1\] must lie in \[0, 4\), got 4"),
        ([0, 1], [0, 3], [1.0], "bag_splits must run from 0 to 2, got first 0, last 3"),
        ([0, 1], [0, 2, 1, 2], [1.0] * 3, "bag_splits must not decrease, got 2 then 1"),
        ([0, 1], [0, 2], [1.0, 1.0], "bag_scale must have one entry for each of the 1 bags, got 2"),
    ],
)
def test_bad_input_is_refused(index, splits, scale, words):
    splits, scale = tf.constant(splits, tf.int64), tf.constant(scale)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.pooled_recover(tf.zeros([4, 2]), index, splits, scale)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.pooled_recover_grad(tf.zeros([scale.shape[0], 2]), index, splits, scale, 4)


def test_gradients_of_another_number_of_bags_and_negative_rows_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="a row for each of the 1 bags, got 2"):
        ops.pooled_recover_grad(tf.zeros([2, 2]), [0], tf.constant([0, 1], tf.int64), [1.0], 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"num_rows must lie in \[0, 2147483647\], got -1"):
        ops.pooled_recover_grad(tf.zeros([0, 2]), tf.zeros([0], tf.int32), tf.constant([0], tf.int64), [], -1)


def test_rows_without_columns_take_no_memory():
    """Their gradient has no numbers, however many rows there are."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = ops.pooled_recover_grad(tf.zeros([1, 0]), [0], tf.constant([0, 1], tf.int64), [1.0], 2**29)
    assert got.shape == [2**29, 0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB; a count per row would be 2 GiB


def test_shape_functions():
    bags = ((tf.int32, [None]), (tf.int64, [4]), (tf.float32, [3]))
    assert inferred(ops.pooled_recover, (tf.float32, [None, 8]), *bags) == [[3, 8]]
    assert inferred(ops.pooled_recover_grad, (tf.float32, [3, 8]), *bags, (tf.int64, [])) == [[None, 8]]
