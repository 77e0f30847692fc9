import pytest

from tests.oracles.fuse_ids import fuse_ids_oracle
from tests.support.compare import assert_same_integers
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


def fuse(features, segments, num_segments, row_splits=None):
    return ops.fuse_ids(
        [tf.constant(ids, tf.int64) for ids in features],
        {f: tf.constant(splits, tf.int64) for f, splits in (row_splits or {}).items()},
        segments=segments,
        num_segments=num_segments,
        feature_names=[f"f{i}" for i in range(len(features))],
    )


@pytest.mark.parametrize(
    ("features", "segments", "num_segments"),
    [
        ([[1, 2, 2]], [0], 1),
        ([[1, 2], [], [3]], [0, 0, 1], 2),
        ([[], [5, -1]], [1, 3], 5),
        ([[], []], [0, 1], 2),
    ],
)
def test_against_the_oracle(features, segments, num_segments):
    got = fuse(features, segments, num_segments)
    for ours, oracle, what in zip(got, fuse_ids_oracle(features, segments, num_segments), got._fields):
        assert_same_integers(ours, oracle, what)


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([0, 5], "row_splits of feature 'f1' must run from 0 to 3, got first 0, last 5"),
        ([0, 2, 1, 3], "row_splits of feature 'f1' must not decrease, got 2 then 1"),
        ([1, 3], "row_splits of feature 'f1' must run from 0 to 3, got first 1"),
        ([], "row_splits of feature 'f1' must have at least one entry"),
    ],
)
def test_row_splits_that_lie_are_refused_by_the_feature(splits, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        fuse([[7], [1, 2, 3]], [0, 1], 2, {1: splits})


@pytest.mark.parametrize("segments", [[1, 0], [0, 2], [-1, 0]])
def test_segments_out_of_order_or_range_are_refused(segments):
    with pytest.raises(tf.errors.InvalidArgumentError, match="segments must not decrease"):
        fuse([[1], [2]], segments, 2)


def test_shape_function():
    shapes = inferred(
        lambda a, b: ops.fuse_ids([a, b], {}, segments=[0, 2], num_segments=3, feature_names=["a", "b"]),
        (tf.int64, [4]),
        (tf.int64, [None]),
    )
    assert shapes == [[None], [4], [2]]
