"""The table on the device against dictionaries (tests/oracles/hash_table.py). Rows are compared bit for bit."""

import numpy as np

from tests.cuda.checks.hash_table_admission import (  # noqa: F401
    check_a_refused_lookup_counts_nothing,
    check_admission_counts_ids_without_a_row,
    check_candidates_go_to_another_table,
)
from tests.cuda.checks.hash_table_buffer import (  # noqa: F401
    check_a_buffer_that_does_not_fit_changes_nothing,
    check_buffers_are_as_a_table_without,
    check_page_locked_memory_that_ends_changes_nothing,
    check_prefetched_rows_wait_for_new_memory,
    check_records_are_sent_before_their_memory_is_given_again,
)
from tests.cuda.checks.hash_table_hot import (  # noqa: F401
    check_a_failed_advance_leaves_no_work_behind,
    check_a_pool_that_does_not_fit_changes_nothing,
    check_hot_rows_outlive_their_batches,
)
from tests.cuda.checks.hash_table_leaving import (  # noqa: F401
    check_a_checkpoint_goes_back_in,
    check_a_full_table_refuses_and_stays,
    check_a_table_is_cleared,
    check_gradients_of_rows_that_left_are_refused,
    check_handles_of_elsewhere_are_refused,
    check_rows_are_evicted_and_removed_by_hand,
    check_rows_leave_as_the_policies_say,
)
from tests.cuda.checks.hash_table_limits import (  # noqa: F401
    check_a_long_ttl_beside_a_short_one,
    check_lfu_forgets_what_was_popular,
    check_segments_keep_limits_of_their_own,
    check_the_full_segment_is_named,
)
from tests.cuda.checks.hash_table_mixed import (  # noqa: F401
    check_float32_numbers_of_a_cold_record_are_rounded,
    check_moves_without_memory_change_nothing,
    check_places_are_used_again,
    check_records_name_their_pools,
    check_rows_move_between_their_pools,
)
from tests.cuda.checks.hash_table_replicas import (  # noqa: F401
    check_a_row_that_came_back_elsewhere_has_the_count_of_its_return,
    check_a_row_under_way_survives_an_average,
    check_all_rows_above_max_rows_are_listed,
    check_all_rows_that_expire_are_listed,
    check_numbers_of_rows,
    check_the_common_state,
    check_trained_ids_are_taken_once,
)
from tests.cuda.checks.hash_table_sums import (  # noqa: F401
    check_refused_parts_change_no_sum,
    check_rows_whose_gradients_wait_stay,
    check_sums_are_dropped,
    check_sums_of_several_parts,
    check_sums_that_are_not_finite_are_left_out,
)
from tests.cuda.checks.hash_table_update import (  # noqa: F401
    check_a_sum_beyond_the_largest_number_is_left_out,
    check_initial_rows_and_slots,
    check_rows_of_16_bits,
    check_rows_of_gradients_that_are_not_finite_stay_as_they_are,
    check_rules,
    check_sums_are_in_the_order_received,
)
from tests.cuda.device_table import INVALID, NOWHERE, OUT_OF_MEMORY, DeviceTable, Refused, Step
from tests.oracles.hash_table import TableOracle, pack
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.ids import EDGE_CASES

SEEDS = [11, 22, 33]
MASK = 2**64 - 1


def oracle_of(dim, seeds=SEEDS, **options):
    made = {}

    def initial(key):
        if key not in made:
            made[key] = initial_row_oracle("uniform", -1.0, 1.0, seeds[key[0]], key[1], dim)
        return made[key]

    return TableOracle(len(seeds), initial, **options)


def table_of(kernels, dim, seeds=SEEDS, **more):
    return DeviceTable(kernels, dim, seeds, distribution="uniform", a=-1.0, b=1.0, **more)


def batch_of(random, sources, segments, most, vocabulary):
    """Returns ids by source and segment: many occur twice, and some are extremes."""
    ids = lambda: random.integers(-vocabulary, vocabulary, random.integers(0, most)).tolist()  # noqa: E731
    batch = [[ids() for _ in range(segments)] for _ in range(sources)]
    batch[0][0] += [-(2**63), -1, 2**63 - 1, 0, -(2**63)]
    return batch


