"""Segment unique against its NumPy oracle."""

import numpy as np

from tests.oracles.segment_unique import segment_unique_oracle
from tests.support.ids import EDGE_CASES, from_segments, random_segments

INVALID = 1  # cudaErrorInvalidValue


def unique(kernels, ids, splits):
    """unique_ids [U], unique_splits [S+1], inverse [N] of the kernels."""
    memory, n, segments = kernels.memory, len(ids), len(splits) - 1
    scratch = kernels.scratch("segment_unique", n, segments)
    out = memory.empty([n], np.int64), memory.empty([segments + 1], np.int64), memory.empty([n], np.int32)
    kernels.run("segment_unique", memory.put(ids), np.array(splits), n, segments, scratch, *out)
    unique_ids, unique_splits, inverse = map(memory.get, out)
    return unique_ids[: unique_splits[-1]], unique_splits, inverse


def compare(kernels, ids, splits):
    for ours, wanted in zip(unique(kernels, ids, splits), segment_unique_oracle(ids, splits)):
        np.testing.assert_array_equal(ours, wanted)


def check_edge_cases(kernels):
    for segments in EDGE_CASES.values():
        compare(kernels, *from_segments(segments))


def check_random_segments(kernels):
    for seed in range(6):
        compare(kernels, *random_segments(seed))


def check_many_tiles(kernels):
    """More ids than a tile of each kernel, bounds of segments inside tiles, hot ids."""
    random = np.random.default_rng(0)
    n = 9_001
    ids = np.minimum(random.zipf(1.3, n), 3_000) - 1_500
    ids[random.integers(0, n, 50)] = np.iinfo(np.int64).min
    splits = np.concatenate([[0], np.sort(random.integers(0, n, 11)), [n]])
    compare(kernels, ids, splits)


def check_a_number_of_ids_that_fills_its_tiles(kernels):
    for n in (1024, 2048, 4096):
        compare(kernels, np.arange(n) % 700, np.array([0, n // 2, n]))


def check_bad_splits_are_refused(kernels):
    memory = kernels.memory
    for splits in ([0, 3, 2, 4], [1, 4], [0, 5], [0]):
        out = memory.empty([4], np.int64), memory.empty([8], np.int64), memory.empty([4], np.int32)
        scratch = kernels.scratch("segment_unique", 4, len(splits))
        answer = kernels.answer(
            "segment_unique", memory.put(np.arange(4)), np.array(splits), 4, len(splits) - 1, scratch, *out
        )
        assert answer == INVALID, splits
    for splits, num_ids in (([0, 2**31], 2**31), ([0, -1], -1), (np.zeros(2**20 + 2, np.int64), 0)):
        sizes = np.array(splits), num_ids, len(splits) - 1
        assert kernels.answer("segment_unique", None, *sizes, None, None, None, None) == INVALID, sizes
