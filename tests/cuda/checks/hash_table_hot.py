"""A pool of hot rows beside the two device buffers: rows and records equal a device table's, bit for bit.

The caller decides which rows lie in the pool, so these checks choose them at random. tests/cuda/host_rows/hot.py
has the choice by counts.
"""

import numpy as np

from tests.cuda.checks import once, over_streams
from tests.cuda.checks.hash_table_buffer import DIM, SEEDS, START, HostRows, batches_of, keys_of
from tests.cuda.checks.hash_table_leaving import answer_of
from tests.cuda.device_buffer import DeviceBuffer, PoolMoves
from tests.cuda.device_table import INVALID, OUT_OF_MEMORY, DeviceTable
from tests.oracles.hash_table import pack

SLOTS = 10
NO_MOVES = ([], [], [], [])


class Pool:
    """Chooses the keys of slots at random. Host memory lacks the updates of a slot until it is dropped or read."""

    def __init__(self, random):
        self.random, self.keys = random, {}  # slot -> key

    def hot(self, keys):
        """Returns the keys that have no slot, and ids, splits and slots of the others."""
        slots = {key: slot for slot, key in self.keys.items()}
        hot = [key for key in keys if key in slots]
        splits = np.searchsorted([segment for segment, _ in hot], np.arange(len(SEEDS) + 1)).astype(np.int64)
        ids, places = np.array([id_ for _, id_ in hot], np.int64), np.array([slots[key] for key in hot], np.int64)
        return [key for key in keys if key not in slots], (ids, splits, places), hot

    def end(self, told):
        """Moves rows of a batch that ends. Returns the arguments of PoolMoves and the keys that come back."""
        slots = {key: slot for slot, key in self.keys.items()}
        kept = {n: slots[key] for n, key in enumerate(told) if key in slots}
        others = [n for n, key in enumerate(told) if key not in slots and self.random.random() < 0.4]
        free = [slot for slot in self.random.permutation(SLOTS).tolist() if slot not in kept.values()]
        enter = dict(zip(others, free))
        dropped = [slot for slot in enter.values() if slot in self.keys]
        kept.update(enter)
        leaving = [n for n in range(len(told)) if n not in kept]
        back = [*(told[n] for n in leaving), *(self.keys[slot] for slot in dropped)]
        self.keys.update({slot: told[n] for n, slot in enter.items()})
        return (leaving, [*kept], [*kept.values()], dropped), back


@once
def check_hot_rows_outlive_their_batches(kernels):
    """Compares the rows of every lookup and, at the end, all records."""
    random = np.random.default_rng(2)
    adam = {"rule": "adam", "epsilon": 1e-7, "one_minus_beta_1": 0.1, "one_minus_beta_2": 0.01}
    options = {"storage": "bfloat16", "a": START, **adam}
    plain = DeviceTable(kernels, DIM, SEEDS, **options)
    buffer = DeviceBuffer(kernels, DIM, SEEDS, hot_rows=SLOTS, **options)
    host, pool, told, hits = HostRows("bfloat16", 2), Pool(random), [], 0
    for step, batch in enumerate(batches_of(random, 12)):
        message, splits, received = pack(batch)
        cold, hot, hot_keys = pool.hot(keys_of(random, received))
        buffer.prefetch(*host.read(cold), hot)
        moves, back = pool.end(told)
        buffer.advance(moves=PoolMoves(*moves))
        host.write(back, buffer.write_back())
        told, hits = cold + hot_keys, hits + len(hot_keys)
        assert buffer.rows() == [len(told), 0, 0]
        found, wanted = (table.lookup(message, splits) for table in (buffer, plain))
        np.testing.assert_array_equal(found[0], wanted[0], err_msg=f"rows of a lookup with hot rows, step {step}")
        grads = random.integers(-3, 4, [len(received), DIM]).astype(np.float32)
        for table, (_, inverse, handles) in ((buffer, found), (plain, wanted)):
            table.apply(handles, inverse, grads, learning_rate=0.5, step=step + 1)
    assert hits > 20, hits
    host.write([*pool.keys.values()], buffer.read_hot([*pool.keys]))
    host.write(told, buffer.read_active())
    for segment in range(len(SEEDS)):
        ids, records = plain.export(segment)
        for id_, record in zip(ids.tolist(), records):
            np.testing.assert_array_equal(host.records[segment, id_], record, err_msg=f"record of id {id_}")
    plain.close()
    buffer.close()


