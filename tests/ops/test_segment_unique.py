import numpy as np
import pytest

from tests.oracles.segment_unique import segment_unique_oracle
from tests.support.compare import assert_same_integers
from tests.support.ids import EDGE_CASES, from_segments, random_segments
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


def check(ids, splits):
    got = ops.segment_unique(tf.constant(ids, tf.int64), tf.constant(splits, tf.int64))
    for ours, oracle, what in zip(got, segment_unique_oracle(ids, splits), got._fields):
        assert_same_integers(ours, oracle, what)


@pytest.mark.parametrize("case", EDGE_CASES)
def test_edge_cases(case):
    check(*from_segments(EDGE_CASES[case]))


def test_random_small_inputs():
    for seed in range(200):
        check(*random_segments(seed))


@pytest.mark.parametrize("vocabulary", [3, 1000, 10**12])
def test_long_segments_are_cut_into_parts_and_blocks(vocabulary):
    """200,000 ids in one segment make several parts by hash and several numbering blocks. First occurrences stay in
    order.
    """
    random = np.random.default_rng(vocabulary)
    ids = random.integers(-vocabulary, vocabulary, 230_000)
    check(ids, np.array([0, 200_000, 200_000, 230_000]))


def test_ids_that_differ_in_high_bits_only():
    check(np.arange(5000, dtype=np.int64) << 50, np.array([0, 5000]))


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([0, 4], r"segment_splits must run from 0 to 3, got first 0, last 4"),
        ([1, 3], r"segment_splits must run from 0 to 3, got first 1"),
        ([0, 2, 1, 3], r"segment_splits must not decrease, got 2 then 1 at entry 2"),
        ([], r"segment_splits must have at least one entry"),
    ],
)
def test_wrong_splits_are_refused(splits, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.segment_unique(tf.constant([1, 2, 3], tf.int64), tf.constant(splits, tf.int64))


def test_wrong_rank_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ids must have rank 1, got shape \[1,2\]"):
        ops.segment_unique(tf.constant([[1, 2]], tf.int64), tf.constant([0, 2], tf.int64))


def test_shape_function():
    assert inferred(ops.segment_unique, (tf.int64, [None]), (tf.int64, [4])) == [[None], [4], [None]]
    assert inferred(ops.segment_unique, (tf.int64, [9]), (tf.int64, None)) == [[None], [None], [9]]
    with pytest.raises(ValueError, match="rank 1"):
        inferred(ops.segment_unique, (tf.int64, [2, 2]), (tf.int64, [2]))
