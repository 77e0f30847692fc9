"""Replicas that are averaged while lookups are under way, as under SemiAsync: rows, counters and evictions.

The ranks of tests/exchange average between the steps of a layer. Here an average meets rows whose gradients come later.
"""

import contextlib

import numpy as np
import pytest

from tests.oracles.hash_table import Row, TableOracle, pack, table_hash
from tests.support.hash_tables import new_table
from tf_fusedrec import ops, tf

DIM, SEGMENTS, STEPS = 4, 2, 30
POLICIES = {
    "longest_ago": {"max_rows": 26, "eviction": "lru"},
    "least_often": {"max_rows": 26, "eviction": "lfu"},
    "expiring": {"ttl": 2},
}


def _header(last, count):
    return last << 32 | count


def _merge(table, left, ids, numbers, headers, step=1):
    """Merges ids by segment, with their numbers [n, k] and headers [n]."""
    arguments = {"numbers": np.asarray(numbers, np.float32), "headers": np.asarray(headers, np.int64)}
    for name, splits, parts in (("left", "left_splits", left), ("ids", "segment_splits", ids)):
        arguments[name] = np.array([i for part in parts for i in part], np.int64)
        arguments[splits] = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    ops.table_merge(table.handle, **arguments, step=np.array(step))


def test_an_id_comes_once_in_an_average():
    numbers, headers = np.ones([3, 4]), [_header(1, 1)] * 3
    with new_table(2, averaged=True) as table:
        with pytest.raises(tf.errors.InvalidArgumentError, match="ids must be distinct, got 7 twice"):
            _merge(table, [[], []], [[5], [7, 7]], numbers, headers)
        assert table.statistics() == [[0] * 6] * 2
        _merge(table, [[], []], [[7], [5, 7]], numbers, headers)  # rows of two tables
        assert [keys for keys, *_ in table.statistics()] == [1, 2]


def test_a_row_whose_gradients_are_under_way_survives_an_older_average():
    """Another replica has trained id 1, two lookups ago. Here its gradients come behind the next lookup."""
    shard_of = lambda i: table_hash(i) >> 58  # noqa: E731
    fresh = [i for i in range(20, 2000) if shard_of(i) == shard_of(1)][:4]  # they take the rows that leave this shard
    with new_table(window=2, max_rows=6, eviction="lru", averaged=True) as table:
        table.lookup([[[1]]])
        table.lookup([[[2, 3, 4]]])
        under_way = table.lookup([[[1, 9]]])
        _merge(table, [[]], [[1]], np.full([1, DIM], 7.0), [_header(1, 5)])
        table.lookup([[fresh]])
        table.apply(under_way, np.ones([2, DIM], np.float32))
        ids, records = table.records()
        found = dict(zip(ids.tolist(), records))
        for i in fresh:
            np.testing.assert_array_equal(found[i]["row"], table.initial((0, i)), err_msg="a row without gradients")
        assert sorted(found) == [1, 9, *fresh]
        np.testing.assert_array_equal(found[1]["row"], np.full(DIM, 6.0), err_msg="7, and the gradient of 1")
        assert (found[1]["last"], found[1]["count"]) == (3, 5), "the largest counters of the replicas"


def test_a_row_that_left_another_replica_and_came_back_has_the_count_of_its_return():
    with new_table(max_rows=6, eviction="lfu", averaged=True) as table:
        for _ in range(4):
            table.lookup([[[1]]])
        _merge(table, [[]], [[1]], np.zeros([1, DIM]), [_header(6, 1)])
        _, records = table.records()
        assert [(row["last"], row["count"]) for row in records] == [(6, 1)], "those of the other replica"


