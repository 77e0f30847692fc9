import numpy as np
import pytest

from tests.oracles.initial_rows import initial_row_oracle, philox4x32
from tests.support.ids import INT64_MAX, INT64_MIN
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

SEEDS = [12345678901234567, -42]
DISTRIBUTIONS = [("constant", 0.5, 0.0), ("uniform", -1.0, 3.0), ("normal", 0.1, 2.0), ("truncated_normal", -1.0, 0.5)]


def draw(ids, splits, distribution, a, b, dim=6, dtype=tf.float32, exists=None, rows=None):
    rows = tf.zeros([len(ids), dim], dtype) if rows is None else rows
    exists = np.zeros(len(ids), bool) if exists is None else exists
    return ops.initial_rows(
        rows, tf.constant(exists, tf.bool), tf.constant(ids, tf.int64), tf.constant(splits, tf.int64),
        seeds=SEEDS, distribution=distribution, a=a, b=b,
    ).numpy()  # fmt: skip


def test_philox_known_answers():
    """Tests the vectors that Random123 publishes for philox4x32-10."""
    assert philox4x32([0] * 4, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox4x32([ones] * 4, 2**64 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize(("distribution", "a", "b"), DISTRIBUTIONS)
@pytest.mark.parametrize("dim", [1, 4, 6])
def test_against_the_oracle(distribution, a, b, dim):
    ids, splits = [0, 1, -1, INT64_MIN, INT64_MAX, 1], [0, 5, 6]
    got = draw(ids, splits, distribution, a, b, dim)
    want = [initial_row_oracle(distribution, a, b, SEEDS[n >= 5], i, dim) for n, i in enumerate(ids)]
    # Both compute in double and round once; the math libraries may differ in the last bit of a double.
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_16_bit_rows_are_the_rounded_float_rows(dtype):
    wide = draw([3, 4], [0, 2, 2], "normal", 0.0, 1.0)
    np.testing.assert_array_equal(draw([3, 4], [0, 2, 2], "normal", 0.0, 1.0, dtype=dtype), tf.cast(wide, dtype))


def test_existing_rows_pass_through_and_the_input_is_not_changed():
    rows = tf.constant(np.arange(12.0).reshape(2, 6), tf.float32)
    got = draw([8, 9], [0, 2, 2], "constant", -7.0, 0.0, exists=[True, False], rows=rows)
    np.testing.assert_array_equal(got, [np.arange(6.0), [-7.0] * 6])
    np.testing.assert_array_equal(rows, np.arange(12.0).reshape(2, 6))


def test_rows_are_distinct_and_have_the_moments_of_their_distribution():
    n = 20_000
    for distribution, mean, deviation in [
        ("normal", 0.0, 1.0),
        ("uniform", 0.5, 12**-0.5),
        ("truncated_normal", 0.0, 0.8796),
    ]:
        rows = draw(np.arange(n), [0, n, n], distribution, 0.0, 1.0, dim=8)
        assert len(np.unique(rows, axis=0)) == n
        # 160,000 draws: the mean's standard error is 0.0025, the deviation's below 0.002; five of them.
        assert abs(rows.mean() - mean) < 0.0125
        assert abs(rows.std() - deviation) < 0.01
        assert np.abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.05


def test_an_id_has_another_row_in_another_table():
    rows = draw([5, 5], [0, 1, 2], "normal", 0.0, 1.0)
    assert (rows[0] != rows[1]).all()


def test_shapes_that_disagree_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="one entry for each of the 2 ids, got 2 and 1"):
        draw([1, 2], [0, 1, 2], "constant", 0.0, 0.0, exists=[True])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"len\(seeds\) \+ 1 = 3 entries, got 2"):
        draw([1, 2], [0, 2], "constant", 0.0, 0.0)


def test_shape_function():
    op = lambda r, e, i, s: ops.initial_rows(r, e, i, s, seeds=[1], distribution="constant", a=0.0)  # noqa: E731
    assert inferred(op, (tf.float32, [None, 8]), (tf.bool, [3]), (tf.int64, [3]), (tf.int64, [2])) == [[None, 8]]
