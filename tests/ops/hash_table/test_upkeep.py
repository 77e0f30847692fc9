"""A table outside the training step: evictions, admission, records, tombstones, candidates, clock, statistics."""

import numpy as np
import pytest

from tests.oracles.hash_table import TableOracle, pack, table_hash
from tests.oracles.rank_partition import mix64
from tests.support.compare import assert_same_integers
from tests.support.hash_tables import new_table
from tests.support.ids import INT64_MAX, INT64_MIN
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

EXTREME = [INT64_MIN, -1, 0, 1, INT64_MAX]


def ids_of(table, segment=0):
    return sorted(table.records(segment)[0].tolist())


def grads_for(batch, dim=4):
    return np.ones([len(pack(batch)[2]), dim], np.float32)


def test_records_come_in_hash_order_and_make_the_same_table():
    batch = [[EXTREME, [1, 2]], [[5, 5], EXTREME]]
    with new_table(2) as table, new_table(2) as copy:
        table.train(batch, grads_for(batch), learning_rate=0.5)
        table.lookup([[[1], []]])
        for segment in range(2):
            ids, records = table.records(segment)
            assert ids.tolist() == sorted(ids.tolist(), key=mix64)
            want_count = [2 if (segment, i) == (0, 1) else 1 for i in ids]
            assert records["count"].tolist() == records["last"].tolist() == want_count
            assert (records["pool"] == 0).all()
            copy.lookup([[[3], [1]]])  # 3 is not among the records of segment 0, 1 is overwritten
            copy.restore(ids, records, segment)
            ops.table_remove(copy.handle, segment, [3])
            copied_ids, copied = copy.records(segment)
            np.testing.assert_array_equal(copied_ids, ids)
            np.testing.assert_array_equal(copied, records)
        np.testing.assert_array_equal(copy.find(batch), table.find(batch))


def test_a_copy_without_the_clock_trains_alike():
    """A row whose last lookup has the number of the copy's next one must not count as touched."""
    with new_table() as table, new_table() as copy:
        for _ in range(3):
            table.lookup([[[1, 2]]])
        copy.restore(*table.records())
        for one in (table, copy):
            one.train([[[2, 1, 2]]], np.ones([3, 4], np.float32))
        np.testing.assert_array_equal(copy.find([[[1, 2]]]), table.find([[[1, 2]]]))
        np.testing.assert_array_equal(copy.records()[1]["count"], [4, 4])


