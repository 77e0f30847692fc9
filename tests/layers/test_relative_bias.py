"""relative_bias.py: integer thresholds equal exact arithmetic and the reference table, also inside the op."""

import numpy as np
import pytest

from tests.layers.cases import oracle_file
from tests.oracles.relative_bias import bucket_oracle
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers.relative_bias import MAX_TIME_BUCKETS, bucket_thresholds


def buckets_of(differences, num_buckets=128):
    """Returns the op's buckets of single differences, from rows of one token queried `difference` seconds later."""
    differences = np.asarray(differences, np.int64)
    numbers = tf.range(num_buckets + 1, dtype=tf.float32)
    table = ops.BucketTable(numbers, tf.constant(bucket_thresholds(num_buckets)))
    times = ops.SequenceTimes(tf.constant(differences), tf.zeros(len(differences), tf.int64))
    bias = ops.RelativeBias(time=table, times=times)
    splits = tf.range(len(differences) + 1, dtype=tf.int64)
    return np.reshape(ops.bias_attention(tf.ones([len(differences), 1, 1]), splits, bias=bias), -1)


def test_each_threshold_is_the_first_integer_of_its_bucket():
    thresholds = bucket_thresholds(MAX_TIME_BUCKETS)
    assert thresholds[-1] < 2**63 and np.all(np.diff(thresholds) >= 0)
    for bucket, begin in enumerate(thresholds, start=1):
        at, before = (bucket_oracle(d, MAX_TIME_BUCKETS) for d in (begin, begin - 1))
        assert before < bucket <= at, f"bucket {bucket} begins at {begin}, but holds {before}, {at}"
    assert thresholds[0] == thresholds[1] == 2  # bucket 1 has no integer


def test_the_op_finds_the_bucket_of_every_border():
    thresholds = bucket_thresholds(MAX_TIME_BUCKETS)
    around = np.concatenate([thresholds - 1, thresholds, thresholds[:-1] + 1])
    wanted = [bucket_oracle(d, MAX_TIME_BUCKETS) for d in around]
    np.testing.assert_array_equal(buckets_of(around, MAX_TIME_BUCKETS), wanted)
    np.testing.assert_array_equal(buckets_of(-around, MAX_TIME_BUCKETS), wanted)


def test_the_reference_table_is_reproduced():
    table, _ = oracle_file("bucket_table")
    np.testing.assert_array_equal(buckets_of(table["delta"]), table["bucket"])
    assert np.any(table["bucket"] != table["bucket_f64"])  # The table holds the float32 cases.


def test_sign_zero_and_the_last_bucket():
    assert list(buckets_of([0, 1, -1, 2, -2])) == [0, 0, 0, 2, 2]
    assert list(buckets_of([2**62, -(2**62), 2**63 - 1, -(2**63)])) == [128] * 4
    assert list(buckets_of([20_600, 10**9], num_buckets=32)) == [32, 32]


def test_refusals():
    for wrong in (0, 146):
        with pytest.raises(ValueError, match=rf"num_buckets must be 1 .. 145 .*got {wrong}"):
            bucket_thresholds(wrong)
