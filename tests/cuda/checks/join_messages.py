"""Joined and split messages against the oracle on lists."""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.launchers import INVALID
from tests.oracles.join_messages import EDGE_CASES, LIES, join_oracle, split_oracle

LEAST = np.iinfo(np.int64).min


def compare(ops, messages, splits, segments):
    """Joins messages, and splits them as if one rank had received all blocks. `messages` have padding after blocks."""
    wanted, lengths = join_oracle(messages, splits)
    joined, joined_splits = ops.join_messages(messages, splits)
    np.testing.assert_array_equal(joined[: len(wanted)], wanted)
    np.testing.assert_array_equal(joined[len(wanted) :], 0)
    np.testing.assert_array_equal(joined_splits, lengths)
    parts, of_parts = ops.split_messages(wanted, lengths, segments)
    oracle = split_oracle(wanted, lengths, segments)
    assert len(parts) == len(of_parts) == len(segments)
    for part, of_part, (entries, of_blocks), of_message in zip(parts, of_parts, oracle, splits):
        np.testing.assert_array_equal(part, entries)
        np.testing.assert_array_equal(of_part, of_blocks)
        np.testing.assert_array_equal(of_part, of_message)  # as it was joined


def check_edge_cases(ops):
    for messages, splits, segments in EDGE_CASES.values():
        compare(ops, messages, splits, segments)


def check_random_messages(ops):
    """More tables than a warp has lanes, and more entries than a block has threads."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        segments, ranks = [1, 31, 32, 70][: seed + 2], 2 * seed + 1
        messages, splits = [], []
        for count in segments:
            counts = random.integers(0, 9, [ranks, count]) * random.integers(0, 2, [ranks, 1])
            blocks = [[*row.tolist(), *random.integers(-(2**62), 2**62, row.sum()).tolist()] for row in counts]
            messages.append([entry for block in blocks for entry in block] + [7] * int(random.integers(0, 5)))
            splits.append([len(block) for block in blocks])
        compare(ops, messages, splits, segments)


def check_launcher_finds_headers_that_lie(ops):
    """No entry outside the block is read, whatever a header says."""
    many = [2**62] * 40
    for message, splits, segments in (
        *((message, splits, [1, 1]) for message, splits, _ in LIES),
        (many, [40], [40]), ([1] * 40 + [9] * 39, [79], [40]), ([LEAST, 0, 0], [3], [2]),
    ):  # fmt: skip
        assert lengths_of(ops, message, splits, segments) == INVALID, (message, splits)


def lengths_of(ops, message, splits, segments):
    sizes = np.array(splits, np.int32), np.array(segments, np.int64), len(segments), len(splits)
    lengths = np.full([len(segments), len(splits)], -7, np.int32)
    return ops.answer("message_lengths", ops.memory.put(np.array(message, np.int64)), *sizes, ops.allocator, lengths)


@once
def check_launcher_without_memory(ops):
    ops.refuse_without_memory(lambda: ops.join_messages([[1, 5]], [[2]]))
    ops.refuse_without_memory(lambda: ops.split_messages([1, 5], [2], [1]))
