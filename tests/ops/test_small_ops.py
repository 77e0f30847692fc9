"""The ops from fused ids to recovery: cases and refusals of all devices, shape functions, and tests of the CPU form.

tests/cuda runs the same cases over the emulated kernels, and over the ops with these kernels.
"""

import resource

import numpy as np
import pytest

from tests.cuda.checks import rank_partition, segment_unique
from tests.oracles.initial_rows import philox4x32
from tests.oracles.rank_partition import mix64, owner_oracle, unpack_oracle
from tests.oracles.recovery import pooled_recover_grad_oracle, pooled_recover_oracle, recover_grad_oracle
from tests.oracles.segment_unique import segment_unique_oracle
from tests.support import small_ops
from tests.support.compare import assert_same_integers
from tests.support.ids import random_segments
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

CHECKS, RUN = small_ops.checks(), small_ops.TensorFlowOps()


@pytest.mark.parametrize("check", CHECKS)
def test_cases(check):
    CHECKS[check](RUN)


@pytest.mark.parametrize("case", range(len(small_ops.REFUSALS)))
def test_refusals(case):
    call, words = small_ops.REFUSALS[case]
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)) as refused:
        call(RUN)
    assert words in str(refused.value)


FUSED = {
    "segments": [0, 2], "num_segments": 3, "feature_names": ["a", "b"], "bag_sizes": [1, 1], "combiners": ["sum"] * 2
}  # fmt: skip
BAGS = (tf.int32, [None]), (tf.int64, [4]), (tf.float32, [3])
VECTOR, FIVE = (tf.int64, [None]), (tf.int32, [5])
# Op, inputs, shapes of outputs.
SHAPES = [
    (ops.segment_unique, [VECTOR, (tf.int64, [4])], [[None], [4], [None]]),
    (ops.segment_unique, [(tf.int64, [9]), (tf.int64, None)], [[None], [None], [9]]),
    (lambda a, b: ops.fuse_ids([a, b], {}, **FUSED), [(tf.int64, [4]), VECTOR], [[None], [4], [None], [None], [2]]),
    (lambda i, s: ops.rank_partition(i, s, num_ranks=3), [(tf.int64, [5]), VECTOR], [[None], [3], [3], [5]]),
    (lambda m, s: ops.unpack_message(m, s, num_segments=2), [VECTOR, (tf.int32, [4])], [[None], [3], [None], [4]]),
    (
        lambda a, b, c, d: ops.join_messages([a, b], [c, d]),
        [(tf.int64, [5]), VECTOR, (tf.int32, [None]), (tf.int32, [3])],
        [[None], [3]],
    ),
    (
        lambda m, s: ops.split_messages(m, s, segments=[1, 2]),
        [VECTOR, (tf.int32, [4])],
        [[None], [None], [4], [4]],
    ),
    (
        lambda *t: ops.initial_rows(*t, seeds=[1], distribution="constant", a=0.0),
        [(tf.float32, [None, 8]), (tf.bool, [3]), (tf.int64, [3]), (tf.int64, [2])],
        [[3, 8]],
    ),
    (ops.recover, [(tf.float32, [None, 8]), FIVE], [[5, 8]]),
    (lambda r, i: ops.recover(r, i, pad=True), [(tf.float32, [4, 8]), FIVE], [[None, 8]]),
    (ops.recover_grad, [(tf.float32, [5, 8]), FIVE, (tf.int64, [])], [[None, 8]]),
    (lambda g, i: ops.recover_grad(g, i, 7), [(tf.float32, [5, 8]), FIVE], [[7, 8]]),
    (lambda g, i: ops.recover_grad(g, i, 7, pad=True), [(tf.float32, [5, 8]), FIVE], [[None, 8]]),
    (ops.pooled_recover, [(tf.float32, [None, 8]), *BAGS], [[3, 8]]),
    (lambda *t: ops.pooled_recover_parts(t[:2], *t[2:]), [(tf.float32, None), (tf.float32, [2, 8]), *BAGS], [[3, 8]]),
    (ops.pooled_recover_grad, [(tf.float32, [3, 8]), *BAGS, (tf.int64, [])], [[None, 8]]),
]


@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_shape_functions(case):
    op, inputs, shapes = SHAPES[case]
    assert inferred(op, *inputs) == shapes
    with pytest.raises(ValueError, match="must be rank"):
        inferred(op, *((dtype, [1] * 3) for dtype, _ in inputs))


# Segment unique and rank partition.


def test_random_small_segments():
    for seed in range(100):
        ids, splits = random_segments(seed)
        segment_unique.compare(RUN, ids, splits)
        unique, bounds, _ = segment_unique_oracle(ids, splits)
        rank_partition.compare(RUN, unique, bounds, seed % 5 + 1, rank_partition.OWNERS[seed % 2])


