import numpy as np
import pytest

from tests.oracles.rank_partition import mix64, owner_oracle, rank_partition_oracle, unpack_oracle
from tests.oracles.segment_unique import segment_unique_oracle
from tests.support.compare import assert_same_integers
from tests.support.ids import EDGE_CASES, from_segments, random_segments
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

OWNERS = ["hash_range", "tfra"]


def partition(ids, splits, ranks, owner, **kwargs):
    return ops.rank_partition(
        tf.constant(ids, tf.int64), tf.constant(splits, tf.int64), num_ranks=ranks, owner=owner, **kwargs
    )


def check(ids, splits, ranks, owner):
    ids, splits, _ = segment_unique_oracle(ids, splits)
    got = partition(ids, splits, ranks, owner)
    message, send_splits, id_splits, restore = rank_partition_oracle(ids, splits, ranks, owner)
    padding = got.message.numpy()[len(message) :]
    assert_same_integers(got.message.numpy()[: len(message)], message, "message")
    assert_same_integers(padding, np.zeros_like(padding), "padding")
    assert_same_integers(got.send_splits, send_splits, "send_splits")
    assert_same_integers(got.id_splits, id_splits, "id_splits")
    assert_same_integers(got.restore, restore, "restore")


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("case", EDGE_CASES)
def test_edge_cases(case, ranks, owner):
    check(*from_segments(EDGE_CASES[case]), ranks, owner)


@pytest.mark.parametrize("owner", OWNERS)
def test_random_small_inputs(owner):
    for seed in range(100):
        check(*random_segments(seed), seed % 5 + 1, owner)


def test_many_blocks():
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 50_000)
    check(ids, np.array([0, 20_000, 50_000]), 3, "hash_range")


def test_the_example_of_the_docstring():
    got = partition([7, 4, 3, 3, 8], [0, 3, 5], 2, "tfra")
    assert_same_integers(got.message.numpy()[:9], [1, 1, 4, 8, 2, 1, 7, 3, 3])
    assert_same_integers(got.restore, [2, 0, 3, 4, 1])


def test_message_sizes_fall_into_few_buckets():
    sizes = {partition(range(n), [0, n], 2, "tfra").message.shape[0] for n in range(5000, 5600, 20)}
    assert sizes == {5120, 6144}


def test_owner_hash_is_the_published_finalizer():
    # Test vectors of MurmurHash3's fmix64.
    assert mix64(0) == 0
    assert mix64(1) == 0xB456BCFC34C2CB2C
    for ranks in (2, 3, 7):
        shares = np.bincount([owner_oracle(i, ranks, "hash_range") for i in range(7000)], minlength=ranks)
        assert shares.min() > 0.9 * 7000 / ranks


def test_id_that_does_not_fit_is_refused_by_its_table():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"id -5 of table 'user' does not fit the 61 bits"):
        partition([1, 2, -5], [0, 2, 3], 2, "tfra", id_bits=61, segment_names=["item", "user"])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"id 8 of segment 0 .*key_encoding='hash'"):
        partition([7, 8], [0, 2], 2, "tfra", id_bits=3)
    partition([7, 0], [0, 2], 2, "tfra", id_bits=3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="id -1 of segment 0 does not fit the 63 bits"):
        partition([7, -1], [0, 2], 2, "tfra", id_bits=63)
    partition([7, -1], [0, 2], 2, "tfra", id_bits=64)


def test_wrong_splits_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="unique_splits must run from 0 to 2, got first 0, last 3"):
        partition([1, 2], [0, 3], 2, "tfra")


def unpack(messages, segments):
    sizes = tf.constant([len(m) for m in messages], tf.int32)
    flat = tf.constant([i for m in messages for i in m], tf.int64)
    return ops.unpack_message(flat, sizes, num_segments=segments)


@pytest.mark.parametrize(
    "messages",
    [
        [[1, 1, 4, 8], [2, 1, 7, 3, 3]],
        [[0, 0], [0, 0], [0, 0]],
        [[0, 0], [1, 2, -1, 5, 6]],
        [[0, 3, 1, 2, 3]],
    ],
)
def test_unpack(messages):
    got = unpack(messages, 2)
    for ours, oracle, what in zip(got, unpack_oracle(messages, 2), got._fields):
        assert_same_integers(ours, oracle, what)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_unpack_reads_what_partition_wrote(ranks):
    """Every rank sends the same ids to owner 0, which finds each of its ids once per source."""
    ids, splits, _ = segment_unique_oracle(*random_segments(3))
    packed = partition(ids, splits, ranks, "tfra")
    block = packed.message.numpy()[: packed.send_splits.numpy()[0]].tolist()
    got = unpack([block] * ranks, len(splits) - 1)
    wanted = unpack_oracle([block] * ranks, len(splits) - 1)
    for ours, oracle in zip(got, wanted):
        assert_same_integers(ours, oracle)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([[1]], r"received_splits\[0\] must lie in \[2, 1\], got 1"),
        ([[3, 0, 1]], r"message of rank 0 counts 3 ids in segment 0, more than its 1 ids allow"),
        ([[0, 0], [-1, 1]], r"message of rank 1 counts -1 ids in segment 0"),
        ([[0, 1, 5, 6]], r"message of rank 0 counts 1 ids but holds 2"),
        ([[2**62, 2**62]], r"message of rank 0 counts 4611686018427387904 ids in segment 0"),
    ],
)
def test_a_message_that_lies_is_refused(messages, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        unpack(messages, 2)


def test_shape_functions():
    shapes = inferred(lambda i, s: ops.rank_partition(i, s, num_ranks=3), (tf.int64, [5]), (tf.int64, [None]))
    assert shapes == [[None], [3], [3], [5]]
    shapes = inferred(lambda m, s: ops.unpack_message(m, s, num_segments=2), (tf.int64, [None]), (tf.int32, [4]))
    assert shapes == [[None], [3], [None], [4]]
