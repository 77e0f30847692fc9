"""Rows in host memory behind a device (host_rows.cc), beside tables in host memory: refusals, failures, traffic, waits.

op_kernels_programs.py has what both answer in random programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib

import numpy as np

from tests.cuda.op_kernels import refused, same
from tests.cuda.op_kernels_table import (
    DIM,
    PLAIN,
    SEGMENTS,
    WRONG,
    Side,
    compare_found,
    compare_tables,
    look_ahead,
    look_up,
    records_of,
    refresh,
)  # fmt: skip
from tests.golden.tables import accumulate, apply_accumulated, apply_gradients
from tests.oracles.hash_table import pack
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

SGD = {"rule": "sgd", "hyperparameters": [0.0], "a": 0.25, "host_rows": True}
ADAGRAD = {"rule": "adagrad", "hyperparameters": [0.3, 0.1, 1e-7, 1.0, 0.0], **PLAIN, "host_rows": True}
RATE, STEP = np.float32(0.5).reshape(()), np.array(1, np.int64)
FIRST = [[[0, 1, 2, 3], [0, 1]]]


class Pair:
    """A table of each kind, the answers to their last lookup and the gradients of its ids."""

    def __init__(self, name, options):
        self.sides = [Side(name, on_device, options) for on_device in (False, True)]
        self.random = np.random.default_rng(1)

    def look_up(self, batch, ahead=False):
        """ahead: What `see` answered; True: looks ahead first."""
        message, splits, received = pack(batch)
        if ahead:
            ahead = self.see(batch) if ahead is True else ahead
            self.found = [side.call(refresh, message, splits, *rows) for side, rows in zip(self.sides, ahead)]
        else:
            self.found = [side.call(look_up, message, splits, dtype=tf.float32) for side in self.sides]
        compare_found(*self.found, received)
        self.grads = self.random.normal(size=[len(received), DIM]).astype(np.float32)

    def see(self, batch):
        return [side.call(look_ahead, *pack(batch)[:2], dtype=tf.float32) for side in self.sides]

    def train(self):
        for side, found in zip(self.sides, self.found):
            side.call(apply_gradients, found.handles, found.inverse, self.grads, RATE, STEP)

    def fail(self, ids):
        """Looks up `ids` of the first segment, and more of the second one than it may have."""
        message, splits, _ = pack([[ids, [0, 1, 2]]])
        for side in self.sides:
            call = lambda: side.call(look_up, message, splits, dtype=tf.float32)  # noqa: B023, E731
            refused(tf.errors.ResourceExhaustedError, "max_rows_per_rank of", call)


def failed_pair(name, hot_rows):
    """A lookup could make room in the first segment, but the second one is full."""
    more = {"storage": "bfloat16", "stochastic_rounding": True, "max_rows": [4, 2], "eviction": ["lru", "none"]}
    pair = Pair(name, {**ADAGRAD, **more, "hot_rows": hot_rows})
    pair.look_up(FIRST)
    return pair


def no_row_leaves(name, hot_rows, ahead):
    """The first segment has room for the lookup, and keeps its rows, because the second one has none."""
    pair = failed_pair(name, hot_rows)
    pair.train()
    pair.fail([10, 11, 12])
    pair.train()
    compare_tables(pair.sides)
    pair.look_up([[[1, 2], [0]]], ahead)
    pair.train()
    compare_tables(pair.sides)
    pair.look_up(FIRST, ahead)
    compare_tables(pair.sides)


def rows_stay_pinned(name, hot_rows, ahead):
    """An eviction by hand leaves the rows of the last lookup, although a later one has failed."""
    pair = failed_pair(name, hot_rows)
    pair.train()
    pair.fail([0])
    assert [side.call(ops.table_evict, 0, 3) for side in pair.sides] == [0, 0]
    pair.train()
    pair.look_up(FIRST, ahead)
    pair.train()
    compare_tables(pair.sides)


def rows_stay(name, hot_rows, ahead):
    """No row leaves: gradients of the lookup before are welcome, and their update has its own version."""
    pair = failed_pair(name, hot_rows)
    pair.fail([0])
    pair.train()
    compare_tables(pair.sides)
    pair.fail([0])
    for side, found in zip(pair.sides, pair.found):
        side.call(accumulate, found.handles, found.inverse, pair.grads, True)
        side.call(apply_accumulated, RATE, STEP)
    compare_tables(pair.sides)
    pair.look_up(FIRST, ahead)
    compare_tables(pair.sides)


def run_failed_lookups():
    for hot_rows in (0, 3, 30):
        for ahead in (False, True):
            for program in (no_row_leaves, rows_stay_pinned, rows_stay):
                program(f"{program.__name__}{hot_rows}{ahead}", hot_rows, ahead)


def run_traffic():
    """Rows that were looked up more often stay. Every record that crosses the bus is counted."""
    side = Side("traffic", True, {**SGD, "hot_rows": 8})
    record = 16 + 4 * DIM
    frequent, others = range(8), range(100, 104)
    expected = np.zeros(3, np.int64)

    def train_on(ids, hits, sent, returned, times=1):
        for _ in range(times):
            message = np.array([len(ids), 0, *ids]), np.array([len(ids) + SEGMENTS], np.int32)
            found = side.call(look_up, *message, dtype=tf.float32)
            grads = np.ones([len(ids), DIM], np.float32)
            side.call(apply_gradients, found.handles, found.inverse, grads, np.float32(1.0), np.array(1, np.int64))
            expected[:] += (hits, sent * record, returned * record)
        same(side.call(ops.table_statistics).traffic[0], expected, f"traffic after rows {ids}")

    train_on(frequent, 0, 8, 0)
    train_on(others, 0, 4, 0)  # new rows; the pool takes the batch before
    train_on(frequent, 8, 0, 0)  # the others are as frequent as the rows of the pool, so they leave
    train_on(others, 0, 4, 4)
    train_on(frequent, 8, 0, 0)
    message = np.array([8, 0, *frequent]), np.array([8 + SEGMENTS], np.int32)
    rows = side.call(ops.table_read, *message, dim=DIM, dtype=tf.float32)
    same(rows[:8], np.full([8, DIM], SGD["a"] - 3 * 0.5, np.float32), "rows of an inference lookup")
    expected[2] += (4 + 8 + 8) * record  # the others, the pool, the batch
    same(side.call(ops.table_statistics).traffic[0], expected, "traffic after an inference lookup")
    side.call(ops.table_read, *message, dim=DIM, dtype=tf.float32)
    same(side.call(ops.table_statistics).traffic[0], expected, "traffic after another one: host memory is up to date")
    # The others become more frequent: four of them take slots.
    train_on(others, 0, 4, 0)
    train_on(others, 0, 4, 0)  # they were sent for the second time without need: the batch before has them
    train_on(others, 0, 4, 4)
    train_on(others, 4, 0, 0, times=4)
    train_on(frequent, 4, 4, 0)


def run_untrained():
    """Rows of the pool that a batch finds and does not train are still newer than in host memory."""
    pair = Pair("untrained", {**SGD, "hot_rows": 8})
    frequent, others = list(range(4)), list(range(100, 104))
    for ids, trains in ((frequent, True), (others, True), (frequent, False), (others, True)):
        pair.look_up([[ids, []]])
        if trains:
            pair.train()
    assert pair.sides[1].call(ops.table_statistics).traffic[0, 0] == 8, "the pool has both batches"
    message, splits, _ = pack([[frequent, []]])
    rows = [side.call(ops.table_read, message, splits, dim=DIM, dtype=tf.float32) for side in pair.sides]
    same(*rows, "rows of the pool that a batch found and did not train")
    compare_tables(pair.sides)


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE")


def run_a_pool_that_nobody_fills():
    """The host's memory for a pool grows with the rows in it, not with its size."""
    before, slots = resident_bytes(), 1 << 24
    side = Side("large pool", True, {**SGD, "hot_rows": slots})
    side.call(look_up, *pack([[[1, 2], [3]]])[:2], dtype=tf.float32)
    side.call(look_up, *pack([[[2], [3]]])[:2], dtype=tf.float32)
    assert resident_bytes() - before < 16 * slots, "bytes for slots without rows"