@pytest.mark.parametrize("vocabulary", [3, 1000, 10**12])
def test_long_segments_are_cut_into_parts_and_blocks(vocabulary):
    """200,000 ids in one segment make several parts by hash and several numbering blocks. First occurrences stay in
    order.
    """
    ids = np.random.default_rng(vocabulary).integers(-vocabulary, vocabulary, 230_000)
    segment_unique.compare(RUN, ids, np.array([0, 200_000, 200_000, 230_000]))


def test_ids_that_differ_in_high_bits_only():
    segment_unique.compare(RUN, np.arange(5000, dtype=np.int64) << 50, np.array([0, 5000]))


def test_many_blocks_of_a_message():
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 50_000)
    rank_partition.compare(RUN, ids, np.array([0, 20_000, 50_000]), 3, "hash_range")


def test_the_example_of_the_header():
    message, _, _, restore = RUN.rank_partition([7, 4, 3, 3, 8], [0, 3, 5], 2, "tfra")
    assert_same_integers(message[:9], [1, 1, 4, 8, 2, 1, 7, 3, 3])
    assert_same_integers(restore, [2, 0, 3, 4, 1])


def test_message_sizes_fall_into_few_buckets():
    sizes = {RUN.rank_partition(range(n), [0, n], 2, "tfra").message.shape[0] for n in range(5000, 5600, 20)}
    assert sizes == {5120, 6144}


def test_owner_hash_is_the_published_finalizer():
    """Test vectors of MurmurHash3's fmix64."""
    assert mix64(0) == 0
    assert mix64(1) == 0xB456BCFC34C2CB2C
    for ranks in (2, 3, 7):
        shares = np.bincount([owner_oracle(i, ranks, "hash_range") for i in range(7000)], minlength=ranks)
        assert shares.min() > 0.9 * 7000 / ranks


def test_ids_that_fit_their_bits_pass():
    RUN.rank_partition([7, 0], [0, 2], 2, "tfra", id_bits=3)
    RUN.rank_partition([7, -1], [0, 2], 2, "tfra", id_bits=64)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_unpack_reads_what_partition_wrote(ranks):
    """Every rank sends the same ids to owner 0, which finds each of its ids once per source."""
    ids, splits, _ = segment_unique_oracle(*random_segments(3))
    packed = RUN.rank_partition(ids, splits, ranks, "tfra")
    block = packed.message[: packed.send_splits[0]].tolist()
    got, wanted = (unpack([block] * ranks, len(splits) - 1) for unpack in (RUN.unpack_message, unpack_oracle))
    for ours, oracle in zip(got, wanted):
        assert_same_integers(ours, oracle)


# Fused ids and initial rows.


@pytest.mark.parametrize(
    ("lengths", "segments", "segment_splits"),
    [
        ([3], [0], [0, 3]), ([2, 0, 1], [0, 0, 1], [0, 2, 3]), ([0, 2], [1, 3], [0, 0, 0, 0, 2, 2]),
        ([0, 0], [0, 1], [0] * 3),
    ],
)  # fmt: skip
def test_segments_and_bags_are_counted_in_host_memory(lengths, segments, segment_splits):
    count = len(lengths)
    about = {"feature_names": ["f"] * count, "bag_sizes": [1] * count, "combiners": ["sum"] * count}
    features = [tf.range(n, dtype=tf.int64) for n in lengths]
    fused = ops.fuse_ids(features, {}, segments=segments, num_segments=len(segment_splits) - 1, **about)
    assert_same_integers(fused.segment_splits, segment_splits)
    assert_same_integers(fused.feature_bags, lengths)


