"""negatives.py draws with the right frequencies, shares negatives equally often, and its products equal a gather."""

import numpy as np
import pytest

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.losses import negatives
from tf_fusedrec.losses.negatives import Sampler, other_positions, reuse

SEED = np.array([7, 3])


def test_uniform_draws_reach_the_whole_catalogue_equally():
    drawn = Sampler(5).draw(tf.constant([2000, 5]), SEED, tf.constant(2000)).numpy()
    shares = np.bincount(drawn.ravel(), minlength=5) / 10_000
    # The limit is five standard deviations of a share of 0.2 among 10,000.
    np.testing.assert_allclose(shares, 0.2, atol=5 * np.sqrt(0.2 * 0.8 / 10_000))


def test_draws_by_frequency_follow_the_counts_and_log_q_tells_them():
    counts = np.array([0, 6, 1, 0, 3])
    sampler = Sampler(5, "frequency", counts)
    drawn = sampler.draw(tf.constant([2000, 5]), SEED, tf.constant(2000)).numpy()
    shares = np.bincount(drawn.ravel(), minlength=5) / 10_000
    assert not shares[0] and not shares[3]
    np.testing.assert_allclose(shares, counts / 10, atol=5 * np.sqrt(0.25 / 10_000))
    np.testing.assert_allclose(sampler.log_q(np.array([1, 2, 4])), np.log([0.6, 0.1, 0.3]), rtol=1e-6)  # float32
    assert np.isfinite(sampler.log_q(np.array([0]))).all()


def test_draws_in_the_batch_are_positions_of_it():
    sampler = Sampler(50, "in_batch")
    drawn = sampler.draw(tf.constant([300, 4]), SEED, tf.constant(3)).numpy()
    assert set(drawn.ravel()) == {0, 1, 2}
    assert sampler.draw(tf.constant([0, 4]), SEED, tf.constant(0)).shape == [0, 4]


@pytest.mark.parametrize("positions", [0, 1, 2, 3, 40])
def test_every_column_shares_each_position_once_and_never_with_itself(positions):
    source = other_positions(tf.constant(positions), 6, SEED).numpy()
    assert source.shape == (positions, 6)
    for column in source.T:
        assert sorted(column) == list(range(positions))
    own = source == np.arange(positions)[:, np.newaxis]
    assert own.all() if positions == 1 else not own.any()
    if positions == 40:
        # The cycle is a shuffle, not a rotation.
        assert len(set(map(tuple, (source - np.arange(40)[:, np.newaxis]) % 40))) > 30


def test_reuse_takes_the_column_of_the_other_position():
    values = tf.constant([[1, 2], [3, 4], [5, 6]])
    source = tf.constant([[1, 1, 2, 0], [2, 0, 0, 2], [0, 1, 1, 1]])
    np.testing.assert_array_equal(reuse(values, source), [[3, 4, 5, 2], [5, 2, 1, 6], [1, 4, 3, 4]])
    assert reuse(values[:0], source[:0]).shape == [0, 4]


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


def test_refusals():
    with pytest.raises(ValueError, match="sampling must be one of"):
        Sampler(3, "popular")
    with pytest.raises(ValueError, match=r"counts must hold one number for each of 3 items, got shape \(2,\)"):
        Sampler(3, "uniform", np.ones(2))
    for counts in (None, np.zeros(3)):
        with pytest.raises(ValueError, match="sampling 'frequency' needs counts, some above 0"):
            Sampler(3, "frequency", counts)
    with pytest.raises(ValueError, match="log_q needs counts"):
        Sampler(3, "in_batch").log_q(np.array([0]))
