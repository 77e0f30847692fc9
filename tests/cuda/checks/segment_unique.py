"""Segment unique against its NumPy oracle."""

import numpy as np

from tests.cuda.checks import once
from tests.oracles.segment_unique import segment_unique_oracle
from tests.support.ids import EDGE_CASES, from_segments, random_segments


def compare(ops, ids, splits):
    for ours, wanted in zip(ops.segment_unique(ids, splits), segment_unique_oracle(ids, splits)):
        np.testing.assert_array_equal(ours, wanted)


def check_edge_cases(ops):
    for segments in EDGE_CASES.values():
        compare(ops, *from_segments(segments))


def check_random_segments(ops):
    for seed in range(6):
        compare(ops, *random_segments(seed))


def check_many_tiles(ops):
    """More ids than a tile of each kernel, bounds of segments inside tiles, hot ids."""
    random = np.random.default_rng(0)
    n = 9_001
    ids = np.minimum(random.zipf(1.3, n), 3_000) - 1_500
    ids[random.integers(0, n, 50)] = np.iinfo(np.int64).min
    splits = np.concatenate([[0], np.sort(random.integers(0, n, 11)), [n]])
    compare(ops, ids, splits)


def check_a_number_of_ids_that_fills_its_tiles(ops):
    for n in (1024, 2048, 4096):
        compare(ops, np.arange(n) % 700, np.array([0, n // 2, n]))


@once
def check_launcher_without_memory(ops):
    ops.refuse_without_memory(lambda: ops.segment_unique([1], [0, 1]))
