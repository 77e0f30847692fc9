"""Replicas that are averaged, on the device: trained ids, numbers of rows, and the common state."""

import numpy as np

from tests.cuda.checks.hash_table_leaving import answer_of
from tests.cuda.device_replicas import ReplicaTable
from tests.cuda.device_table import FULL, INVALID, OUT_OF_MEMORY

DIM, START = 3, 0.25
ADAGRAD = {"rule": "adagrad", "epsilon": 1e-6, "initial_accumulator_value": START}


def table_of(kernels, **more):
    return ReplicaTable(kernels, DIM, range(2), a=0.5, chunk_rows=32, averaged=True, **{**ADAGRAD, **more})


def train(table, first, second):
    """Trains ids of the two segments, and notes it."""
    message = [len(first), len(second), *first, *second], [2 + len(first) + len(second)]
    _, inverse, handles = table.lookup(*message)
    table.apply(handles, inverse, np.ones([len(inverse), DIM], np.float32), learning_rate=0.5)
    table.note_trained(*message)


def taken(table):
    """Returns {id: header} of trained ids and the list of ids that left, by segment."""
    counts, ids, headers = table.take_unsynced()
    parts = np.split(np.arange(len(ids)), np.cumsum(counts)[:-1])
    assert np.all(headers[sum(counts[:2]) :] == 0)
    return [dict(zip(ids[p].tolist(), headers[p].tolist())) for p in parts[:2]], [ids[p].tolist() for p in parts[2:]]


def header(last, count):
    return last << 32 | count


def check_trained_ids_are_taken_once(kernels):
    """An id that left and came back counts as trained; an id that left counts as gone. Untrained ids do not count."""
    table = table_of(kernels)
    train(table, range(40), [7])
    table.lookup([2, 0, 100, 3], [4])  # looked up, not trained
    assert table.remove(0, [5, 6, 9, 100]) == 4
    table.lookup([3, 1, 100, 9, 5, -1], [6])
    rows, gone = taken(table)
    wanted = {i: header(2 if i == 3 else 1, 2 if i == 3 else 1) for i in range(40) if i not in (5, 6, 9)}
    assert rows == [{**wanted, 5: header(3, 1), 9: header(3, 1)}, {7: header(1, 1)}], "ids that were trained"
    assert gone == [[6], []], "ids that left"
    assert taken(table) == ([{}, {}], [[], []]), "ids are taken once"
    train(table, [], [])
    train(table, [8], [])
    assert taken(table) == ([{8: header(5, 2)}, {}], [[], []])
    assert answer_of(table.note_trained, [1, 1, 4], [3]) == INVALID
    table.close()


def check_all_rows_that_expire_are_listed(kernels):
    table = table_of(kernels, ttl=2)
    train(table, range(100), [])
    for _ in range(3):
        table.lookup([0, 1, 7], [3])
    assert table.size()[0].tolist() == [0, 1] and taken(table) == ([{}, {}], [[*range(100)], []])
    table.close()


def check_all_rows_above_max_rows_are_listed(kernels):
    """An import is not held to max_rows, an average is."""
    source, table = table_of(kernels), table_of(kernels, max_rows=12, eviction="lru")
    train(source, range(80), [])
    table.restore(0, *source.export(0))
    table.lookup([0, 0], [2])
    table.merge([], [0, 0, 0], [1000], [0, 1, 1], np.zeros([1, 2 * DIM]), [header(2, 1)])
    assert table.size()[0].tolist() == [12, 0] and len(taken(table)[1][0]) == 69
    source.close()
    table.close()


def check_numbers_of_rows(kernels):
    """Reads rows with slots, and initial rows of ids without one, which stay without."""
    for storage in ("float32", "bfloat16"):
        table = table_of(kernels, storage=storage)
        train(table, [1, 2], [5])
        numbers = table.read_numbers([2, 3, 1, 5, 9], [0, 3, 5])
        trained = 0.5 - 0.5 / (np.sqrt(np.float32(START + 1)) + 1e-6)
        known = np.array([1, 0, 1, 1, 0], bool)
        np.testing.assert_array_equal(numbers[:5][~known], [[0.5] * DIM + [START] * DIM] * 2)
        np.testing.assert_allclose(numbers[:5, :DIM][known], trained, rtol=1e-2, err_msg="rows of trained ids")
        np.testing.assert_array_equal(numbers[:5, DIM:][known], START + 1, err_msg="slots of trained ids")
        np.testing.assert_array_equal(numbers[5:], 0)
        assert table.size()[0].tolist() == [2, 1]
        assert answer_of(table.read_numbers, [1, 2], [0, 2, 1]) == INVALID
        table.close()


