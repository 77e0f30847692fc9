"""Rows in host memory behind two device buffers and a pool: order of streams, lacking memory, refusals.

tests/cuda/op_kernels_programs.py compares the rows and the pool with a table in host memory.
"""

import ctypes

import numpy as np

from tests.cuda.checks import once, over_streams
from tests.cuda.device_buffer import DeviceBuffer, PoolMoves
from tests.cuda.device_table import ABSENT, INVALID, NOT_WRITTEN, OUT_OF_MEMORY, DeviceTable, answer_of
from tests.oracles.hash_table import TableOracle, pack

DIM, SEEDS, START = 5, [3, 4], 0.25
NO_MOVES = ([], [], [], [])  # of a pool


class HostRows:
    """Holds records by key in host memory. A new key begins with its initial record."""

    def __init__(self, storage, slots):
        row = np.full(DIM, START, np.float32)
        numbers = row if storage == "float32" else (row.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
        slots = np.zeros(slots * DIM, numbers.dtype)
        self.initial = np.concatenate([np.zeros(16, np.uint8), numbers.view(np.uint8), slots.view(np.uint8)])
        self.records = {}

    def read(self, keys):
        """Returns ids, segment_splits and records of keys grouped by segment."""
        ids = np.array([id_ for _, id_ in keys], np.int64)
        splits = np.searchsorted([segment for segment, _ in keys], np.arange(len(SEEDS) + 1)).astype(np.int64)
        records = [self.records.get(key, self.initial) for key in keys]
        return ids, splits, np.array(records, np.uint8).reshape(len(keys), len(self.initial))

    def write(self, keys, records):
        assert len(keys) == len(records)
        self.records.update(zip(keys, records.copy()))


def batches_of(random, count):
    """Yields batches with few frequent ids; some are empty, have one id, or all or none of the previous ids."""

    def skewed(low):
        ids = lambda: (random.zipf(1.3, random.integers(4, 24)) % 40 + low).tolist()  # noqa: E731
        return [[ids() for _ in SEEDS] for _ in range(2)]

    batches = [skewed(0) for _ in range(count)]
    batches[1] = [[[], []], [[], []]]
    batches[2] = [[[7], []], [[], []]]
    batches[4] = [source[::-1] for source in batches[3][::-1]]  # keys change segments
    batches[5] = batches[4]
    batches[6] = skewed(100)
    batches[7] = [[[-(2**63), 2**63 - 1, 0], [0]], [[0], [-(2**63)]]]
    return batches


def keys_of(random, received):
    """Returns distinct keys by segment, in random order inside a segment."""
    keys = list(dict.fromkeys(received))
    return sorted((keys[i] for i in random.permutation(len(keys))), key=lambda key: key[0])


def parts_of(random, keys):
    """Returns the prefetched and the late keys by segment, and all keys in the order of the rows."""
    part = random.integers(0, 3, len(keys))  # 1: prefetched and late
    prefetched, late = ([key for key, p in zip(keys, part) if p in which] for which in ((0, 1), (1, 2)))
    return prefetched, late, list(dict.fromkeys(prefetched + late))


# The kernels of a buffer only read what others have written: no schedule of threads changes that.
@once
@over_streams
def check_buffers_are_as_a_table_without(kernels):
    """Compares the rows of every lookup and, at the end, all records: embedding, slots, clocks, counts, versions."""
    adam = {"epsilon": 1e-7, "one_minus_beta_1": 0.1, "one_minus_beta_2": 0.01}
    for storage, rule, slots, more in (("float32", "sgd", 0, {}), ("bfloat16", "adam", 2, adam)):
        random = np.random.default_rng(slots)
        options = {"storage": storage, "rule": rule, "a": START, **more}
        plain, buffer = DeviceTable(kernels, DIM, SEEDS, **options), DeviceBuffer(kernels, DIM, SEEDS, **options)
        host = HostRows(storage, slots)
        oracle = TableOracle(len(SEEDS), lambda key: np.full(DIM, START, np.float32))
        batches = [pack(batch) for batch in batches_of(random, 9)]
        keys = [keys_of(random, received) for _, _, received in batches] + [[]]
        prefetched, late, told = parts_of(random, keys[0])
        buffer.prefetch(*host.read(prefetched))
        buffer.advance(host.read(late))
        back = []  # the keys whose rows are on their way to the host
        for step, (message, splits, received) in enumerate(batches):
            prefetched, late, _ = parts_of(random, keys[step + 1])
            first, more = ([key for key in prefetched if (key in back) == is_back] for is_back in (False, True))
            ids, its_splits, records = host.read(first)  # old rows, where the current batch has them
            buffer.prefetch(ids, its_splits, buffer.pinned(records))
            host.write(back, buffer.write_back())
            buffer.prefetch_more(*host.read(more))
            assert buffer.rows() == [len(keys[step]), 0, len(prefetched)]
            (rows, inverse, handles), (wanted, its_inverse, its_handles) = (
                table.lookup(message, splits) for table in (buffer, plain)
            )
            np.testing.assert_array_equal(rows, wanted, err_msg=f"{rule}, step {step}")
            grads = random.integers(-3, 4, [len(received), DIM]).astype(np.float32)  # sums are exact
            buffer.apply(handles, inverse, grads, learning_rate=0.5, step=step + 1)
            plain.apply(its_handles, its_inverse, grads, learning_rate=0.5, step=step + 1)
            if rule == "sgd":
                np.testing.assert_array_equal(rows[: len(received)], np.reshape(oracle.lookup(received), [-1, DIM]))
                oracle.apply(received, grads, 1.0, 0.5)
            if step % 2:
                host.write(told, buffer.read_active())
            buffer.advance(host.read(late))
            back, told = told, list(dict.fromkeys(first + more + late))
        host.write(back, buffer.write_back())
        for segment in range(len(SEEDS)):
            ids, records = plain.export(segment)
            assert sorted((segment, id_) for id_ in ids.tolist()) == sorted(k for k in host.records if k[0] == segment)
            for id_, record in zip(ids.tolist(), records):
                np.testing.assert_array_equal(host.records[segment, id_], record, err_msg=f"{rule}, id {id_}")
        plain.close()
        buffer.close()


@once
@over_streams
def check_records_are_sent_before_their_memory_is_given_again(kernels):
    buffer, host = DeviceBuffer(kernels, DIM, SEEDS, a=START), HostRows("float32", 0)
    ids, splits, records = host.read([(0, 1), (0, 2), (1, 1)])
    buffer.prefetch(ids, splits, buffer.pinned(records))
    ctypes.memset(buffer.host_memory(records.nbytes), 1, records.nbytes)
    buffer.advance()
    np.testing.assert_array_equal(buffer.read_active(), records)
    buffer.close()


@once
def check_page_locked_memory_that_ends_changes_nothing(kernels):
    """Ends it by the emulation, which counts allocations."""
    limit = getattr(kernels.library, "emulation_allocations_left", None)
    if limit is None:
        return
    buffer, host = DeviceBuffer(kernels, DIM, SEEDS, a=START), HostRows("float32", 0)
    buffer.prefetch(*host.read([(0, 1), (1, 1)]))
    buffer.advance()  # no rows return
    _, inverse, handles = buffer.lookup([1, 1, 1, 1], [4])
    buffer.apply(handles, inverse, np.ones([2, DIM], np.float32))
    second = host.read([(0, 1), (0, 5)])
    limit(ctypes.c_int64(0))
    assert answer_of(buffer.host_memory, 1 << 10) == answer_of(buffer.read_active) == OUT_OF_MEMORY
    limit(ctypes.c_int64(-1))
    np.testing.assert_array_equal(buffer.find([1, 1, 1, 1], [4])[0][:2], START - 1.0)  # the next launch
    limit(ctypes.c_int64(0))
    buffer.prefetch(*second)
    assert answer_of(buffer.advance) == OUT_OF_MEMORY
    limit(ctypes.c_int64(-1))
    np.testing.assert_array_equal(buffer.find([1, 1, 1, 1], [4])[0][:2], START - 1.0)
    buffer.prefetch(*second)
    buffer.advance()
    np.testing.assert_array_equal(buffer.write_back()[:, 16:].view(np.float32), START - 1.0)
    buffer.close()


@once
def check_a_buffer_that_does_not_fit_changes_nothing(kernels):
    buffer, host = DeviceBuffer(kernels, DIM, SEEDS, a=START, chunk_rows=32), HostRows("float32", 0)
    first, second = [(0, 1), (0, 2), (1, 1)], [(0, 2), (0, 5)]
    buffer.prefetch(*host.read(first))
    buffer.advance()
    buffer.write_back()
    _, inverse, handles = buffer.lookup([2, 1, 1, 2, 1], [5])
    buffer.apply(handles, inverse, np.ones([3, DIM], np.float32))

    def trained():
        rows, _ = buffer.find([2, 1, 1, 2, 1], [5])
        np.testing.assert_array_equal(rows[:3], START - 1.0)

    ids, splits, records = host.read(second)
    buffer.prefetch(*host.read([(0, 2), (0, 2)]))
    assert answer_of(buffer.advance) == answer_of(buffer.advance, host.read([(1, 3), (1, 3)])) == INVALID
    assert answer_of(buffer.lookup, [2, 0, 1, 7], [4]) == ABSENT
    trained()
    failed = 0
    for left in range(99):
        buffer.allocations_left = left
        # Prefetched rows stay for the next try. After a failed advance, the batch is prefetched anew.
        answers = answer_of(buffer.prefetch, ids, splits, records), answer_of(buffer.advance, host.read([(1, 9)]))
        buffer.allocations_left = None
        if answers == (0, 0):
            break
        assert set(answers) <= {0, OUT_OF_MEMORY}
        failed += 1
        trained()
    assert failed >= 6
    assert answer_of(buffer.prefetch, ids, splits, records) == 0
    assert answer_of(buffer.advance) == answer_of(buffer.read_active) == NOT_WRITTEN
    assert buffer.rows() == [3, 3, 2]
    buffer.allocations_left = 0  # the write-back has its memory already
    assert answer_of(buffer.prefetch_more, ids, splits, records) == OUT_OF_MEMORY
    assert buffer.write_back().shape == (3, buffer.record_bytes()) and buffer.rows() == [3, 0, 2]
    buffer.allocations_left = None
    np.testing.assert_array_equal(buffer.find([2, 0, 2, 5], [4])[0][:2, 0], [START - 1.0, START])
    ctypes.memset(buffer.host_memory(1 << 16), 1, 1 << 16)
    buffer.advance()
    buffer.drop()
    assert buffer.rows() == [0, 0, 0] and answer_of(buffer.lookup, [2, 0, 2, 5], [4]) == ABSENT
    buffer.close()
    assert answer_of(DeviceBuffer, kernels, DIM, SEEDS, admission_count=2) == INVALID


class ReusingBuffer(DeviceBuffer):
    """Its allocator gives released memory out at once, as TensorFlow's does: the work of one stream runs in order."""

    def __init__(self, *arguments, **options):
        self.sizes, self.released = {}, []
        super().__init__(*arguments, **options)

    def _allocate(self, context, bytes_):
        fitting = [address for address in self.released if self.sizes[address] >= bytes_]
        if not fitting:
            address = super()._allocate(context, bytes_)
            self.sizes[address] = bytes_
            return address
        smallest = min(fitting, key=self.sizes.get)
        self.released.remove(smallest)
        return smallest

    def _release(self, context, address):
        self.released.append(address)

    def close(self):
        super().close()
        for address in self.released:
            super()._release(None, address)


@once
@over_streams
def check_prefetched_rows_wait_for_new_memory(kernels):
    """The kernels of a lookup still use memory that the copies of the next batch get."""
    buffer, host = ReusingBuffer(kernels, DIM, SEEDS, a=START, chunk_rows=32), HostRows("float32", 0)
    buffer.prefetch(*host.read([(0, 1), (0, 2)]))
    buffer.advance()
    ids = [1, 2] * 2000
    rows, inverse, handles, distinct = buffer.begin_lookup([len(ids), 0, *ids], [2 + len(ids)])
    before = len(buffer.sizes)
    buffer.prefetch(*host.read([(0, id_) for id_ in range(100, 1500)]))
    buffer.host_memory(1)  # waits until the copies have ended
    assert len(buffer.sizes) == before, "the copies have got memory that nobody has used"
    np.testing.assert_array_equal(buffer.memory.get(rows)[: len(ids)], START, err_msg="rows of the lookup")
    np.testing.assert_array_equal(buffer.memory.get(inverse), np.tile([0, 1], 2000), err_msg="numbers of the lookup")
    assert len(set(buffer.memory.get(handles)[:distinct].tolist())) == distinct == 2
    buffer.advance()
    assert len(buffer.write_back()) == 2
    np.testing.assert_array_equal(
        buffer.find([1400, 0, *range(100, 1500)], [1402])[0][:1400], START, err_msg="new rows"
    )
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
    assert failed >= 4, failed