def test_export_goes_in_batches():
    with new_table() as table:
        table.lookup([[list(range(1000))]])
        ids, handles = ops.table_keys(table.handle, 0)
        whole = ops.table_read_records(table.handle, handles).numpy()
        parts = [ops.table_read_records(table.handle, handles[i : i + 300]).numpy() for i in range(0, 1000, 300)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        assert len(set(ids.numpy().tolist())) == 1000


def test_a_delta_holds_what_changed():
    with new_table() as table:
        table.train([[[1, 2, 3]]], np.ones([3, 4], np.float32))
        clock = ops.table_clock(table.handle)
        assert table.records(since=clock)[0].size == 0
        table.lookup([[[1, 4]]])  # 1 is touched, which delays its eviction; 4 is made
        table.train([[[2]]], np.ones([1, 4], np.float32))
        assert sorted(table.records(since=clock)[0]) == [1, 2, 4]
        assert sorted(table.records()[0]) == [1, 2, 3, 4]


def test_remove():
    with new_table(2, record_tombstones=True) as table:
        table.train([[EXTREME, EXTREME]], grads_for([[EXTREME, EXTREME]]))
        assert_same_integers(ops.table_remove(table.handle, 0, [-1, 7, INT64_MIN, -1]), 2)
        assert_same_integers(ops.table_size(table.handle), [3, 5])
        np.testing.assert_array_equal(table.find([[[-1], []]]), [table.initial((0, -1))])
        np.testing.assert_array_equal(table.find([[[], [-1]]]), [table.initial((1, -1)) - 1])
        assert ops.table_tombstones(table.handle, 0).numpy().tolist() == [INT64_MIN, -1]
        assert ops.table_tombstones(table.handle, 1).numpy().tolist() == []
        np.testing.assert_array_equal(table.lookup([[[-1], []]]).rows[0], table.initial((0, -1)))


def test_tombstones_are_of_ids_that_have_not_come_back():
    with new_table(record_tombstones=True) as table:
        table.lookup([[[1, 2, 3]]])
        ops.table_remove(table.handle, 0, [1, 2])
        table.lookup([[[2]]])
        assert ops.table_tombstones(table.handle, 0).numpy().tolist() == [1]
        ops.table_forget_tombstones(table.handle)
        assert ops.table_tombstones(table.handle, 0).numpy().tolist() == []
        ops.table_remove(table.handle, 0, [3, 1])
        assert ops.table_tombstones(table.handle, 0).numpy().tolist() == [3]
    with new_table() as table:
        table.lookup([[[1]]])
        ops.table_remove(table.handle, 0, [1])
        assert ops.table_tombstones(table.handle, 0).numpy().tolist() == [], "nobody asked for them"


@pytest.mark.parametrize(("eviction", "left"), [("lru", [1, 2, 4]), ("lfu", [1, 3, 4])])
def test_evict(eviction, left):
    """Ids 1 to 4 were last touched at lookups 5, 4, 2, 6, and touched 2, 1, 2 and 1 times. Lookup 6 has no update, so
    it is pinned.
    """
    with new_table(eviction=eviction, record_tombstones=True) as table:
        for ids in ([1], [3], [], [2], [1], [4]):
            table.lookup([[ids]])
        if eviction == "lfu":
            table.restore([3], with_count(table, 3, 2))
        assert_same_integers(ops.table_evict(table.handle, 0, 1), 1)
        assert ids_of(table) == left
        assert_same_integers(ops.table_evict(table.handle, 0, 10), 2)
        assert ids_of(table) == [4]
        assert table.statistics() == [[1, 1, 4, 3, 0, 0]]
        assert ops.table_tombstones(table.handle, 0).numpy().tolist() == [1, 2, 3]


def with_count(table, id_, count):
    ids, records = table.records()
    records = records[ids == id_]
    records["count"] = count
    return records


def test_equal_rows_leave_in_the_order_of_their_hash():
    with new_table(eviction="lru", max_rows=1000) as table:
        table.lookup([[list(range(100))]])
        table.lookup([[[]]])
        ops.table_evict(table.handle, 0, 30)
        assert ids_of(table) == sorted(sorted(range(100), key=table_hash)[30:])


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("window", [1, 3])
def test_max_rows(eviction, window):
    random = np.random.default_rng(0)
    policies = {"max_rows": 48, "eviction": eviction, "window": window, "record_tombstones": True}
    with new_table(2, **policies) as table:
        oracle = TableOracle(2, table.initial, **policies)
        for _ in range(40):
            batch = (random.zipf(1.3, [2, 2, 6]) % 300).tolist()
            received = pack(batch)[2]
            np.testing.assert_array_equal(table.lookup(batch).rows[: len(received)], oracle.lookup(received))
            assert table.statistics() == oracle.statistics()
            assert [ids_of(table, s) for s in range(2)] == [sorted(rows) for rows in oracle.rows]
        assert oracle.counters[0]["evictions"] > 100
        assert ops.table_tombstones(table.handle, 0).numpy().tolist() == oracle.tombstones(0)


def test_time_to_live():
    """Rows that more than three lookups did not touch leave at the next one."""
    with new_table(ttl=3) as table:
        table.lookup([[[1, 2]]])
        for step in range(2, 5):
            table.lookup([[[2]]])
            assert ids_of(table) == [1, 2], step
        table.lookup([[[]]])
        assert ids_of(table) == [2]
        assert table.statistics() == [[1, 3, 2, 1, 0, 0]]


@pytest.mark.parametrize("count", [2, 3])
def test_admission_and_candidates(count):
    """The lookup of this count makes an id's row. Until then, no gradient trains it. Duplicates count once."""
    before = count - 1
    with new_table(2, admission_count=count) as table, new_table(2, admission_count=count) as copy:
        batch = [[[7, 7, INT64_MIN], []], [[7], [7]]]
        for _ in range(before):
            found = table.lookup(batch)
            assert_same_integers(found.handles, [-1, -1, -1])
            table.apply(found, grads_for(batch))
            np.testing.assert_array_equal(table.find(batch), [table.initial(key) for key in pack(batch)[2]])
        assert_same_integers(ops.table_size(table.handle), [0, 0])
        ids, counts = ops.table_candidates(table.handle, 0)
        assert ids.numpy().tolist() == sorted([7, INT64_MIN], key=mix64)
        assert counts.numpy().tolist() == [before, before]
        assert table.statistics() == [[0, 0, 0, 0, 2 * before, 2], [0, 0, 0, 0, before, 1]]
        ops.table_import_candidates(copy.handle, 0, ids, counts)
        for one in (table, copy):
            found = one.lookup([[[7, 8], []]])
            assert (found.handles.numpy() == -1).sum() == 1
            assert ids_of(one) == [7]
            assert sorted(ops.table_candidates(one.handle, 0)[0].numpy().tolist()) == [INT64_MIN, 8]


def test_clock():
    with new_table() as table:
        assert_same_integers(ops.table_clock(table.handle), [0, 0])
        table.lookup([[[1]]])
        table.find([[[1]]])
        assert ops.table_clock(table.handle).numpy()[0] == 1
        ops.table_set_clock(table.handle, tf.constant([41, 77], tf.int64))
        assert_same_integers(ops.table_clock(table.handle), [41, 77])
        table.lookup([[[1]]])
        assert table.records()[1]["last"].tolist() == [42]


def test_clear():
    with new_table(2, admission_count=2, record_tombstones=True) as table:
        for _ in range(2):
            table.lookup([[[1, 2], [3]]])
        ops.table_remove(table.handle, 0, [1])
        table.lookup([[[9], []]])
        found = table.lookup([[[2], []]])
        ops.table_accumulate_gradients(table.handle, found, tf.ones([1, 4]), scale=1.0)
        ops.table_clear(table.handle)
        assert table.statistics() == [[0] * 6] * 2
        assert ops.table_tombstones(table.handle, 0).numpy().tolist() == []
        assert ops.table_candidates(table.handle, 0)[0].numpy().tolist() == []
        assert_same_integers(ops.table_statistics(table.handle).bytes[3:], [0, 0])
        for _ in range(2):
            table.lookup([[[2], []]])
        ops.table_apply_accumulated(table.handle, learning_rate=1.0, step=1)
        np.testing.assert_array_equal(table.find([[[2], []]]), [table.initial((0, 2))])


def test_a_part_without_rows_leaves_the_waiting_gradients_pinned():
    """As on a rank without ids in one of the accumulated steps."""
    with new_table(1, max_rows=1, eviction="lru") as table:
        found = table.lookup([[[1]]])
        ops.table_accumulate_gradients(table.handle, found, tf.ones([1, 4]), scale=1.0)
        nothing = ops.TableRows(tf.zeros([0, 4]), found.handles[:0], found.inverse[:0])
        ops.table_accumulate_gradients(table.handle, nothing, tf.zeros([0, 4]), scale=1.0)
        with pytest.raises(tf.errors.FailedPreconditionError, match="while accumulated gradients wait"):
            ops.table_remove(table.handle, 0, [1])
        with pytest.raises(tf.errors.ResourceExhaustedError):  # the row may not leave
            table.lookup([[[2]]])
        ops.table_apply_accumulated(table.handle, learning_rate=1.0, step=1)
        table.lookup([[[2]]])


def test_memory_of_keys_does_not_count_copies():
    ids = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 3000).tolist()
    key_bytes = lambda table: int(ops.table_statistics(table.handle).bytes[0])  # noqa: E731
    with new_table() as table, new_table() as once:
        table.lookup([[ids]] * 64)
        once.lookup([[ids]])
        assert key_bytes(table) == key_bytes(once)
        for _ in range(2):
            table.restore(*table.records())
        assert key_bytes(table) == key_bytes(once)


