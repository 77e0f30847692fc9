"""The products of losses/negatives.py equal a gather of all rows, which they must never do themselves."""

import numpy as np
import pytest

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.losses import negatives


def gathered(left, right, chosen, normalize):
    """Computes the plain form, which TensorFlow differentiates."""
    rows = tf.gather(tf.cast(right, left.dtype), chosen)
    if normalize:
        rows /= tf.maximum(tf.norm(rows, axis=-1, keepdims=True), 1e-6)
    return tf.linalg.matvec(rows, left)


def value_and_gradients(products, left, right, chosen, normalize, weights):
    with tf.GradientTape() as tape:
        tape.watch([left, right])
        result = products(left, right, chosen, normalize)
        total = tf.reduce_sum(result * weights)
    return [result, *map(tf.convert_to_tensor, tape.gradient(total, [left, right]))]


@pytest.mark.parametrize("positions, rows, number", [(0, 3, 2), (1, 1, 1), (50, 20, 7), (3, 5, 0)])
@pytest.mark.parametrize("normalize", [False, True])
def test_segments_equal_gathering_all(positions, rows, number, normalize, monkeypatch):
    monkeypatch.setattr(negatives, "_SEGMENT_VALUES", 90)  # two positions of 7 rows of 5 columns
    generator = np.random.default_rng(2)
    left, right = (tf.constant(generator.normal(size=(n, 5))) for n in (positions, rows))
    chosen = generator.integers(0, rows, (positions, number)).astype(np.int32)
    inputs = left, right, tf.constant(chosen), normalize, generator.normal(size=(positions, number))
    ours = value_and_gradients(tf.function(negatives.segmented_products), *inputs)
    for mine, theirs in zip(ours, value_and_gradients(gathered, *inputs)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)  # float64 on both sides


def test_a_row_of_length_0_gives_0_and_the_gradient_at_the_floor():
    left, zero = tf.constant([[1.0, 2.0]]), tf.zeros([1, 2])
    result, d_left, d_zero = value_and_gradients(
        negatives.segmented_products, left, zero, tf.constant([[0]]), True, 1.0
    )
    assert not np.any(result) and not np.any(d_left)
    np.testing.assert_allclose(d_zero, 1e6 * left.numpy(), rtol=1e-6)  # float32


def test_gradients_of_16_bit_rows_are_not_narrowed():
    generator = np.random.default_rng(3)
    left = tf.constant(generator.normal(size=(6, 8)), tf.float32)
    rows = tf.constant(generator.normal(size=(4, 8)), tf.float16)
    chosen = tf.constant(generator.integers(0, 4, (6, 3)))
    # A mean over a million positions has gradients below the smallest float16, 6e-8, which would become zeros.
    inputs = left, rows, chosen, True, tf.constant(1e-9)
    _, d_left, d_rows = value_and_gradients(negatives.segmented_products, *inputs)
    assert d_rows.dtype == tf.float32
    wide = value_and_gradients(gathered, left, tf.cast(rows, tf.float32), chosen, True, 1e-9)
    np.testing.assert_allclose(d_rows, wide[2], rtol=1e-4, atol=1e-14)  # float32 sums in another order
    np.testing.assert_allclose(d_left, wide[1], rtol=1e-4, atol=1e-14)
    assert np.all(np.any(d_rows.numpy(), axis=1) == np.isin(np.arange(4), chosen))


@pytest.mark.parametrize("positions", [0, 1, 1100])  # 1100: three blocks of rows
def test_products_with_a_catalogue_equal_gathering(positions):
    generator = np.random.default_rng(4)
    left, right = (tf.constant(generator.normal(size=(n, 5))) for n in (positions, 8))
    chosen = tf.constant(generator.integers(0, 8, (positions, 6)))
    weights = generator.normal(size=(positions, 6))
    ours = value_and_gradients(
        lambda left, right, chosen, _: negatives.chosen_products(left, right, chosen),
        left,
        right,
        chosen,
        0,
        weights,
    )
    for mine, theirs in zip(ours, value_and_gradients(gathered, left, right, chosen, False, weights)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-11)  # float64 on both sides