def run_refusals():
    """Wrong calls give a Status, and no row is lost."""
    wrong = WRONG
    schema = ops.table_schema()
    lacking, on_device = (
        {path for path in schema if place in schema[path]["lacks"]} for place in ("host_rows", "device")
    )
    assert lacking - on_device == {"storage.hot_after", "limits.admission_count", "averaged"}
    for path in sorted(lacking):
        default = schema[path]["default"]
        value = True if default is False else default + 1
        more = {"storage.dtype": "mixed"} if path == "storage.hot_after" else {}
        words = f"{path} of table '' is {value}, and must be {default} on a GPU with host_rows"
        refused(wrong, words, lambda: Side("refused", True, {**SGD, **more, path: value}))  # noqa: B023
    side = Side("host_rows", True, {**SGD, "max_rows": 4})
    message, splits = np.array([2, 1, 5, 6, 7], np.int64), np.array([5], np.int32)
    find_rows = lambda message, splits=splits: side.call(look_up, message, splits, dtype=tf.float32)  # noqa: E731
    see = lambda message, splits=splits: side.call(look_ahead, message, splits, dtype=tf.float32)  # noqa: E731
    from_seen = lambda message, splits, seen: side.call(refresh, message, splits, *seen)  # noqa: E731
    grads, numbers = np.ones([3, DIM], np.float32), (np.float32(1.0).reshape(()), np.array(1, np.int64))
    train = lambda found: side.call(apply_gradients, found.handles, found.inverse, grads, *numbers)  # noqa: E731
    found = find_rows(message)
    refused(wrong, "message of rank 0 counts", lambda: find_rows(message + [1, 0, 0, 0, 0]))
    train(found)
    before = [records_of(side, segment) for segment in range(SEGMENTS)]
    too_many = np.array([5, 0, *range(5)]), np.array([7], np.int32)
    for seen in ([], [see(*too_many)]):
        call = from_seen if seen else find_rows
        refused(tf.errors.ResourceExhaustedError, "max_rows_per_rank of", lambda: call(*too_many, *seen))  # noqa: B023
    seen = see(message)
    assert seen.rows.shape == (0, DIM) and seen.handles.shape == (0,) and seen.mark[0] > 0
    refused(wrong, "mark must be of", lambda: from_seen(message, splits, (*seen[:2], seen.mark[:1])))
    others = (
        (message[:-1] - [0, 1, 0, 0], splits - 1),
        (message + [0, 0, 0, 0, 1], splits),
        (message[[0, 1, 3, 2, 4]], splits),  # the device has all of these rows
    )
    for other in others:
        seen = see(message)
        refused(wrong, "message must be that of the look-ahead", lambda: from_seen(*other, seen))  # noqa: B023
    for segment, (ids, records) in enumerate(before):
        now, its_records = records_of(side, segment)
        same(ids, now, "keys")
        same(records[:, 12:], its_records[:, 12:], "rows of refused calls")  # which count as lookups
    found = find_rows(message)
    side.call(ops.table_evict, 0, 9)  # which leaves the rows of the last lookup
    train(found)
    changes = (
        (ops.table_remove, 0, np.array([5])),
        (ops.table_import, 0, before[0][0], before[0][1]),
        (ops.table_set_clock, side.call(ops.table_clock)),
        (ops.table_clear,),
    )
    for op, *arguments in changes:
        found = find_rows(message)
        side.call(op, *arguments)
        refused(tf.errors.FailedPreconditionError, "have been evicted, removed", lambda: train(found))  # noqa: B023
    step = np.float32(1.0).reshape(()), np.array(1, np.int64)
    stale = tf.errors.FailedPreconditionError
    add = lambda found, begin: side.call(accumulate, found.handles, found.inverse, grads, begin)  # noqa: E731
    add(find_rows(message), False)
    found = find_rows(message)  # the rows whose gradients wait leave the device
    for call in (lambda: add(found, False), lambda: side.call(apply_accumulated, *step)):
        refused(stale, "have been evicted, removed", call)
    add(found, True)
    side.call(apply_accumulated, *step)