def compare_lookup(table, oracle, batch, known):
    """Compares rows, numbers in order of first occurrence, and handles, which must stay equal (`known`)."""
    message, splits, received = pack(batch)
    rows, inverse, handles = table.lookup(message, splits)
    wanted = oracle.lookup(received)
    first = {key: number for number, key in enumerate(dict.fromkeys(received))}
    np.testing.assert_array_equal(inverse, [first[key] for key in received])
    assert len(handles) == len(first) and np.all(handles >> 32 == oracle.clock)
    np.testing.assert_array_equal(rows[: len(received)], np.array(wanted, np.float32).reshape(-1, table.dim))
    np.testing.assert_array_equal(rows[len(received) :], 0)
    for key, number in first.items():
        assert known.setdefault(key, handles[number] & 0xFFFFFFFF) == handles[number] & 0xFFFFFFFF, key
    assert len(set(known.values())) == len(known), "two ids have one row"
    np.testing.assert_array_equal(table.size()[0], [len(rows) for rows in oracle.rows])


def compare_find(table, oracle, batch, known):
    message, splits, received = pack(batch)
    rows, found = table.find(message, splits)
    np.testing.assert_array_equal(
        rows[: len(received)], np.array(oracle.find(received), np.float32).reshape(-1, table.dim)
    )
    np.testing.assert_array_equal(found, [known.get(key, NOWHERE) for key in received])


def check_lookups_grow_the_table(kernels):
    """Grows an empty table to hundreds of rows in several chunks. Rows, numbers and handles stay right while lines
    double.
    """
    random = np.random.default_rng(0)
    table, oracle, known = table_of(kernels, 5), oracle_of(5), {}
    for most, vocabulary in ((20, 8), (60, 40), (150, 200), (150, 200)):
        compare_lookup(table, oracle, batch_of(random, 3, 3, most, vocabulary), known)
    compare_find(table, oracle, batch_of(random, 2, 3, 50, 400), known)
    lines = table.size()[1]["line_bytes"] // 64
    assert sum(len(rows) for rows in oracle.rows) <= 0.75 * 5 * lines and lines > 64
    table.close()


def check_new_rows_are_numbered_by_first_occurrence(kernels):
    """Two tables give every id the same row, under any schedule."""
    table = table_of(kernels, 1, SEEDS[:1])
    ids = np.random.default_rng(1).integers(0, 3000, 5000)  # three tiles of numbers
    _, inverse, handles = table.lookup([5000, *ids], [5001])
    distinct = list(dict.fromkeys(ids.tolist()))
    np.testing.assert_array_equal(handles & 0xFFFFFFFF, np.arange(len(distinct)))
    np.testing.assert_array_equal(np.array(distinct)[inverse], ids)
    table.close()


def check_edge_cases(kernels):
    for segments in EDGE_CASES.values():
        seeds = list(range(len(segments)))
        table, oracle, known = table_of(kernels, 4, seeds), oracle_of(4, seeds), {}
        for batch in ([segments], [segments, segments], [[[] for _ in segments], segments]):
            compare_lookup(table, oracle, batch, known)
            compare_find(table, oracle, batch, known)
        table.close()


def id_of_hash(hash_):
    """Returns the id whose TableHash is `hash_`, by the inverse of Mix64."""
    x = hash_
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        x ^= x >> 33
        x = x * pow(factor, -1, 2**64) & MASK
    x = (x ^ x >> 33) ^ 0xD1B54A32D192ED03
    return x - 2**64 if x >= 2**63 else x


def check_ids_that_collide(kernels):
    """All ids take one path through the lines: full lines, marks, the last line. Then absent ids follow."""
    step = 0x1234567 << 32
    ids = [id_of_hash(step | n << 20 | 5) for n in range(60)]
    table, oracle, known = table_of(kernels, 4, SEEDS[:1]), oracle_of(4, SEEDS[:1]), {}
    for begin, end in ((0, 3), (3, 17), (0, 60)):
        compare_lookup(table, oracle, [[ids[begin:end]], [ids[end - 2 : begin : -1]]], known)
    others = [id_of_hash(step | n << 20 | 5) for n in range(60, 70)] + [id_of_hash(n << 40 | 5) for n in range(9)]
    compare_find(table, oracle, [[ids[::7] + others]], known)
    table.close()


