"""Segments with limits of their own on the device, against dictionaries (tests/oracles/hash_table.py)."""

import copy

import numpy as np

from tests.cuda.checks import once
from tests.cuda.checks.hash_table_admission import compare_counts, train
from tests.cuda.checks.hash_table_leaving import answer_of, batch_of, compare, oracle_of, table_of
from tests.cuda.device_table import FULL
from tests.oracles.hash_table import pack

SEGMENTS = 2
PAIRS = [
    {"max_rows": [12, 14], "eviction": ["lru", "lfu"], "record_tombstones": True},
    {"max_rows": [0, 12], "eviction": ["none", "lfu"], "ttl": [3, 0], "admission_count": [1, 2]},
    {"ttl": [0, 2], "admission_count": [3, 2], "max_candidates": [8, 0]},
]


@once
def check_segments_keep_limits_of_their_own(kernels):
    """Runs LRU beside LFU, a time to live beside none, and other admissions. A peek answers what the lookup answers."""
    for number, options in enumerate(PAIRS):
        random = np.random.default_rng(number)
        table, oracle = table_of(kernels, SEGMENTS, **options), oracle_of(SEGMENTS, **options)
        for step in range(12):
            batch = batch_of(random, SEGMENTS, 7, 25)
            message, splits, received = pack(batch)
            wanted = copy.deepcopy(oracle).lookup(received)
            np.testing.assert_array_equal(table.peek(message, splits)[: len(received)], wanted, err_msg="a peek")
            train(table, oracle, batch, random, parts=step % 2 == 1)
            if step % 3 == 2:
                compare_counts(table, oracle)
        left = [counts["evictions"] for counts in oracle.counters]
        leave = [bool(options.get("ttl", [0, 0])[s] or "l" in options.get("eviction", "..")[s]) for s in (0, 1)]
        assert [count > 0 for count in left] == leave, (left, options)
        table.close()


def check_a_long_ttl_beside_a_short_one(kernels):
    """Rows of a ttl of 64 lookups leave at every fourth lookup alone, also where rows of the other segment leave."""
    options = {"ttl": [64, 1]}
    table, oracle = table_of(kernels, SEGMENTS, **options), oracle_of(SEGMENTS, **options)
    table.lookup([2, 2, 1, 2, 1, 2], [6])
    oracle.lookup([(0, 1), (0, 2), (1, 1), (1, 2)])
    table.set_clock(64, 64)
    oracle.clock = 64
    sizes = []
    for _ in range(4):
        table.lookup([1, 1, 9, 9], [4])
        oracle.lookup([(0, 9), (1, 9)])
        compare_counts(table, oracle)
        sizes.append(table.size()[0].tolist())
    assert sizes == [[3, 1], [3, 1], [3, 1], [1, 1]]
    table.close()


def check_the_full_segment_is_named(kernels):
    for full in (0, 1):
        table = table_of(kernels, SEGMENTS, max_rows=[[2, 9], [9, 2]][full])
        assert answer_of(table.lookup, [3, 3, 1, 2, 3, 1, 2, 3], [8]) == FULL
        assert table.full_segment() == full
        assert table.size()[0].tolist() == [0, 0]
        table.close()


@once
def check_lfu_forgets_what_was_popular(kernels):
    """Rows of eight lookups leave before rows of three, because their counts have been halved once more."""
    options = {"max_rows": 8, "eviction": "lfu", "frequency_decay_steps": 3}
    table, oracle = table_of(kernels, 1, **options), oracle_of(1, **options)
    for first, times in ((1, 8), (5, 3), (9, 1)):
        for _ in range(times):
            table.lookup([4, *range(first, first + 4)], [5])
            oracle.lookup([(0, i) for i in range(first, first + 4)])
    assert sorted(table.export(0)[0].tolist()) == [*range(5, 13)], "ids that stay"
    compare(table, oracle)
    table.close()
