"""Joined and split messages against the oracle on lists."""

import ctypes

import numpy as np

from tests.cuda.checks import once
from tests.oracles.join_messages import EDGE_CASES, LIES, join_oracle, split_oracle

INVALID = 1  # cudaErrorInvalidValue
LEAST = np.iinfo(np.int64).min


def pointers(values):
    return (ctypes.c_void_p * len(values))(*values)


def join(kernels, messages, splits, size):
    memory, count, ranks = kernels.memory, len(messages), len(splits[0])
    given = [memory.put(np.array(message, np.int64)) for message in messages]
    on_host = [np.array(of_message, np.int32) for of_message in splits]
    joined = memory.empty([size], np.int64)
    kernels.run(
        "join_messages", pointers([memory.pointer(array).value for array in given]),
        pointers([array.ctypes.data for array in on_host]), count, ranks,
        kernels.scratch("join_messages", count, ranks), joined, size,
    )  # fmt: skip
    return memory.get(joined).tolist()


def read_lengths(kernels, message, splits, segments):
    """Returns the answer of the launcher, and the lengths [L, R]."""
    count, ranks = len(segments), len(splits)
    lengths = np.full([count, ranks], -7, np.int32)
    answer = kernels.answer(
        "message_lengths", kernels.memory.put(np.array(message, np.int64)), np.array(splits, np.int32),
        np.array(segments, np.int64), count, ranks, kernels.scratch("message_lengths", count, ranks), lengths,
    )  # fmt: skip
    return answer, lengths


def split(kernels, message, splits, segments):
    memory, count, ranks = kernels.memory, len(segments), len(splits)
    answer, lengths = read_lengths(kernels, message, splits, segments)
    assert answer == 0
    parts = [memory.empty([size], np.int64) for size in lengths.sum(axis=1)]
    kernels.run(
        "split_messages", memory.put(np.array(message, np.int64)), lengths, count, ranks,
        kernels.scratch("split_messages", count, ranks), pointers([memory.pointer(part).value for part in parts]),
    )  # fmt: skip
    return [(memory.get(part).tolist(), of_part.tolist()) for part, of_part in zip(parts, lengths)]


def compare(kernels, messages, splits, segments):
    """Joins messages, and splits them as if one rank had received all blocks."""
    wanted, lengths = join_oracle(messages, splits)
    assert join(kernels, messages, splits, len(wanted) + 5) == [*wanted, 0, 0, 0, 0, 0]
    assert split(kernels, wanted, lengths, segments) == split_oracle(wanted, lengths, segments)


def check_edge_cases(kernels):
    for messages, splits, segments in EDGE_CASES.values():
        compare(kernels, messages, splits, segments)


def check_random_messages(kernels):
    """More tables than a warp has lanes, and more entries than a block has threads."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        segments, ranks = [1, 31, 32, 70][: seed + 2], 2 * seed + 1
        messages, splits = [], []
        for count in segments:
            counts = random.integers(0, 9, [ranks, count]) * random.integers(0, 2, [ranks, 1])
            blocks = [[*row.tolist(), *random.integers(-(2**62), 2**62, row.sum()).tolist()] for row in counts]
            messages.append([entry for block in blocks for entry in block] + [7] * int(random.integers(0, 5)))
            splits.append([len(block) for block in blocks])
        compare(kernels, messages, splits, segments)


def check_headers_that_lie_are_found(kernels):
    """No entry outside the block is read, whatever a header says."""
    many = [2**62] * 40
    for message, splits, segments in (
        *((message, splits, [1, 1]) for message, splits, _ in LIES),
        (many, [40], [40]), ([1] * 40 + [9] * 39, [79], [40]), ([LEAST, 0, 0], [3], [2]),
    ):  # fmt: skip
        assert read_lengths(kernels, message, splits, segments)[0] == INVALID, (message, splits)


@once
def check_bad_arguments_are_refused(kernels):
    for splits, segments in (([-1, 4], [1]), ([2**31 - 1, 1], [1]), ([1], []), ([1], [-1]), ([1], [2**40])):
        assert read_lengths(kernels, [0] * 4, splits, segments)[0] == INVALID, (splits, segments)
    for count, size in ((5, 4), (-1, 4), (4, 2**31)):
        splits = np.array([count], np.int32)
        lists = pointers([None]), pointers([splits.ctypes.data])
        assert kernels.answer("join_messages", *lists, 1, 1, None, None, size) == INVALID, (count, size)
    assert kernels.answer("split_messages", None, np.array([-1], np.int32), 1, 1, None, pointers([None])) == INVALID