@once
def check_a_pool_that_does_not_fit_changes_nothing(kernels):
    buffer, host = DeviceBuffer(kernels, DIM, SEEDS, hot_rows=2, a=START, chunk_rows=32), HostRows("float32", 0)
    first, second = [(0, 1), (0, 2), (1, 1)], [(0, 2), (0, 5)]
    buffer.prefetch(*host.read(first))
    buffer.advance(moves=PoolMoves(*NO_MOVES))
    _, inverse, handles = buffer.lookup([2, 1, 1, 2, 1], [5])
    grads = np.float32([[1], [2], [3]]) * np.ones(DIM, np.float32)
    buffer.apply(handles, inverse, grads)
    buffer.prefetch(*host.read(second))
    buffer.advance(moves=PoolMoves([], [0, 2], [1, 0], []))  # the rows of ids 1 of both segments
    kept = buffer.read_hot([0, 1])
    hot = np.array([1, 1], np.int64), np.array([0, 1, 2], np.int64), np.array([1, 0], np.int64)
    none = host.read([])
    assert answer_of(buffer.read_hot, [2]) == answer_of(buffer.read_hot, [-1]) == INVALID
    assert answer_of(buffer.prefetch, *none, (hot[0], hot[1], hot[2] + 1)) == INVALID
    assert answer_of(buffer.prefetch, *none, (hot[0], hot[1] + 1, hot[2])) == INVALID
    for wrong in (([2], [], [], []), ([], [-1], [0], []), ([], [0], [2], []), ([], [], [], [-1])):
        assert answer_of(buffer.advance, moves=PoolMoves(*wrong)) == INVALID
    for count in ("leaving", "kept", "dropped"):
        negative = PoolMoves([0], [0], [0], [0])
        setattr(negative, count, -1)
        assert answer_of(buffer.advance, moves=negative) == INVALID, count

    def unchanged():
        np.testing.assert_array_equal(buffer.read_hot([0, 1]), kept, err_msg="hot rows without memory")

    failed = 0
    for left in range(99):
        buffer.allocations_left = left
        many = host.read([(0, id_) for id_ in range(10, 40)])
        moves = PoolMoves([1], [0], [1], [1])
        answers = answer_of(buffer.prefetch, *many, hot), answer_of(buffer.advance, host.read([(1, 9)]), moves)
        buffer.allocations_left = None
        if answers == (0, 0):
            break
        assert set(answers) <= {0, OUT_OF_MEMORY}
        failed += 1
        unchanged()
    assert failed >= 7, failed
    back = buffer.write_back()
    np.testing.assert_array_equal(back[1], kept[1], err_msg="record of a slot that another row takes")
    np.testing.assert_array_equal(back[0], host.read([(0, 5)])[2][0])
    np.testing.assert_array_equal(buffer.read_hot([1])[0, 16:].view(np.float32), START - grads[1])
    rows, _ = buffer.find([2, 1, 1, 2, 1], [5])
    np.testing.assert_array_equal(rows[[0, 2]], START - grads[[0, 2]], err_msg="rows from slots")
    buffer.allocations_left = 0
    assert answer_of(buffer.read_hot, [0, 1] * 30) == OUT_OF_MEMORY
    buffer.allocations_left = None
    buffer.close()
    for wrong in (-1, 2**31 + 1):
        assert answer_of(DeviceBuffer, kernels, DIM, SEEDS, hot_rows=wrong) == INVALID


@once
@over_streams
def check_a_failed_advance_leaves_no_work_behind(kernels):
    """Rows of slots must not arrive in the memory of the next prefetch."""
    host, failed = HostRows("float32", 0), 0
    for left in range(99):
        buffer = DeviceBuffer(kernels, DIM, SEEDS, hot_rows=2, a=START, chunk_rows=32)
        buffer.prefetch(*host.read([(0, id_) for id_ in range(30)]))
        buffer.advance(moves=PoolMoves(*NO_MOVES))
        _, inverse, handles = buffer.lookup([2, 0, 1, 2], [4])
        buffer.apply(handles, inverse, np.ones([2, DIM], np.float32))
        buffer.prefetch(*host.read([(0, 1), (0, 2)]))
        buffer.advance(moves=PoolMoves([], [1, 2], [0, 1], []))  # ids 1 and 2
        buffer.prefetch(*host.read([]), (np.array([1, 2]), np.array([0, 2, 2]), np.array([0, 1])))
        buffer.allocations_left = left
        answer = answer_of(buffer.advance, moves=PoolMoves(*NO_MOVES))
        buffer.allocations_left = None
        if answer == OUT_OF_MEMORY:
            buffer.prefetch(*host.read([(0, 50), (0, 51), (0, 52)]))
            buffer.host_memory(1)  # waits until the copies have ended
            buffer.advance(moves=PoolMoves(*NO_MOVES))
            rows, _ = buffer.find([4, 0, 50, 51, 52, 53], [6])
            np.testing.assert_array_equal(rows[:4], START, err_msg="rows prefetched behind a failed advance")
            failed += 1
        buffer.close()
        if answer == 0:
            break
    assert failed >= 5, failed