def test_philox_known_answers():
    """Tests the vectors that Random123 publishes for philox4x32-10."""
    assert philox4x32([0] * 4, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox4x32([ones] * 4, 2**64 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_initial_rows_do_not_change_their_input():
    rows = tf.constant(np.arange(12.0).reshape(2, 6), tf.float32)
    got = ops.initial_rows(rows, [True, False], [8, 9], [0, 2], seeds=[1], distribution="constant", a=-7.0)
    np.testing.assert_array_equal(got, [np.arange(6.0), [-7.0] * 6])
    np.testing.assert_array_equal(rows, np.arange(12.0).reshape(2, 6))


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [("normal", 0.0, 1.0), ("uniform", 0.5, 12**-0.5), ("truncated_normal", 0.0, 0.8796)],
)
def test_rows_are_distinct_and_have_the_moments_of_their_distribution(distribution, mean, deviation):
    n = 20_000
    rows = RUN.initial_rows(
        np.zeros([n, 8], np.float32), [False] * n, np.arange(n), [0, n], [5], distribution, 0.0, 1.0
    )
    assert len(np.unique(rows, axis=0)) == n
    # 160,000 draws: the mean's standard error is 0.0025, the deviation's below 0.002; five of them.
    assert abs(rows.mean() - mean) < 0.0125
    assert abs(rows.std() - deviation) < 0.01
    assert np.abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.05


# Recovery.


def test_sums_are_in_the_order_of_n_bit_for_bit():
    """The sums of these numbers depend on the order, so equality with the ordered oracles shows the order."""
    random = np.random.default_rng(0)
    grads = (random.normal(size=(20_000, 5)) * 10.0 ** np.arange(5)).astype(np.float32)
    index, splits = random.integers(0, 37, 20_000).astype(np.int32), np.arange(0, 20_001, 20)
    scale, rows = np.full(1000, 0.3, np.float32), grads[:37]
    want = recover_grad_oracle(grads, index, 37)
    assert (want != recover_grad_oracle(grads[::-1], index[::-1], 37)).any()
    pooled = pooled_recover_oracle(rows, index, splits, scale)
    back = pooled_recover_grad_oracle(grads[:1000], index, splits, scale, 37)
    for _ in range(2):
        np.testing.assert_array_equal(ops.recover_grad(grads, index, 37), want)
        np.testing.assert_array_equal(ops.pooled_recover(rows, index, splits, scale), pooled)
        np.testing.assert_array_equal(ops.pooled_recover_parts(np.split(rows, [9, 20]), index, splits, scale), pooled)
        np.testing.assert_array_equal(ops.pooled_recover_grad(grads[:1000], index, splits, scale, 37), back)


def test_16_bit_sums_are_kept_in_float32_and_rounded_once():
    """Sums 4096 ones in float16. A float16 sum would stop at 2048, and late scaling would overflow."""
    ones, zeros = tf.ones([4096, 2], tf.float16), tf.zeros([4096], tf.int32)
    np.testing.assert_array_equal(ops.recover_grad(ones, zeros, 1), [[4096, 4096]])
    np.testing.assert_array_equal(ops.pooled_recover(ones[:1], zeros, [0, 4096], [1.0]), [[4096, 4096]])
    large = tf.fill([1, 2], tf.constant(60000.0, tf.float16))
    np.testing.assert_array_equal(ops.pooled_recover(large, zeros, [0, 4096], [1 / 4096]), large)


def test_padded_buffers_are_bucketed():
    rows, index, bags = tf.ones([5, 3]), tf.range(5), (tf.constant([0, 2, 5], tf.int64), tf.ones([2]))
    assert RUN.join_messages([[1, 5]], [[2]])[0].shape == (256,)
    assert ops.recover(rows, index, pad=True).shape == [256, 3]
    assert ops.recover_grad(rows, index, 7, pad=True).shape == [256, 3]
    assert ops.pooled_recover_parts([rows], index, *bags, pad=True).shape == [256, 3]
    assert ops.pooled_recover_grad(rows[:2], index, *bags, 7, pad=True).shape == [256, 3]


@pytest.mark.parametrize("pad", [False, True])
def test_registered_gradients(pad):
    """They equal those of plain gather, its transpose, and the oracle. Small integers are exact."""
    random = np.random.default_rng(0)
    rows, seen = (tf.constant(random.integers(-3, 4, [4, 3]), tf.float32) for _ in range(2))
    index, splits, scale = (
        tf.constant([3, 0, 3, 3], tf.int32),
        np.array([0, 3, 3, 4]),
        np.array([1, 2, 0.5], np.float32),
    )
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([rows, seen])
        ours = tf.reduce_sum(ops.recover(rows, index, pad=pad)[:4] * seen)
        plain = tf.reduce_sum(tf.gather(rows, index) * seen)
        back = tf.reduce_sum(ops.recover_grad(seen, index, 5, pad=pad)[:5] ** 2)
        plain_back = tf.reduce_sum(tf.math.unsorted_segment_sum(seen, index, 5) ** 2)
        pooled = tf.reduce_sum(ops.pooled_recover(rows, index, splits, scale) * seen[:3])
    np.testing.assert_array_equal(tape.gradient(ours, rows), tf.convert_to_tensor(tape.gradient(plain, rows)))
    np.testing.assert_array_equal(tape.gradient(back, seen), tape.gradient(plain_back, seen))
    wanted = pooled_recover_grad_oracle(seen[:3].numpy(), index.numpy(), splits, scale, 4)
    np.testing.assert_array_equal(tape.gradient(pooled, rows), wanted)


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_index_out_of_range_is_refused_on_a_cpu(bad):
    """On a GPU it is left out, because a report would wait for the device."""
    words = rf"index\[1\] must lie in \[0, 4\), got {bad}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.recover(tf.zeros([4, 2]), tf.constant([0, bad], tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.recover_grad(tf.zeros([2, 2]), tf.constant([0, bad], tf.int32), 4)


def test_rows_without_columns_take_no_memory():
    """Their gradient has no numbers, however many rows there are."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = ops.pooled_recover_grad(tf.zeros([1, 0]), [0], tf.constant([0, 1], tf.int64), [1.0], 2**29)
    assert got.shape == [2**29, 0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB; a count per row would be 2 GiB
