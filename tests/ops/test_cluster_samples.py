"""The op's order keeps the shares of micro-batches and saves travelling ids."""

import zlib

import numpy as np
import pytest

from tests.support.compare import assert_same_integers
from tests.support.ids import INT64_MAX, INT64_MIN, communities, splits_of
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


def cluster(features, sizes):
    tables, ids, splits = zip(*features)
    order = ops.cluster_samples(
        [tf.constant(one, tf.int64) for one in ids],
        [tf.constant(one, tf.int64) for one in splits],
        tf.constant(sizes, tf.int64),
        tables=tables,
    )
    return order.numpy()


def check(features, sizes):
    order = cluster(features, sizes)
    assert_same_integers(np.sort(order), np.arange(sum(sizes)))
    bounds = splits_of(sizes)
    for begin, end in zip(bounds[:-1], bounds[1:]):
        assert (np.diff(order[begin:end]) > 0).all(), "samples of a micro-batch keep their order"
    return order


def travelling(features, order, sizes):
    """Counts travelling ids, once for every micro-batch that holds them."""
    part = np.empty(len(order), int)
    part[order] = np.repeat(np.arange(len(sizes)), sizes)
    return len(
        {
            (part[b], table, int(id_))
            for table, ids, splits in features
            for b in range(len(order))
            for id_ in ids[splits[b] : splits[b + 1]]
        }
    )


def sizes_of(samples, micro_batches):
    """Sizes of pieces, of which the first and the last are half as large as the others."""
    ends = np.cumsum([0, *(2 - (i in (0, micro_batches - 1)) for i in range(micro_batches))])
    each = min(samples, micro_batches)
    return np.diff([each * i // micro_batches + (samples - each) * end // ends[-1] for i, end in enumerate(ends)])


@pytest.mark.parametrize("micro_batches", [2, 5, 8])
def test_pieces_keep_their_share_and_hidden_groups_are_found(micro_batches):
    features = [(0, *communities(np.random.default_rng(0)))]
    tokens, sizes = np.diff(features[0][2]), sizes_of(240, micro_batches)
    order = check(features, sizes)
    load = np.add.reduceat(tokens[order], splits_of(sizes)[:-1]) / sizes
    assert load.max() <= 1.05 * tokens.mean()
    # The groups themselves, dealt to the pieces, are nearly optimal.
    planted = np.argsort(np.arange(240) % 8, kind="stable")
    assert travelling(features, order, sizes) <= 1.2 * travelling(features, planted, sizes)
    assert travelling(features, order, sizes) < 0.75 * travelling(features, np.arange(240), sizes)


def test_two_kinds_of_samples_are_parted():
    order = cluster([(0, [1, 2, 7, 8, 1, 2, 7, 8], [0, 2, 4, 6, 8])], [2, 2])
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}


@pytest.mark.parametrize(
    "ids, lengths",
    [
        ([], []), ([], [0] * 5), ([3], [1]), ([4] * 6, [1] * 6), (range(9), [1] * 9),
        ([5, 5, INT64_MIN, -1, INT64_MIN], [2, 2, 1]), ([1, 2, 1], [1, 1, 0, 0, 0, 0, 1]),
        ([INT64_MIN, INT64_MAX, INT64_MAX, INT64_MIN] * 3, [1, 2, 3, 2, 1, 1, 2]), ([7] * 300, [100, 200, 0, 0]),
    ],
    ids=[
        "no samples", "no ids", "one", "all the same", "all distinct", "fewer than pieces", "samples without ids",
        "extreme ids", "long samples",
    ],
)  # fmt: skip
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_corner_cases(ids, lengths, micro_batches):
    check([(0, list(ids), splits_of(lengths))], sizes_of(len(lengths), micro_batches))


def test_random_features_of_several_tables_have_the_order_of_every_version():
    """A run that another version repeats has the same batches: the checksum is that of the orders once computed."""
    checksum = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        samples = int(random.integers(0, 400))
        features = []
        for table in random.integers(-2, 3, random.integers(1, 5)).tolist():
            lengths = random.integers(0, random.integers(2, 9), samples)
            features.append((table, random.integers(-60, 60, lengths.sum()), splits_of(lengths)))
        order = check(features, sizes_of(samples, int(random.integers(1, 9))))
        checksum = zlib.crc32(order.astype("<i8").tobytes(), checksum)
    assert checksum == 609163267


def test_micro_batches_of_any_sizes():
    features = [(0, *communities(np.random.default_rng(1), samples=50))]
    for sizes in ([0, 50], [50], [49, 0, 1], [1] * 50, [10, 0, 30, 10, 0]):
        check(features, sizes)


@pytest.mark.parametrize(
    ("features", "sizes", "words"),
    [
        ([(0, [1, 2], [0, 3])], [1], "row_splits of feature 0 must run from 0 to 2, got first 0, last 3"),
        ([(0, [1, 2], [0, 2]), (0, [], [])], [1], "row_splits of feature 1 must have at least one entry"),
        ([(0, [1, 2], [0, 2, 1, 2])], [3], "row_splits of feature 0 must not decrease, got 2 then 1"),
        ([(0, [1], [0, 1]), (0, [], [0, 0, 0])], [1], "got 1 in feature 0 and 2 in feature 1"),
        ([(0, [1], [0, 1])], [2], r"sizes\[0\] must lie in \[0, 1\], got 2"),
        ([(0, [1], [0, 1])], [-1, 2], r"sizes\[0\] must lie in \[0, 1\], got -1"),
        ([(0, [1], [0, 1])], [0, 0], "sizes must sum to the 1 samples of the batch, got 0 in 2 micro-batches"),
        ([(0, [1], [0, 1])], [2**63 - 1], r"sizes\[0\] must lie in \[0, 1\], got 9223372036854775807"),
        ([(0, [], [0])], [], r"the number of sizes must lie in \[1, 4096\], got 0"),
        ([(0, [], [0])], [0] * 4097, r"the number of sizes must lie in \[1, 4096\], got 4097"),
        ([(0, [[1]], [0, 1])], [1], "ids of feature 0 must have rank 1"),
        ([(0, [1], [[0, 1]])], [1], "row_splits of feature 0 must have rank 1"),
        ([(0, [1], [0, 1])], [[1]], "sizes must have rank 1"),
    ],
)
def test_bad_input_is_refused(features, sizes, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        cluster(features, sizes)


def test_tables_that_are_not_one_per_feature_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="tables must have one entry for each of the 1 features"):
        ops.cluster_samples([tf.zeros([0], tf.int64)], [tf.zeros([1], tf.int64)], tf.zeros([1], tf.int64), tables=[])


def test_shape_function():
    shapes = inferred(
        lambda ids, splits, sizes: ops.cluster_samples([ids], [splits], sizes, tables=[0]),
        (tf.int64, [None]), (tf.int64, [6]), (tf.int64, [None]),
    )  # fmt: skip
    assert shapes == [[5]]
