"""The table on the device against dictionaries (tests/oracles/hash_table.py). Rows are compared bit for bit.

tests/cuda/op_kernels_programs.py compares it with the table in host memory: rules, storages, replicas, checkpoints.
"""

import contextlib
import copy

import numpy as np

from tests.cuda.checks import once
from tests.cuda.checks.hash_table_buffer import (  # noqa: F401
    check_a_buffer_that_does_not_fit_changes_nothing,
    check_a_failed_advance_leaves_no_work_behind,
    check_a_pool_that_does_not_fit_changes_nothing,
    check_buffers_are_as_a_table_without,
    check_page_locked_memory_that_ends_changes_nothing,
    check_prefetched_rows_wait_for_new_memory,
    check_records_are_sent_before_their_memory_is_given_again,
)
from tests.cuda.device_table import FULL, INVALID, NOWHERE, DeviceTable, Gradients, Step, answer_of
from tests.oracles.hash_table import Exhausted, TableOracle, pack
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


def history(random):
    """Draws the policies of two segments."""
    each = lambda *values: [values[random.integers(len(values))] for _ in range(2)]  # noqa: E731
    return {
        "max_rows": each(0, 24, 32), "eviction": each("none", "lru", "lfu", "lfu"), "ttl": each(0, 0, 3, 64),
        "admission_count": each(1, 1, 2, 3), "max_candidates": each(0, 14), "frequency_decay_steps": each(0, 3, 5),
        "hot_after": each(0, 2, 3)[0], "record_tombstones": each(True, False)[0], "window": each(1, 1, 2)[0],
    }  # fmt: skip


def compare(table, oracle):
    """Compares all rows with their clocks, counts and pools, the ids that left or wait, and the statistics."""
    assert table.statistics() == [counted[1:] for counted in oracle.statistics()]
    hot = sum(row.hot for rows in oracle.rows for row in rows.values())
    assert table.size()[1]["cold_rows"] == sum(map(len, oracle.rows)) - hot, "rows of 16 bits"
    for segment, rows in enumerate(oracle.rows):
        assert table.tombstones(segment) == oracle.tombstones(segment), "ids that left and stayed away"
        assert table.candidates(segment) == oracle.export_candidates(segment), "counts of ids without a row"
        ids, records = table.export(segment)
        assert sorted(ids.tolist()) == sorted(rows)
        words, numbers = records[:, :16].copy().view(np.uint32), records[:, 16:].copy().view(np.float32)
        for id_, (last, count, _, pool), row in zip(ids.tolist(), words, numbers):
            wanted = rows[id_].last, rows[id_].count, int(not rows[id_].hot)
            assert (last, count, pool) == wanted, f"clock, count and pool of {id_}"
            np.testing.assert_array_equal(row, rows[id_].numbers)


def train(table, oracle, batch, random):
    """Trains both. A peek answers what the lookup answers, float16 rows are rounded, a delta holds the demoted rows."""
    message, splits, received = pack(batch)
    try:
        wanted = copy.deepcopy(oracle).lookup(received)
    except Exhausted:
        assert answer_of(table.lookup, message, splits) == FULL
        with contextlib.suppress(Exhausted):
            oracle.lookup(received)
        return
    wanted = np.reshape(wanted, [-1, table.dim])
    np.testing.assert_array_equal(table.peek(message, splits)[: len(received)], wanted, err_msg="a peek")
    totals, hot = table.size()[1], [[i for i, row in rows.items() if row.hot] for rows in oracle.rows]
    rows, inverse, handles = table.lookup(message, splits)
    oracle.lookup(received)
    np.testing.assert_array_equal(rows[: len(received)], wanted, err_msg="rows of a lookup")
    for segment, of_segment in enumerate(oracle.rows):
        demoted = {i for i in hot[segment] if i in of_segment and not of_segment[i].hot}
        changed = table.export(segment, since=(totals["clock"], totals["version"]))[0].tolist() if demoted else []
        assert demoted <= {*changed}, "a delta holds the demoted rows"
    np.testing.assert_array_equal(handles[inverse] < 0, [i not in oracle.rows[s] for s, i in received])
    grads = (random.integers(-8, 9, [len(received), table.dim]) / 2**14).astype(np.float32)  # sums are exact
    table.apply(handles, inverse, grads, learning_rate=0.5)
    oracle.apply(received, grads, 1.0, 0.5)


