"""Partial sums of bags: both ops of several ranks over a network of lists, with a table of whole numbers."""

import numpy as np
import pytest

from tests.oracles.rank_partition import owner_oracle
from tests.support.ids import INT64_MAX, INT64_MIN
from tf_fusedrec import ops, tf

ROW_BYTES = 64
SPREAD = list(range(100, 130))
CASES = {  # bags by segment
    "example": [[[7, 4, 3], [8, 4, 4], [5]]],
    "long bags": [[SPREAD, SPREAD[:20], []], [[], SPREAD]],
    "one id in all bags": [[[6, 6, 6, 6]] * 9],
    "one segment of each kind": [[[1, 2]] * 40, [SPREAD] * 2],
    "single ids": [[[i] for i in SPREAD]],
    "extreme": [[[INT64_MIN, 0, -1, INT64_MAX, INT64_MIN, 5, 6, 7, 8]]],
    "empty": [[[], []], []],
}


def random_bags(seed):
    random = np.random.default_rng(seed)
    vocabulary = int(random.choice([5, 50, 5000]))
    bag = lambda: random.integers(-vocabulary, vocabulary, random.integers(0, 30)).tolist()  # noqa: E731
    return [[bag() for _ in range(random.integers(0, 12))] for _ in range(random.integers(1, 4))]


ALL = {**CASES, **{f"seed {seed}": random_bags(seed) for seed in range(12)}}


def row_of(segment, id_):
    """A row of small whole numbers, so that every order of additions gives the same sum."""
    return [(segment + 1) * (id_ % 97), id_ % 5]


def fused(segments):
    bags = [bag for segment in segments for bag in segment]
    ids = [id_ for bag in bags for id_ in bag]
    bounds = np.cumsum([0, *[sum(map(len, segment)) for segment in segments]])
    splits = np.cumsum([0, *map(len, bags)])
    return ops.FusedIds(
        tf.constant(ids, tf.int64), tf.constant(bounds, tf.int64), tf.constant(splits, tf.int64), None, None
    )


def blocks(tensor, splits):
    return np.split(tensor.numpy()[: splits.numpy().sum()], np.cumsum(splits)[:-1])


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("case", ALL)
def test_sums_of_owners_add_up_to_sums_of_bags(case, ranks):
    """Each owner reads the blocks of two requesters, one of which asks for rows of its own ids alone."""
    segments = ALL[case]
    sent = ops.partial_sums(fused(segments), num_ranks=ranks, row_bytes=ROW_BYTES)
    returned = []
    for owner, (ids, terms) in enumerate(zip(blocks(*sent[:2]), blocks(*sent[3:5]))):
        both = [tf.constant([0, *terms], tf.int64), tf.constant([1, len(terms)])]
        entries = tf.constant([len(segments) + 3, len(ids)])
        (index, splits), sum_splits = ops.partial_sum_terms(*both, entries, num_segments=len(segments))
        np.testing.assert_array_equal(sum_splits, [3, sent.sum_splits[owner]])
        of_segment = np.repeat(np.arange(len(segments)), ids[: len(segments)])
        ids = ids[len(segments) :]
        assert all(owner_oracle(int(id_), ranks, "hash_range") == owner for id_ in ids)
        rows = np.array([[100, 1], [200, 2], [300, 3], *[row_of(s, int(id_)) for s, id_ in zip(of_segment, ids)]])
        if len(index) > 0:
            rows = [rows[index[begin:end]].sum(axis=0) for begin, end in zip(splits[:-1], splits[1:])]
        assert np.array_equal(rows[:3], [[100, 1], [200, 2], [300, 3]])
        returned += list(rows[3:])
    bags = [(s, bag) for s, segment in enumerate(segments) for bag in segment]
    index, bounds = sent.index.numpy(), sent.sum_bags.numpy()
    assert len(returned) == sent.sum_splits.numpy().sum()
    assert len(bounds) == len(bags) + 1 and bounds[-1] == len(index)
    for (s, bag), begin, end in zip(bags, bounds[:-1], bounds[1:]):
        total = np.sum([np.zeros(2), *[returned[i] for i in index[begin:end]]], axis=0)
        np.testing.assert_array_equal(total, np.sum([[0, 0], *[row_of(s, id_) for id_ in bag]], axis=0))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ALL)
def test_each_segment_travels_as_what_is_fewer_bytes(case, ranks):
    segments = ALL[case]
    sent = ops.partial_sums(fused(segments), num_ranks=ranks, row_bytes=ROW_BYTES)
    ids = sums = 0
    for bags in segments:
        unique = len({id_ for bag in bags for id_ in bag})
        most = sum(min(len(bag), ranks) for bag in bags)
        summed = 2 * ROW_BYTES * most + 4 * sum(map(len, bags)) < 2 / 3 * (2 * ROW_BYTES * unique)
        ids += unique
        sums += sum(len({owner_oracle(id_, ranks, "hash_range") for id_ in bag}) for bag in bags) if summed else unique
    assert (sent.id_splits.numpy().sum(), sent.sum_splits.numpy().sum()) == (ids, sums)


def refused(message):
    return pytest.raises(tf.errors.InvalidArgumentError, match=message)


def test_refusals():
    good = fused([[[1, 2]], [[3]]])
    with refused("bag_splits must keep each bag inside one segment, got bag 0 with ids 0 to 2"):
        ops.partial_sums(good._replace(bag_splits=tf.constant([0, 3], tf.int64)), num_ranks=2, row_bytes=8)
    with refused("bag_splits must"):
        ops.partial_sums(good._replace(bag_splits=tf.constant([0, 2], tf.int64)), num_ranks=2, row_bytes=8)
    terms, splits = tf.constant([1, 7], tf.int64), tf.constant([2])
    with refused("terms of rank 0 must name its 5 ids, got 7"):
        ops.partial_sum_terms(terms, splits, tf.constant([6]), num_segments=1)
    with refused("terms of rank 0 must have as many words as their header says, got 3 entries"):
        ops.partial_sum_terms(terms, splits + 1, tf.constant([6]), num_segments=1)
    with refused("terms_splits must have one entry for each of the 2 sources, got 1"):
        ops.partial_sum_terms(terms, splits, tf.constant([2, 2]), num_segments=1)
