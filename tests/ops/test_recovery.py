import numpy as np
import pytest

from tests.oracles.recovery import recover_grad_oracle, recover_oracle
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

DTYPES = ["float32", "float16", "bfloat16"]


def rows_of(dtype, n, dim, seed=0):
    """Returns small integers as floats. Every order of summation is exact in all three types."""
    return np.random.default_rng(seed).integers(-3, 4, (n, dim)).astype(tf.as_dtype(dtype).as_numpy_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "num", "dim"), [(5, 13, 3), (1, 7, 16), (40, 1000, 8), (3, 0, 4), (0, 0, 4), (4, 9, 1)]
)
def test_recover_and_its_gradient(dtype, rows, num, dim):
    values, grads = rows_of(dtype, rows, dim), rows_of(dtype, num, dim, 1)
    index = np.random.default_rng(2).integers(0, max(rows, 1), num).astype(np.int32)
    out = ops.recover(tf.constant(values), tf.constant(index))
    np.testing.assert_array_equal(out, recover_oracle(values, index))
    summed = ops.recover_grad(tf.constant(grads), tf.constant(index), rows)
    np.testing.assert_array_equal(summed, recover_grad_oracle(grads, index, rows))


def test_sum_is_in_the_order_of_n_bit_for_bit():
    """The sum of these numbers depends on the order, so equality with the ordered oracle shows the order."""
    grads = (np.random.default_rng(0).normal(size=(20_000, 5)) * 10.0 ** np.arange(5)).astype(np.float32)
    index = np.random.default_rng(1).integers(0, 37, 20_000).astype(np.int32)
    want = recover_grad_oracle(grads, index, 37)
    assert (want != recover_grad_oracle(grads[::-1], index[::-1], 37)).any()
    for _ in range(3):
        np.testing.assert_array_equal(ops.recover_grad(grads, index, 37), want)


def test_16_bit_sums_are_kept_in_float32():
    """Sums 4096 ones in float16. A float16 sum would stop at 2048."""
    ones = tf.ones([4096, 2], tf.float16)
    np.testing.assert_array_equal(ops.recover_grad(ones, tf.zeros([4096], tf.int32), 1), [[4096, 4096]])


def test_padding_is_zero_and_bucketed():
    rows, index = rows_of("float32", 5, 3), np.arange(5, dtype=np.int32)
    out = ops.recover(rows, index, pad=True)
    assert out.shape == [256, 3]
    np.testing.assert_array_equal(out[:5], rows)
    np.testing.assert_array_equal(out[5:], np.zeros([251, 3]))
    summed = ops.recover_grad(out, index, 7, pad=True)
    assert summed.shape == [256, 3]
    np.testing.assert_array_equal(summed[:5], rows)
    np.testing.assert_array_equal(summed[5:], np.zeros([251, 3]))


@pytest.mark.parametrize("pad", [False, True])
def test_registered_gradients(pad):
    """d/drows and d/dgrads equal plain gather and its transpose. Small integers are exact."""
    rows, index = tf.constant(rows_of("float32", 4, 3)), tf.constant([3, 0, 3, 3], tf.int32)
    seen = tf.constant(rows_of("float32", 4, 3, 5))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([rows, seen])
        ours = tf.reduce_sum(ops.recover(rows, index, pad=pad)[:4] * seen)
        plain = tf.reduce_sum(tf.gather(rows, index) * seen)
        back = tf.reduce_sum(ops.recover_grad(seen, index, 5, pad=pad)[:5] ** 2)
        plain_back = tf.reduce_sum(tf.math.unsorted_segment_sum(seen, index, 5) ** 2)
    np.testing.assert_array_equal(tape.gradient(ours, rows), tf.convert_to_tensor(tape.gradient(plain, rows)))
    np.testing.assert_array_equal(tape.gradient(back, seen), tape.gradient(plain_back, seen))


@pytest.mark.parametrize("bad", [-1, 4])
def test_index_out_of_range_is_refused(bad):
    words = rf"index\[1\] must lie in \[0, 4\), got {bad}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.recover(tf.zeros([4, 2]), tf.constant([0, bad], tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.recover_grad(tf.zeros([2, 2]), tf.constant([0, bad], tf.int32), 4)


def test_too_few_gradients_and_negative_rows_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="a row for each of the 3 entries of index, got 2"):
        ops.recover_grad(tf.zeros([2, 2]), tf.zeros([3], tf.int32), 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"num_rows must lie in \[0, 2147483647\], got -1"):
        ops.recover_grad(tf.zeros([0, 2]), tf.zeros([0], tf.int32), -1)


def test_shape_functions():
    assert inferred(ops.recover, (tf.float32, [None, 8]), (tf.int32, [5])) == [[5, 8]]
    assert inferred(lambda r, i: ops.recover(r, i, pad=True), (tf.float32, [4, 8]), (tf.int32, [5])) == [[None, 8]]
    assert inferred(ops.recover_grad, (tf.float32, [4, 8]), (tf.int32, [4]), (tf.int64, [])) == [[None, 8]]
