"""Rank partition and its unpacking against the oracle in Python integers."""

import numpy as np

from tests.cuda.checks import once
from tests.oracles.rank_partition import rank_partition_oracle, unpack_oracle
from tests.support.ids import EDGE_CASES, from_segments

OWNERS = ("hash_range", "tfra")


def partition(kernels, ids, splits, ranks, owner, id_bits=64, padding=5):
    """Returns message (with its padding), ids of each owner, first misfit, restore."""
    memory, n, segments = kernels.memory, len(ids), len(splits) - 1
    message = memory.empty([n + ranks * segments + padding], np.int64)
    restore, counts = memory.empty([n], np.int32), np.full(ranks + 1, -7, np.int32)
    kernels.run(
        "rank_partition", memory.put(ids), np.array(splits), n, segments, ranks, owner == "tfra", id_bits,
        kernels.scratch("rank_partition", n, segments, ranks), message, n + ranks * segments + padding, counts, restore,
    )  # fmt: skip
    return memory.get(message), counts[:-1], int(counts[-1]), memory.get(restore)


def compare(kernels, ids, splits, ranks, owner):
    wanted, _, id_splits, wanted_restore = rank_partition_oracle(ids, splits, ranks, owner)
    message, counts, misfit, restore = partition(kernels, ids, splits, ranks, owner)
    np.testing.assert_array_equal(message, np.concatenate([wanted, np.zeros(5, np.int64)]))
    np.testing.assert_array_equal(counts, id_splits)
    np.testing.assert_array_equal(restore, wanted_restore)
    assert misfit == -1


def check_edge_cases(kernels):
    for n, segments in enumerate(EDGE_CASES.values()):
        compare(kernels, *from_segments(segments), 1 + n % 4, OWNERS[n % 2])


def check_many_tiles_and_ranks(kernels):
    random = np.random.default_rng(1)
    ids = random.integers(-(2**60), 2**60, 6_001)
    for ranks, bounds in ((3, 7), (64, 2)):
        splits = np.concatenate([[0], np.sort(random.integers(0, len(ids), bounds)), [len(ids)]])
        compare(kernels, ids, splits, ranks, "hash_range")
    compare(kernels, ids[:4096], np.array([0, 2048, 2048, 4096]), 2, "tfra")


# Compares the sum only. Smaller cases run under schedules.
@once
def check_more_tiles_than_a_warp_sums(kernels):
    ids = np.random.default_rng(3).integers(-(2**60), 2**60, 33 * 2048 + 5)
    compare(kernels, ids, np.array([0, 40_000, len(ids)]), 2, "hash_range")


def check_ids_that_do_not_fit(kernels):
    ids = np.array([3, 15, 16, -1, 2])
    assert partition(kernels, ids, [0, 5], 2, "hash_range", id_bits=4)[2] == 2
    assert partition(kernels, ids, [0, 5], 2, "hash_range", id_bits=64)[2] == -1


def check_bad_arguments_are_refused(kernels):
    memory = kernels.memory
    counts, message = np.zeros(2000, np.int32), memory.empty([5000], np.int64)
    for splits, ranks, size in (([0, 3], 1, 5000), ([0, 4, 2, 4], 1, 5000), ([0, 4], 1025, 5000), ([0, 4], 1, 4)):
        answer = kernels.answer(
            "rank_partition", memory.put(np.arange(4)), np.array(splits), 4, len(splits) - 1, ranks, 0, 64,
            kernels.scratch("rank_partition", 4, 4, ranks), message, size, counts, memory.empty([4], np.int32),
        )  # fmt: skip
        assert answer == 1, (splits, ranks, size)
    for num_ids, segments, ranks in ((0, 2**21, 1024), (2**31, 1, 1)):  # entries of a message over 2^31
        splits, size = np.zeros(segments + 1, np.int64), num_ids + ranks * segments
        splits[-1] = num_ids
        sizes = num_ids, segments, ranks, 0, 64
        answer = kernels.answer("rank_partition", None, splits, *sizes, None, None, size, counts, None)
        assert answer == 1, sizes


def check_messages_that_do_not_fit_are_refused(kernels):
    headers = np.zeros(4, np.int64)
    for splits, segments in (([3, 1], 2), ([-1, 4], 1), ([2**31 - 1, 1], 1), ([3], -1), ([3], 2**40)):
        sizes = np.array(splits, np.int32), segments, len(splits)
        assert kernels.answer("message_headers", None, *sizes, None, headers) == 1, sizes
    splits, id_splits = np.zeros(3, np.int64), np.zeros(2, np.int32)
    for counts in ([1, -1, 0, 2], [2**31, 0, 0, 0], [2**30, 2**30, 0, 0], [2**62, 2**62, 2**62, 2**62]):
        answer = kernels.answer("unpack_message", None, np.array(counts), 2, 2, None, None, splits, None, id_splits)
        assert answer == 1, counts


def check_unpack(kernels):
    random = np.random.default_rng(2)
    for ranks, segments in ((1, 1), (3, 2), (4, 5)):
        messages = []
        for _ in range(ranks):
            counts = random.integers(0, 300, segments) * random.integers(0, 2, segments)
            messages.append([*counts.tolist(), *random.integers(-5, 5, counts.sum()).tolist()])
        compare_unpacked(kernels, messages, segments)
    compare_unpacked(kernels, [[0, 0], [0, 0]], 2)


def compare_unpacked(kernels, messages, segments):
    memory, ranks = kernels.memory, len(messages)
    flat = memory.put(np.array([entry for message in messages for entry in message], np.int64))
    sizes = np.array([len(message) for message in messages], np.int32)
    scratch = kernels.scratch("unpack_message", segments, ranks)
    headers = np.full([ranks, segments], -7, np.int64)
    kernels.run("message_headers", flat, sizes, segments, ranks, scratch, headers)
    np.testing.assert_array_equal(headers, [message[:segments] for message in messages])
    wanted = unpack_oracle(messages, segments)
    ids, position = memory.empty([len(wanted[0])], np.int64), memory.empty([len(wanted[0])], np.int32)
    splits, id_splits = np.full(segments + 1, -7, np.int64), np.full(ranks, -7, np.int32)
    kernels.run("unpack_message", flat, headers, segments, ranks, scratch, ids, splits, position, id_splits)
    for ours, right in zip((memory.get(ids), splits, memory.get(position), id_splits), wanted):
        np.testing.assert_array_equal(ours, right)
