"""Admission on the device: ids get a row at their third lookup. Counts are compared with a dictionary's."""

import numpy as np

from tests.cuda.checks.hash_table_leaving import DIM, answer_of, batch_of, compare, oracle_of, table_of
from tests.cuda.device_table import INVALID, OUT_OF_MEMORY
from tests.oracles.hash_table import pack

OPTIONS = {"admission_count": 3, "max_rows": 9, "eviction": "lru"}


def compare_counts(table, oracle):
    compare(table, oracle)
    for segment in range(2):
        assert table.candidates(segment) == oracle.export_candidates(segment), "counts of ids without a row"


def train(table, oracle, batch, random, *, parts):
    """Looks up and updates. `parts`: in two parts, whose sums wait."""
    message, splits, received = pack(batch)
    rows, inverse, handles = table.lookup(message, splits)
    np.testing.assert_array_equal(rows[: len(received)], oracle.lookup(received))
    np.testing.assert_array_equal(handles[inverse] < 0, [i not in oracle.rows[s] for s, i in received])
    grads = random.integers(-3, 4, [len(received), DIM]).astype(np.float32)  # sums are exact
    if parts:
        for begin in (True, False):
            table.accumulate(handles, inverse, grads * 0.5, begin=begin)
        table.apply_accumulated(learning_rate=0.5)
    else:
        table.apply(handles, inverse, grads, learning_rate=0.5)
    oracle.apply(received, grads, 1.0, 0.5)


def check_admission_counts_ids_without_a_row(kernels):
    """With and without a limit of counted ids, beyond which counts are halved. Evicted ids begin anew."""
    for limit in (0, 14):
        random, options = np.random.default_rng(limit), {"max_candidates": limit, **OPTIONS}
        table, oracle = table_of(kernels, 2, **options), oracle_of(2, **options)
        for number in range(16):
            train(table, oracle, batch_of(random, 2, 7, 25), random, parts=number % 2 == 1)
            if number % 4 == 3:
                compare_counts(table, oracle)
        _, hits, inserts, evictions, refused, candidates = np.sum(oracle.statistics(), axis=0)
        assert min(hits, inserts, refused, candidates) > 3 and (limit > 0 or evictions > 3), oracle.statistics()
        table.close()


def check_candidates_go_to_another_table(kernels):
    """Sets counts of ids with and without one, in lines that grow; repeats keep the last. Then all ids get a row."""
    table, oracle = table_of(kernels, 2, **OPTIONS), oracle_of(2, **OPTIONS)
    first = [(1, i) for i in (5, 6, 7)]
    table.lookup([0, 3, 5, 6, 7], [5])
    oracle.lookup(first)
    ids, counts = [7, *range(-20, 20), 2**63 - 1, 3], [1, *([2] * 40), 2, 1]
    for left in range(3):
        table.allocations_left = left
        assert answer_of(table.set_candidates, 1, ids, counts) == OUT_OF_MEMORY
        table.allocations_left = None
        compare_counts(table, oracle)
    table.set_candidates(1, ids, counts)
    oracle.candidates[1].update(zip(ids, counts))
    compare_counts(table, oracle)
    assert answer_of(table.set_candidates, 2, [1], [1]) == answer_of(table.candidates, -1) == INVALID
    table.lookup([0, 2, 4, 3], [4])  # 4 has come twice before, 3 once
    oracle.lookup([(1, 4), (1, 3)])
    assert table.size()[0].tolist() == [0, 1]
    compare_counts(table, oracle)
    table.clear()
    assert table.candidates(1) == []
    table.close()


def check_a_refused_lookup_counts_nothing(kernels):
    """Fails every allocation of a lookup that counts new ids, and one that finds no room for an admitted id."""
    random = np.random.default_rng(3)
    table, oracle = table_of(kernels, 2, **OPTIONS), oracle_of(2, **OPTIONS)
    for most in (5, 60):
        batch = batch_of(random, 2, most, 900)
        message, splits, received = pack(batch)
        for left in range(20):
            table.allocations_left = left
            answer = answer_of(table.lookup, message, splits)
            table.allocations_left = None
            if answer == 0:
                break
            assert answer == OUT_OF_MEMORY
            compare_counts(table, oracle)
        assert left >= 3
        oracle.lookup(received)
        compare_counts(table, oracle)
    table.close()