def check_histories(kernels):
    """Lookups, updates, evictions, removals and time that passes, under random policies."""
    for seed in range(14):
        random = np.random.default_rng(seed)
        options = history(random)
        oracle = TableOracle(2, lambda key: np.full(3, 0.5, np.float32), **options)
        table = DeviceTable(kernels, 3, range(2), a=0.5, chunk_rows=32, **options)
        for step in range(16):
            low, most = step // 4 * 7, random.integers(2, 12)  # a hot set that moves on
            ids = lambda: (low + random.geometric(0.15, random.integers(0, most))).tolist()  # noqa: B023, E731
            train(table, oracle, [[ids() for _ in range(2)] for _ in range(2)], random)
            if step % 4 == 1:
                segment, count = int(random.integers(2)), int(random.integers(9))
                assert table.evict(segment, count) == oracle.evict(segment, count)
                gone = [*list(oracle.rows[segment])[:count], 10**9]
                assert table.remove(segment, gone) == oracle.remove(segment, gone)
            if step % 8 == 6:
                oracle.skip(int(random.integers(90)))
                table.set_clock(oracle.clock, 99)
            if step % 4 == 3:
                compare(table, oracle)
                table.forget_tombstones()
                oracle.forget_tombstones()
        table.close()


@once
def check_places_are_used_again(kernels):
    """New ids come for three steps each. Only as many float32 rows have memory as were hot at once."""
    options = {"hot_after": 2, "frequency_decay_steps": 2, "chunk_rows": 32}
    table = table_of(kernels, 5, SEEDS[:1], **options)
    initial = []
    for step in range(24):
        ids = range(step // 3 * 20, step // 3 * 20 + 20)
        rows = table.lookup([20, *ids], [21])[0][:20]
        initial += [rows] if step % 3 == 0 else []
    totals = table.size()[1]
    of_metas = 5 * 32 * (32 + 4 + 4)  # with a free row and a place
    # The set that gets hot finds the places of one half of the set before, whose other half is demoted with it.
    assert totals["chunk_bytes"] - of_metas == 32 * (4 + 32), "one chunk for 32 float32 rows"
    assert totals["cold_rows"] == 140 and table.remove(0, range(160)) == 160
    assert table.size()[1]["cold_rows"] == 0, "places of rows that were removed"
    rows = table.lookup([160, *range(160)], [161])[0][:160]
    np.testing.assert_array_equal(rows, np.concatenate(initial), err_msg="initial rows in places of others")
    assert table.size()[1]["chunk_bytes"] == totals["chunk_bytes"]
    table.close()


def check_what_does_not_fit_is_refused(kernels):
    table = table_of(kernels, 2)
    calls = (
        ([1, 1, 1, 5, 6], [5]),  # the headers say three ids, the message has two
        ([0, 1, 0, 5, 6], [5]),
        ([3, -1, 0, 5, 6], [5]),
        ([2**62, 2**62, -(2**63), 5], [4]),
    )
    for entries, splits in calls:
        for call in (table.lookup, table.find):
            assert answer_of(call, entries, splits) == INVALID, entries
    entries, splits, message = table.message([0], [2**30, 2**30])  # refused before an entry is read
    assert kernels.answer("table_find", table.handle, message, 0, 0, None, 0, None) == INVALID
    assert table.size()[0].tolist() == [0, 0, 0]
    most, count = 2**30, np.zeros(1, np.int64)
    step = Step(1.0, 1)
    for name, *arguments in (
        *(
            ("table_apply", Gradients(None, rows, None, ids, None, 0, 1.0), step, None, count)
            for rows, ids in ((1, most + 1), (most + 1, 1))
        ),
        ("table_remove", 0, None, most + 1, count), ("table_read_records", None, most + 1, None),
        ("table_write_records", 0, None, most + 1, None),
    ):  # fmt: skip
        assert kernels.answer(name, table.handle, *arguments) == INVALID, (name, arguments)
    assert table.size()[0].tolist() == [0, 0, 0]
    for changes in (
        {"rule": "lion"}, {"clipnorm": -1.0}, {"max_rows": -1}, {"dim": 0},
        {"eviction": "mru"}, {"hot_after": 2, "storage": "float16"}, {"memory_budget": 9, "tier_folder": "."},
        {"seeds": []},
    ):  # fmt: skip
        assert answer_of(table_of, kernels, **{"dim": 2, **changes}) == INVALID, changes
    table.close()