class _Replica:
    """A table and its oracle."""

    def __init__(self, table, policy):
        self.table, self.oracle = table, TableOracle(SEGMENTS, table.initial, window=2, **policy)
        self.trained = [set() for _ in range(SEGMENTS)]  # since the last average
        self.seen = [set() for _ in range(SEGMENTS)]  # ids that have had a row since then

    def look_up(self, batch):
        received = pack(batch)[2]
        found, rows = self.table.lookup(batch), self.oracle.lookup(received)
        np.testing.assert_array_equal(found.rows[: len(received)], np.reshape(rows, [-1, DIM]))
        self._see_rows()
        return batch, found

    def update(self, looked_up, random):
        batch, found = looked_up
        message, splits, received = pack(batch)
        grads = random.integers(-8, 9, [len(received), DIM]).astype(np.float32) / 8  # sums are exact
        self.table.apply(found, grads)
        self.oracle.apply(received, grads, 1.0, 1.0)
        ops.table_note_trained(self.table.handle, message, splits)
        for segment, i in received:
            self.trained[segment].add(i)

    def take(self):
        """Returns {id: Row} of trained ids and the ids that left, by segment."""
        rows = self.oracle.rows
        trained = [{i: of[i] for i in sorted(ids) if i in of} for ids, of in zip(self.trained, rows)]
        left = [sorted(ids - set(of)) for ids, of in zip(self.seen, rows)]
        self.trained, self.seen = [set() for _ in rows], [set(of) for of in rows]
        message, headers = (part.numpy() for part in ops.table_take_unsynced(self.table.handle))
        ids = [i for part in (*trained, *left) for i in part]
        assert message.tolist() == [len(part) for part in (*trained, *left)] + ids
        counters = [_header(row.last, row.count) for of in trained for row in of.values()]
        assert headers.tolist() == counters + [0] * (len(ids) - len(counters))
        return trained, left

    def numbers(self, ids):
        keys = [(segment, i) for segment, part in enumerate(ids) for i in part]
        numbers = np.reshape(self.oracle.find(keys), [-1, DIM]).astype(np.float32)
        splits = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        read = ops.table_read_numbers(self.table.handle, np.array([i for _, i in keys], np.int64), splits)
        np.testing.assert_array_equal(read[: len(keys)], numbers)
        return numbers

    def merge(self, left, ids, mean, counters):
        _merge(self.table, left, ids, mean, [_header(*pair) for pair in counters])
        of_row = iter(zip(mean, counters))
        for s, rows in enumerate(self.oracle.rows):
            gone = [i for i in left[s] if i in rows and self.oracle._is_free(rows[i])]
            for i in gone:
                del rows[i]
            self.seen[s] -= set(gone)  # all replicas know
            for i in ids[s]:
                numbers, (last, count) = next(of_row)
                own = rows.get(i, Row(numbers, 0, 0))
                count = count if own.last < last else max(count, own.count)
                rows[i] = Row(numbers, max(last, own.last), count, frequency=count)
        self._see_rows()
        for s, rows in enumerate(self.oracle.rows):
            excess = max(len(rows) - (self.oracle.max_rows[s] or len(rows)), 0)
            assert self.oracle.evict(s, excess) == excess

    def compare(self):
        for s, rows in enumerate(self.oracle.rows):
            ids, records = self.table.records(s)
            assert sorted(ids.tolist()) == sorted(rows)
            for i, record in zip(ids.tolist(), records):
                assert (record["last"], record["count"]) == (rows[i].last, rows[i].count), (s, i)
                np.testing.assert_array_equal(record["row"], rows[i].numbers, err_msg=f"segment {s}, id {i}")

    def _see_rows(self):
        for ids, rows in zip(self.seen, self.oracle.rows):
            ids |= set(rows)


def _average(replicas):
    """Makes the rows that a replica has trained their mean, as tf_fusedrec/embedding/replicas.py."""
    taken = [replica.take() for replica in replicas]
    found = [[trained[s] for trained, _ in taken] for s in range(SEGMENTS)]
    ids = [sorted(set().union(*of_segment)) for of_segment in found]
    left = [sorted(set().union(*(gone[s] for _, gone in taken))) for s in range(SEGMENTS)]
    rows = [[of[i] for of in found[s] if i in of] for s in range(SEGMENTS) for i in ids[s]]
    counters = [(max(row.last for row in of), max(row.count for row in of)) for of in rows]
    mean = sum(replica.numbers(ids) for replica in replicas) / np.float32(len(replicas))
    for replica in replicas:
        replica.merge(left, ids, mean, counters)


@pytest.mark.parametrize("name", POLICIES)
def test_averages_between_a_lookup_and_its_gradients_agree_with_dictionaries(name):
    random = np.random.default_rng(len(name))
    with contextlib.ExitStack() as stack:
        policy = POLICIES[name]
        tables = [stack.enter_context(new_table(SEGMENTS, DIM, window=2, averaged=True, **policy)) for _ in range(2)]
        replicas = [_Replica(table, policy) for table in tables]
        batch = lambda: [random.integers(0, 60, [SEGMENTS, random.integers(1, 7)]).tolist()]  # noqa: E731
        under_way = [replica.look_up(batch()) for replica in replicas]
        for step in range(STEPS):
            coming = [replica.look_up(batch()) for replica in replicas]
            for replica, looked_up in zip(replicas, under_way):
                replica.update(looked_up, random)
            if step % 3 == 2:
                _average(replicas)
            under_way = coming
            for replica in replicas:
                replica.compare()
        assert all(counters["evictions"] > 20 for replica in replicas for counters in replica.oracle.counters)