def run_many_rows():
    """So many rows that several threads pack them."""
    pair = Pair("many rows", {**SGD, **PLAIN, "storage": "bfloat16"})
    pair.look_up([[[*range(5000)], [*range(1000)]]])  # all of them are new, hence late
    for step in range(2):
        pair.train()
        batch = [[[*range(step + 1, 5000)], [*range(500)]]]
        pair.look_up(batch, pair.see(batch))
    compare_tables(pair.sides)


@contextlib.contextmanager
def held_work(library):
    """Inside, work waits until it is asked for. Yields a function that tells whether some of it still waits."""
    defer = lambda on: library.emulation_defer(on, ctypes.c_double(0), ctypes.c_uint64(1))  # noqa: E731
    defer(1)
    library.emulation_hold()
    try:
        yield library.emulation_held
    finally:
        defer(0)


def run_waits(library):
    """A look-ahead waits for no kernel of other work: TensorFlow's stream holds work that nobody has run.

    Its copies go on streams of the table's own (emulation/streams.h). An inference lookup, whose ids are on the device,
    waits, and so shows that the stream held work.
    """
    pair = Pair("waits", ADAGRAD)
    batches = [[[*pair.random.integers(0, 30, [SEGMENTS, 12]).tolist()]] for _ in range(4)]
    pair.look_up(batches[0])
    for batch in batches[1:]:
        pair.train()
        message, splits, _ = pack(batch)
        with held_work(library) as held:
            for side in pair.sides:
                side.call(ops.table_prefetch, message, splits)
            seen = pair.see(batch)
            assert held(), "the look-ahead waited"
        pair.look_up(batch, seen)
    compare_tables(pair.sides)
    with held_work(library) as held:
        rows = pair.sides[1].call(ops.table_read, message, splits, dim=DIM, dtype=tf.float32)
        assert not held(), "no work was held"
    same(pair.sides[0].call(ops.table_read, message, splits, dim=DIM, dtype=tf.float32), rows, "rows found")


def run(library):
    run_waits(library)
    run_failed_lookups()
    run_untrained()
    run_traffic()
    run_a_pool_that_nobody_fills()
    run_many_rows()
    run_refusals()