def check_without_memory_nothing_changes(kernels):
    """Fails each allocation of a lookup that needs lines, chunks and a longer directory."""
    random = np.random.default_rng(2)
    for directory in (False, True):
        table, oracle, known = table_of(kernels, 3, chunk_rows=32), oracle_of(3), {}
        for _ in range(2):
            compare_lookup(table, oracle, batch_of(random, 2, 3, 30, 60), known)
        batch = batch_of(random, 2, 3, 160 if directory else 40, 10**6)
        message, splits, _ = pack(batch)
        before = table.size()[0]
        failed = 0
        while True:
            table.allocations_left = failed
            try:
                table.lookup(message, splits)
                break
            except Refused as refused:
                assert refused.args == (OUT_OF_MEMORY,)
            table.allocations_left = None
            np.testing.assert_array_equal(table.size()[0], before)
            failed += 1 if failed < 7 or not directory else 6
        table.allocations_left = None
        assert failed >= 4
        oracle.lookup(pack(batch)[2])
        compare_lookup(table, oracle, batch_of(random, 2, 3, 30, 60), known)
        table.close()


def check_what_does_not_fit_is_refused(kernels):
    table = table_of(kernels, 2)
    calls = (
        ([1, 1, 1, 5, 6], [5]),  # the headers say three ids, the message has two
        ([0, 1, 0, 5, 6], [5]),
        ([3, -1, 0, 5, 6], [5]),
        ([2**62, 2**62, -(2**63), 5], [4]),
        ([1, 1], [2]),  # shorter than its headers
    )
    for entries, splits in calls:
        for call in (table.lookup, table.find):
            try:
                call(entries, splits)
            except Refused as refused:
                assert refused.args == (INVALID,)
            else:
                raise AssertionError(f"{entries} was taken")
    entries, splits, message = table.message([0], [2**30, 2**30])  # refused before an entry is read
    assert kernels.answer("table_find", table.handle, message, 0, None, 0, None) == INVALID
    assert table.size()[0].tolist() == [0, 0, 0]
    most, count = 2**30, np.zeros(1, np.int64)
    step = Step(1.0, 1)
    for name, *arguments in (
        ("table_apply", None, 1, None, most + 1, None, 0, 1.0, step, None, count),
        ("table_apply", None, most + 1, None, 1, None, 0, 1.0, step, None, count),
        ("table_apply", None, -1, None, 1, None, 0, 1.0, step, None, count),
        ("table_remove", 0, None, most + 1, count), ("table_remove", 0, None, -1, count),
        ("table_remove", 3, None, 1, count), ("table_evict", 3, 1, count),
        ("table_keys", 3, 0, 0, 0, None, None, count), ("table_read_records", None, most + 1, None),
        ("table_read_records", None, -1, None), ("table_write_records", 0, None, most + 1, None),
        ("table_write_records", 3, None, 1, None), ("table_write_records", 0, None, -1, None),
    ):  # fmt: skip
        assert kernels.answer(name, table.handle, *arguments) == INVALID, (name, arguments)
    assert table.size()[0].tolist() == [0, 0, 0]
    for changes in (
        {"chunk_rows": 33}, {"chunk_rows": 16}, {"rule": "lion"}, {"clipnorm": -1.0}, {"max_rows": -1}, {"dim": 0},
        {"eviction": "mru"}, {"hot_after": 2, "storage": "float16"}, {"memory_budget": 9, "tier_folder": "."},
        {"seeds": []},
    ):  # fmt: skip
        try:
            table_of(kernels, **{"dim": 2, **changes})
        except Refused as refused:
            assert refused.args == (INVALID,)
        else:
            raise AssertionError(changes)
    table.close()