def test_statistics_of_bytes():
    """Counts bytes of keys, and of rows in chunks of at most 16 MB. New rows use the room of removed rows."""
    with new_table(dim=16) as table:
        assert_same_integers(ops.table_statistics(table.handle).bytes, [0] * 5)
        for begin in range(0, 100_000, 10_000):
            table.lookup([[list(range(begin, begin + 10_000))]])
        # 64 bytes hold five keys, at a load between 0.60 / 2 and 0.75.
        least, most = 64 / 5 / 0.75 * 100_000, 2 * 64 / 5 / 0.60 * 100_000
        keys, rows, *others = ops.table_statistics(table.handle).bytes.numpy().tolist()
        assert least <= keys <= most
        assert 100_000 * (16 + 64) <= rows <= 100_000 * (16 + 64) + (32 << 20)
        assert others == [0, 100_000, 0]
        for begin in range(0, 1_000_000, 100_000):
            ops.table_remove(table.handle, 0, list(range(begin, begin + 100_000)))
            table.lookup([[list(range(begin + 100_000, begin + 200_000))]])
        assert least <= ops.table_statistics(table.handle).bytes.numpy()[0] <= most
        assert_same_integers(ops.table_statistics(table.handle).bytes[1:], [rows, 0, 100_000, 0])
