import numpy as np
import pytest

from tests.oracles.fuse_ids import bags_oracle, fuse_ids_oracle
from tests.support.compare import assert_same_integers
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


def fuse(features, segments, num_segments, row_splits=None, bag_sizes=None, combiners=None):
    return ops.fuse_ids(
        [tf.constant(ids, tf.int64) for ids in features],
        {f: tf.constant(splits, tf.int64) for f, splits in (row_splits or {}).items()},
        segments=segments,
        num_segments=num_segments,
        feature_names=[f"f{i}" for i in range(len(features))],
        bag_sizes=bag_sizes or [1] * len(features),
        combiners=combiners or ["sum"] * len(features),
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
    ("features", "row_splits", "bag_sizes", "combiners"),
    [
        ([[1, 2, 3]], {}, [1], ["sum"]),
        ([[1, 2, 3, 4], [5, 6], []], {}, [2, 1, 3], ["mean", "sum", "sqrtn"]),
        ([[1, 2, 3], [4]], {0: [0, 0, 2, 3], 1: [0, 1]}, [0, 0], ["mean", "sqrtn"]),
        ([[], [7, 8]], {0: [0, 0, 0], 1: [0, 2]}, [0, 1], ["mean", "sum"]),
        ([[]], {0: [0]}, [0], ["sqrtn"]),
    ],
)
def test_bags_against_the_oracle(features, row_splits, bag_sizes, combiners):
    got = fuse(features, [0] * len(features), 1, row_splits, bag_sizes, combiners)
    splits, scale, bags = bags_oracle(features, row_splits, bag_sizes, combiners)
    assert_same_integers(got.bag_splits, splits)
    assert_same_integers(got.feature_bags, bags)
    np.testing.assert_allclose(got.bag_scale, scale, rtol=1e-7)  # one rounding of a root


@pytest.mark.parametrize("size", [0, 2, -1])
def test_bags_that_do_not_fit_are_refused_by_the_feature(size):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"bag_sizes of feature 'f1' must divide its 3 .*got {size}"
    ):
        fuse([[7], [1, 2, 3]], [0, 0], 1, bag_sizes=[1, size])


def test_an_unknown_combiner_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="combiners must be 'sum', 'mean' or 'sqrtn', got 'max'"):
        fuse([[7]], [0], 1, combiners=["max"])


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
        lambda a, b: ops.fuse_ids(
            [a, b],
            {},
            segments=[0, 2],
            num_segments=3,
            feature_names=["a", "b"],
            bag_sizes=[1, 1],
            combiners=["sum"] * 2,
        ),
        (tf.int64, [4]),
        (tf.int64, [None]),
    )
    assert shapes == [[None], [4], [None], [None], [2]]