def check_the_common_state(kernels):
    """Ids leave but for the rows of the last lookup, rows are set or made, and max_rows holds."""
    table = table_of(kernels, max_rows=12, eviction="lru", record_tombstones=True)
    train(table, range(10), [1])
    train(table, [0, 1], [])
    taken(table)
    ids, splits = [4, 0, 20, 21, 22, 23, 24, 1, 50], [0, 7, 9]
    numbers = np.arange(len(ids) * 2 * DIM, dtype=np.float32).reshape(len(ids), -1)
    headers = [header(2, 40 + n) for n in range(len(ids))]
    merge = [1, 4, 5, 77, 1], [0, 4, 5], ids, splits, numbers, headers  # 0 and 1 are of the last lookup, 4 is in both
    before = [table.export(segment)[1].tolist() for segment in range(2)]
    for left in range(5):
        table.allocations_left = left
        assert answer_of(table.merge, *merge) == OUT_OF_MEMORY
        table.allocations_left = None
        assert [table.export(segment)[1].tolist() for segment in range(2)] == before
    table.merge(*merge)
    exported = [dict(zip(ids.tolist(), records)) for ids, records in map(table.export, range(2))]
    # 10 rows and 5 new ones, without 5: 2 of the oldest left.
    assert len(exported[0]) == 12 and {0, 1, 4, 20, 21, 22, 23, 24} < exported[0].keys() and 5 not in exported[0]
    assert exported[1].keys() == {1, 50}, "rows of the second segment"
    for n, id_ in enumerate(ids):
        record = exported[int(n >= 7)][id_]
        np.testing.assert_array_equal(record[16:].view(np.float32), numbers[n], err_msg="numbers of the common state")
        assert record[:8].view(np.uint32).tolist() == [2, 40 + n], "counters of the common state"
    rows, gone = taken(table)
    assert rows == [{}, {}] and len(gone[0]) == 2 and gone[1] == [], "replicas know all but the evicted ids"
    assert sorted(table.tombstones(0)) == sorted([5, *gone[0]])
    more = list(range(100, 113))
    full = [], [0, 0, 0], more, [0, 13, 13], np.zeros([13, 2 * DIM]), [header(2, 1)] * 13
    assert answer_of(table.merge, *full) == FULL
    table.close()


def check_a_row_that_came_back_elsewhere_has_the_count_of_its_return(kernels):
    table = table_of(kernels, max_rows=6, eviction="lfu")
    for _ in range(4):
        table.lookup([1, 0, 1], [3])
    table.merge([], [0, 0, 0], [1], [0, 1, 1], np.zeros([1, 2 * DIM]), [header(6, 1)])
    ((_, record),) = zip(*table.export(0))
    assert record[:8].view(np.uint32).tolist() == [6, 1], "counters of the replica that has the row anew"
    table.close()


def check_a_row_under_way_survives_an_average(kernels):
    """Another replica has trained id 1 before the lookup whose gradients come here, behind the next lookup."""
    table = table_of(kernels, max_rows=6, eviction="lru", window=2)
    table.lookup([1, 0, 1], [3])
    table.lookup([3, 0, 2, 3, 4], [5])
    _, inverse, handles = table.lookup([2, 0, 1, 9], [4])
    table.merge([], [0, 0, 0], [1], [0, 1, 1], np.full([1, 2 * DIM], 4.0), [header(1, 5)])
    table.lookup([4, 0, 20, 21, 22, 23], [6])
    table.apply(handles, inverse, np.ones([2, DIM], np.float32), learning_rate=0.5)
    exported = dict(zip(*table.export(0)))
    assert sorted(exported) == [1, 9, 20, 21, 22, 23], "a row whose gradients are under way has left"
    assert exported[1][:8].view(np.uint32).tolist() == [3, 5], "the largest counters of the replicas"
    numbers = {i: record[16:].view(np.float32) for i, record in exported.items()}
    np.testing.assert_array_equal(numbers[1][DIM:], 5.0, err_msg="the mean and the gradient of 1")
    for i in (20, 21, 22, 23):
        np.testing.assert_array_equal(numbers[i], [0.5] * DIM + [START] * DIM, err_msg="rows without gradients")
    table.close()
