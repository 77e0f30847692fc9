"""Rank partition and its unpacking against the oracle in Python integers."""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.launchers import Refused
from tests.oracles.rank_partition import rank_partition_oracle, unpack_oracle
from tests.oracles.segment_unique import segment_unique_oracle
from tests.support.ids import EDGE_CASES, from_segments, random_segments

OWNERS = ("hash_range", "tfra")


def compare(ops, ids, splits, ranks, owner):
    wanted = rank_partition_oracle(ids, splits, ranks, owner)
    message, *others = ops.rank_partition(ids, splits, ranks, owner)
    np.testing.assert_array_equal(message[: len(wanted[0])], wanted[0])
    np.testing.assert_array_equal(message[len(wanted[0]) :], 0)
    for ours, right in zip(others, wanted[1:]):
        np.testing.assert_array_equal(ours, right)


def check_edge_cases(ops):
    for n, segments in enumerate(EDGE_CASES.values()):
        for ranks, owner in ((1 + n % 4, OWNERS[n % 2]), (8, OWNERS[1 - n % 2])):
            compare(ops, *from_segments(segments), ranks, owner)


def check_random_segments(ops):
    for seed in range(8):
        ids, splits, _ = segment_unique_oracle(*random_segments(seed))
        compare(ops, ids, splits, seed % 5 + 1, OWNERS[seed % 2])


def check_many_ids_and_ranks(ops):
    random = np.random.default_rng(1)
    ids = random.integers(-(2**60), 2**60, 6_001)
    for ranks, bounds in ((3, 7), (64, 2), (1500, 1)):
        splits = np.concatenate([[0], np.sort(random.integers(0, len(ids), bounds)), [len(ids)]])
        compare(ops, ids, splits, ranks, "hash_range")
    compare(ops, ids[:4096], np.array([0, 2048, 2048, 4096]), 2, "tfra")


def check_launcher_finds_the_first_id_that_does_not_fit(ops):
    """Whatever the order of threads."""
    for id_bits, misfit in ((4, 2), (63, 3)):
        try:
            ops.rank_partition([3, 15, 16, -1, 2], [0, 5], 2, "hash_range", id_bits)
        except Refused as refusal:
            assert refusal.args == (misfit,), id_bits
        else:
            raise AssertionError(f"ids beyond {id_bits} bits were not refused")


def check_unpack(ops):
    random = np.random.default_rng(2)
    for ranks, segments in ((1, 1), (3, 2), (4, 5)):
        messages = []
        for _ in range(ranks):
            counts = random.integers(0, 300, segments) * random.integers(0, 2, segments)
            messages.append([*counts.tolist(), *random.integers(-5, 5, counts.sum()).tolist()])
        compare_unpacked(ops, messages, segments)
    for messages in ([[0, 0], [0, 0]], [[1, 1, 4, 8], [2, 1, 7, 3, 3]], [[0, 0], [1, 2, -1, 5, 6]], [[0, 3, 1, 2, 3]]):
        compare_unpacked(ops, messages, 2)


def compare_unpacked(ops, messages, segments):
    for ours, right in zip(ops.unpack_message(messages, segments), unpack_oracle(messages, segments)):
        np.testing.assert_array_equal(ours, right)


@once
def check_launcher_without_memory(ops):
    ops.refuse_without_memory(lambda: ops.rank_partition([1], [0, 1], 2, "tfra"))
    ops.refuse_without_memory(lambda: ops.unpack_message([[1, 5]], 1))
