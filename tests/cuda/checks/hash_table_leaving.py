"""Evictions and checkpoints of the device table, against dictionaries (tests/oracles/hash_table.py)."""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.device_table import BAD_HANDLE, BAD_INVERSE, FULL, OUT_OF_MEMORY, STALE, DeviceTable, Refused
from tests.oracles.hash_table import TableOracle, pack

DIM = 3


def answer_of(call, *arguments, **more):
    """Returns the library's code for a refused call."""
    try:
        call(*arguments, **more)
    except Refused as refused:
        return refused.args[0]
    return 0


def oracle_of(segments, **options):
    return TableOracle(segments, lambda key: np.full(DIM, 0.5, np.float32), **options)


def table_of(kernels, segments, **more):
    return DeviceTable(kernels, DIM, range(segments), a=0.5, chunk_rows=32, **more)


def batch_of(random, segments, most, vocabulary):
    ids = lambda: (random.integers(-2, vocabulary, random.integers(1, most)) // random.integers(1, 4)).tolist()  # noqa: E731
    return [[ids() for _ in range(segments)] for _ in range(2)]


def step(table, oracle, batch, random, update=False):
    """Makes a lookup and an update on both."""
    message, splits, received = pack(batch)
    rows, inverse, handles = table.lookup(message, splits)
    np.testing.assert_array_equal(rows[: len(received)], oracle.lookup(received))
    if not update:
        return
    grads = random.integers(-3, 4, [len(received), DIM]).astype(np.float32)  # sums are exact
    table.apply(handles, inverse, grads, learning_rate=0.5)
    oracle.apply(received, grads, 1.0, 0.5)


def compare(table, oracle):
    """Compares all rows with their clocks and counts, from an export's records, and the statistics."""
    assert table.statistics() == [counted[1:] for counted in oracle.statistics()]
    for segment, rows in enumerate(oracle.rows):
        assert table.tombstones(segment) == oracle.tombstones(segment), "tombstones of ids that left and stayed away"
        ids, records = table.export(segment)
        assert sorted(ids.tolist()) == sorted(rows)
        words, numbers = records[:, :16].copy().view(np.uint32), records[:, 16:].copy().view(np.float32)
        for id_, (last, count, _, pool), row in zip(ids.tolist(), words, numbers):
            assert (last, count, pool) == (rows[id_].last, rows[id_].count, int(not rows[id_].hot)), (
                f"clock, count and pool of {id_}"
            )
            np.testing.assert_array_equal(row[:DIM], rows[id_].numbers)


def check_rows_leave_as_the_policies_say(kernels):
    """Tests max_rows with LRU and LFU, and a time to live. Evicted ids return with their initial row."""
    for options in (
        {"max_rows": 40, "eviction": "lru"}, {"max_rows": 48, "eviction": "lfu", "window": 2, "ttl": 5}, {"ttl": 3},
    ):  # fmt: skip
        random = np.random.default_rng(5)
        options["record_tombstones"] = options != {"ttl": 3}
        table, oracle = table_of(kernels, 2, **options), oracle_of(2, **options)
        for number in range(8):
            step(table, oracle, batch_of(random, 2, 18, 90), random, update=number == 3)
            if number % 4 == 3:
                compare(table, oracle)
                table.forget_tombstones()
                oracle.forget_tombstones()
        assert sum(counters["evictions"] for counters in oracle.counters) > 10
        table.close()


def check_rows_are_evicted_and_removed_by_hand(kernels):
    random = np.random.default_rng(6)
    options = {"eviction": "lfu", "record_tombstones": True}
    table, oracle = table_of(kernels, 2, **options), oracle_of(2, **options)
    for _ in range(3):
        step(table, oracle, batch_of(random, 2, 90, 300), random)
    for segment, count in ((0, 1), (1, 20), (1, 0), (0, 10**6)):
        assert table.evict(segment, count) == oracle.evict(segment, count)
        compare(table, oracle)
    gone = [*list(oracle.rows[1])[:30], 10**9, -(2**63)]
    assert table.remove(1, gone + gone[:3]) == oracle.remove(1, gone) == 30
    assert table.remove(1, []) == table.remove(0, [12345]) == 0
    compare(table, oracle)
    before = table.size()[1]["chunk_bytes"]
    step(table, oracle, batch_of(random, 2, 30, 300), random)
    compare(table, oracle)
    assert table.size()[1]["chunk_bytes"] == before  # the memory of evicted rows is used again
    table.close()


def check_a_full_table_refuses_and_stays(kernels):
    """The rows of the last lookups and of the current lookup may not leave."""
    for eviction in ("none", "lru"):
        table = table_of(kernels, 1, max_rows=8, eviction=eviction, window=1)
        oracle = oracle_of(1, max_rows=8, eviction=eviction)
        for ids in ([1, 2, 3], [4, 5, 6]):
            table.lookup([3, *ids], [4])
            oracle.lookup([(0, i) for i in ids])
        assert answer_of(table.lookup, [9, *range(1, 10)], [10]) == FULL
        compare(table, oracle)
        table.lookup([8, *range(1, 9)], [9])
        assert table.size()[0] == [8]
        table.close()


def check_gradients_of_rows_that_left_are_refused(kernels):
    table = table_of(kernels, 1)
    _, inverse, handles = table.lookup([3, 1, 2, 3], [4])
    table.remove(0, [2])
    grads = np.ones([3, DIM], np.float32)
    assert answer_of(table.apply, handles, inverse, grads) == STALE
    np.testing.assert_array_equal(table.find([1, 1], [2])[0][:1], 0.5)
    table.close()


def check_handles_of_elsewhere_are_refused(kernels):
    """An update checks its handles before a kernel follows them, and a refusal changes nothing."""
    table = table_of(kernels, 1)
    table.lookup([3, 1, 2, 3], [4])
    _, inverse, handles = table.lookup([4, 1, 2, 3, 2], [5])
    grads = np.ones([4, DIM], np.float32)
    wrong = [
        (handles - (1 << 32) * np.array([0, 1, 0]), BAD_HANDLE), (handles + (1 << 32), BAD_HANDLE),
        (handles & 0xFFFFFFFF, BAD_HANDLE), (handles + 3, BAD_HANDLE), (handles | -(2**63), BAD_HANDLE),
        (handles[:2], BAD_INVERSE), (handles[:0], BAD_INVERSE),
    ]  # fmt: skip
    for others, code in wrong:
        assert answer_of(table.apply, others, inverse, grads) == code
    for place in (-1, 3, 2**31 - 1):
        elsewhere = np.where([0, 0, 1, 0], place, inverse).astype(np.int32)
        assert answer_of(table.apply, handles, elsewhere, grads) == BAD_INVERSE
    table.allocations_left = 1  # the check makes the second one
    assert answer_of(table.apply, handles, inverse, grads) == OUT_OF_MEMORY
    table.allocations_left = None
    np.testing.assert_array_equal(table.find([3, 1, 2, 3], [4])[0][:3], 0.5)
    for number in (3, -1, 2**31):
        assert answer_of(table.read_records, np.array([0, number])) == BAD_HANDLE
    table.apply(handles, inverse, grads)
    np.testing.assert_array_equal(table.find([3, 1, 2, 3], [4])[0][:3, 0], [-0.5, -1.5, -0.5])
    table.close()


def check_a_table_is_cleared(kernels):
    """A cleared table keeps its clock only. Older handles are stale."""
    table = table_of(kernels, 2, eviction="lru")
    random = np.random.default_rng(8)
    for _ in range(2):
        oracle = oracle_of(2, eviction="lru")
        oracle.clock = table.size()[1]["clock"]
        for _ in range(2):
            step(table, oracle, batch_of(random, 2, 90, 300), random)
        compare(table, oracle)
        _, inverse, handles = table.lookup([1, 0, 7], [3])
        table.clear()
        assert table.size()[0].tolist() == [0, 0] and table.size()[1]["chunk_bytes"] == 0
        assert answer_of(table.apply, handles, inverse, np.ones([1, DIM], np.float32)) == BAD_HANDLE
        assert table.statistics() == [[0] * 5] * 2
    table.close()


# These are copies. The checks above cover effects of schedules.
@once
def check_a_checkpoint_goes_back_in(kernels):
    """Restores into another table, partly over existing rows; also 16-bit rows with all kinds of slots, and a delta."""
    for storage, rule, dim, numbers in (
        ("float32", "adagrad", 3, {}),
        ("bfloat16", "adam", 5, {"one_minus_beta_1": 0.1, "one_minus_beta_2": 0.1}),
        ("float16", "rowwise_adagrad", 3, {}),
    ):
        numbers = {"epsilon": 1e-6, **numbers}
        table, other = (DeviceTable(kernels, dim, [1, 2], storage, rule=rule, chunk_rows=32, **numbers) for _ in "ab")
        ids = np.arange(-40, 60, dtype=np.int64)
        _, inverse, handles = table.lookup([0, 100, *ids], [102])
        version = table.size()[1]["version"]
        grads = np.random.default_rng(7).normal(size=[100, dim]).astype(np.float32)
        for clock in (1, 2):
            table.apply(handles, inverse, grads)
            _, inverse, handles = table.lookup([0, 10, *ids[:10]], [12])
            assert table.size()[1]["clock"] == clock + 1
            grads = grads[:10]
        exported, records = table.export(1)
        np.testing.assert_array_equal(exported, ids)
        other.lookup([5, 5, *range(10)], [12])
        other.restore(1, exported[50:], records[50:])
        other.restore(1, exported[:50], records[:50])
        again, same = other.export(1)
        order = np.argsort(again, kind="stable")
        np.testing.assert_array_equal(again[order], exported)
        np.testing.assert_array_equal(same[order], records)
        assert other.size()[0].tolist() == [5, 100] and other.size()[1]["clock"] == 3
        rows = [t.find([0, 100, *ids], [102])[0] for t in (table, other)]
        np.testing.assert_array_equal(*rows)
        changed = [len(table.export(1, since=since)[0]) for since in ((1, version), (3, version + 2))]
        assert changed == [100, 10]
        table.close()
        other.close()
