"""relative_bias.py: integer thresholds against exact arithmetic and the reference table, and the bias of every pair."""

import numpy as np
import pytest

from tests.layers.cases import ROW_LENGTHS, oracle_file, splits_of, times
from tests.oracles.relative_bias import bucket_oracle, next_times_oracle, pair_bias_oracle
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import RelativeBias, time_buckets
from tf_fusedrec.layers.relative_bias import MAX_TIME_BUCKETS, bucket_thresholds, pair_bias


def ragged_times(flat, lengths):
    return tf.RaggedTensor.from_row_splits(np.asarray(flat, np.int64), splits_of(lengths))


def buckets_of(differences, num_buckets=128):
    """Buckets of single differences: rows of one token that asks `difference` seconds later."""
    differences, ones = np.asarray(differences, np.int64), np.ones(len(differences), np.int64)
    zeros = ragged_times(np.zeros_like(differences), ones)
    pairs = time_buckets(zeros, num_buckets, query_times=ragged_times(differences, ones)).pairs
    return np.reshape(pairs, -1)


def test_each_threshold_is_the_first_integer_of_its_bucket():
    thresholds = bucket_thresholds(MAX_TIME_BUCKETS)
    assert thresholds[-1] < 2**63 and np.all(np.diff(thresholds) >= 0)
    for bucket, begin in enumerate(thresholds, start=1):
        at, before = (bucket_oracle(d, MAX_TIME_BUCKETS) for d in (begin, begin - 1))
        assert before < bucket <= at, f"bucket {bucket} begins at {begin}, but holds {before}, {at}"
    assert thresholds[0] == thresholds[1] == 2  # bucket 1 has no integer


def test_the_reference_table_is_reproduced():
    table, _ = oracle_file("bucket_table")
    np.testing.assert_array_equal(buckets_of(table["delta"]), table["bucket"])
    assert np.any(table["bucket"] != table["bucket_f64"])  # the table does hold the float32 cases


def test_sign_zero_and_the_last_bucket():
    assert list(buckets_of([0, 1, -1, 2, -2])) == [0, 0, 0, 2, 2]
    assert list(buckets_of([2**62, -(2**62)])) == [128, 128]
    assert list(buckets_of([20_600, 10**9], num_buckets=32)) == [32, 32]


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("with_targets", [False, True])
def test_bias_of_every_pair(lengths, with_targets):
    generator = np.random.default_rng(1)
    position_weights, time_weights = generator.normal(size=59), generator.normal(size=41)
    flat = times(lengths)
    targets = np.array([n // 2 for n in lengths], np.int64)
    given = tf.constant(targets) if with_targets else None
    buckets = time_buckets(ragged_times(flat, lengths), 40, num_targets=given)
    bias = RelativeBias(tf.constant(position_weights), tf.constant(time_weights), buckets)
    longest = tf.constant(max(lengths, default=0), tf.int64)
    ours = pair_bias(bias, tf.constant(lengths, tf.int64), longest, given).numpy()
    assert ours.shape == (len(lengths), longest, longest)
    for row, length in enumerate(lengths):
        mine = flat[splits_of(lengths)[row] : splits_of(lengths)[row + 1]].tolist()
        count = targets[row] if with_targets else 0
        expected = pair_bias_oracle(position_weights, time_weights, next_times_oracle(mine, count), mine, count, 40)
        # Pairs that some mask shows: no target is seen by anything but itself.
        seen = np.ones((length, length), bool)
        seen[:, length - count :] = np.eye(length, dtype=bool)[:, length - count :]
        np.testing.assert_array_equal(ours[row, :length, :length][seen], expected[seen])


def test_time_and_positions_may_be_used_alone():
    bias = RelativeBias(tf.constant(np.arange(7.0)))
    ours = pair_bias(bias, tf.constant([3, 2], tf.int64), tf.constant(3, tf.int64), None)
    np.testing.assert_array_equal(ours, [[[3, 4, 5], [2, 3, 4], [1, 2, 3]]])


def test_gradients_are_dense_and_count_pairs():
    lengths = [3, 0, 2]
    buckets = time_buckets(ragged_times([0, 10, 10, 5, 5], lengths), 16)
    position, time = tf.constant(np.zeros(9)), tf.constant(np.zeros(17))
    with tf.GradientTape() as tape:
        tape.watch([position, time])
        bias = RelativeBias(position, time, buckets)
        total = tf.reduce_sum(pair_bias(bias, tf.constant(lengths, tf.int64), tf.constant(3, tf.int64), None))
    d_position, d_time = tape.gradient(total, [position, time])
    # The position part is shared by the 3 rows: 3 pairs of distance 0, 2 of distance 1 or -1, 1 of 2 or -2.
    np.testing.assert_array_equal(d_position, [0, 0, 3, 6, 9, 6, 3, 0, 0])
    np.testing.assert_array_equal(d_time, np.bincount(buckets.pairs.numpy().ravel(), minlength=17).astype(float))


def test_what_cannot_be_done_is_named():
    lengths = tf.constant([2], tf.int64)
    longest = tf.constant(2, tf.int64)
    two = ragged_times([1, 2], [2])
    with pytest.raises(ValueError, match=r"num_buckets must be 1 .. 145 .*got 146"):
        time_buckets(two, 146)
    with pytest.raises(ValueError, match="timestamps must be int64 seconds, got int32"):
        time_buckets(tf.cast(two, tf.int32))
    with pytest.raises(ValueError, match="query_times must be a RaggedTensor"):
        time_buckets(two, query_times=two.to_tensor())
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many num_buckets as the layer's"):
        pair_bias(RelativeBias(tf.zeros(9), tf.zeros(5), time_buckets(two)), lengths, longest, None)
    with pytest.raises(ValueError, match="time_weights and buckets must be given together"):
        pair_bias(RelativeBias(tf.zeros(9), tf.zeros(5)), lengths, longest, None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="longer than N of position_weights"):
        pair_bias(RelativeBias(tf.zeros(1)), lengths, longest, None)
    other = time_buckets(ragged_times([1, 2, 3], [3]), 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="timestamps must have the row lengths"):
        pair_bias(RelativeBias(tf.zeros(9), tf.zeros(5), other), lengths, longest, None)
