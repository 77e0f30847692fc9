import numpy as np
import pytest

from tests.oracles.join_messages import EDGE_CASES, LIES, join_oracle, split_oracle
from tests.support.compare import assert_same_integers
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


def join(messages, splits):
    return ops.join_messages(
        [tf.constant(message, tf.int64) for message in messages], [tf.constant(one, tf.int32) for one in splits]
    )


def split(message, splits, segments):
    return ops.split_messages(tf.constant(message, tf.int64), tf.constant(splits, tf.int32), segments=segments)


def check(messages, splits, segments):
    """Joins messages, and splits them as if one rank had received all blocks. `messages` have padding behind their
    blocks.
    """
    joined, joined_splits = join(messages, splits)
    wanted, wanted_splits = join_oracle(messages, splits)
    assert_same_integers(joined[: len(wanted)], wanted, "joined")
    assert_same_integers(joined[len(wanted) :], np.zeros(len(joined) - len(wanted), int), "padding")
    assert len(joined) % 256 == 0
    assert_same_integers(joined_splits, wanted_splits, "splits")
    parts, lengths = split(wanted, wanted_splits, segments)
    oracle = split_oracle(wanted, wanted_splits, segments)
    assert len(parts) == len(lengths) == len(segments)
    for part, length, (entries, of_blocks), of_message in zip(parts, lengths, oracle, splits):
        assert_same_integers(part, entries, "part")
        assert_same_integers(length, of_blocks, "length")
        assert_same_integers(length, of_message, "length, as it was joined")


@pytest.mark.parametrize(("messages", "splits", "segments"), EDGE_CASES.values(), ids=EDGE_CASES)
def test_against_the_oracle(messages, splits, segments):
    check(messages, splits, segments)


@pytest.mark.parametrize("seed", range(20))
def test_random_messages(seed):
    random = np.random.default_rng(seed)
    segments, ranks = random.integers(1, 5, random.integers(1, 6)).tolist(), int(random.integers(1, 5))
    messages, splits = [], []
    for count in segments:
        counts = random.integers(0, 4, [ranks, count]) * random.integers(0, 2, [ranks, 1])
        blocks = [[*row, *random.integers(-9, 9, row.sum())] for row in counts.tolist() for row in [np.array(row)]]
        messages.append([int(entry) for block in blocks for entry in block] + [7] * int(random.integers(0, 5)))
        splits.append([len(block) for block in blocks])
    check(messages, splits, segments)


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([[2, 1], [3]], r"splits\[1\] must have one entry per rank, 2 like splits\[0\], got 1"),
        ([[2, 2], [3, 0]], r"splits\[0\]\[1\] must lie in \[0, 1\], got 2"),
        ([[3, -1], [3, 0]], r"splits\[0\]\[1\] must lie in \[0, 0\], got -1"),
        ([[2, 1], [2**31 - 1, 0]], r"splits\[1\]\[0\] must lie in \[0, 3\], got 2147483647"),
    ],
)
def test_splits_outside_their_message_are_refused(splits, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        join([[1, 2, 3], [4, 5, 6]], splits)


@pytest.mark.parametrize(
    ("message", "splits", "words"),
    [
        ([1, 5, 0], [4], r"splits\[0\] must lie in \[0, 3\], got 4"),
        ([1, 5, 0], [3, -1], r"splits\[1\] must lie in \[0, 0\], got -1"),
        ([1, 5, 0, 9], [3], "splits must sum to the 4 entries of message, got 3"),
        *LIES,
    ],
)
def test_a_message_that_lies_is_refused(message, splits, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        split(message, splits, [1, 1])


def test_segments_out_of_range_are_refused():
    for wrong in (0, -1, 2**40):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"segments must lie in \[1, 1048576\], got {wrong}"):
            split([0, 0], [2], [1, wrong])


def test_wrong_ranks_of_arguments_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"messages\[1\] must have rank 1, got shape \[1,1\]"):
        join([[1], [[1]]], [[1], [1]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"splits\[0\] must have rank 1"):
        join([[1]], [1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="message must have rank 1"):
        split([[0]], [1], [1])


def test_shape_functions():
    joined = inferred(
        lambda a, b, c, d: ops.join_messages([a, b], [c, d]),
        (tf.int64, [5]), (tf.int64, [None]), (tf.int32, [None]), (tf.int32, [3]),
    )  # fmt: skip
    assert joined == [[None], [3]]
    parts = inferred(lambda m, s: ops.split_messages(m, s, segments=[1, 2]), (tf.int64, [None]), (tf.int32, [4]))
    assert parts == [[None], [None], [4], [4]]
