"""A device without memory: ops of a table on a GPU say so, the table is what it was, and training goes on.

The allocator that OpKernels give to the library gives nothing any more after so many allocations, in the emulated build
alone (emulation/op_kernels.cc). Every allocation of a call fails once. The same program runs on a table in host memory.
"""

from __future__ import annotations

import ctypes
import itertools
import re

import numpy as np

from tests.cuda.op_kernels import refused, same
from tests.cuda.op_kernels_replicas import merge, parts_of, taken
from tests.cuda.op_kernels_sums import accumulate, apply_accumulated
from tests.cuda.op_kernels_table import (
    DIM,
    SEGMENTS,
    Side,
    apply_gradients,
    compare_tables,
    keys_since,
    look_up,
    records_of,
    statistics_of_segments,
)
from tests.oracles.hash_table import pack
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

ADAGRAD = {
    "rule": "adagrad",
    "hyperparameters": [0.0, 0.1, 1e-7, 1.0, 0.0],
    "distribution": "uniform",
    "a": -0.5,
    "b": 0.5,
}
UNLIMITED = -1


def state_of(side):
    counts = [side.call(op) for op in (ops.table_size, ops.table_clock, statistics_of_segments)]
    rows = (array for segment in range(SEGMENTS) for array in records_of(side, segment))
    left = (side.call(ops.table_tombstones, segment) for segment in range(SEGMENTS))
    waiting = (array for segment in range(SEGMENTS) for array in side.call(ops.table_candidates, segment))
    return [*counts, *rows, *left, *waiting]


def until_it_fits(limit, call, unchanged):
    """Returns the answer of `call` once it has all its allocations, and their number."""
    for left in itertools.count():
        limit(ctypes.c_int64(left))
        try:
            return call(), left
        except tf.errors.ResourceExhaustedError as said:
            assert re.search("no (device )?memory", str(said)) and "Remedy" in str(said), said
        finally:
            limit(ctypes.c_int64(UNLIMITED))
        unchanged()


class Pair:
    """A table in host memory, and one on a device. Every call on the device lacks memory first."""

    def __init__(self, limit, name, options):
        self.limit, self.needed = limit, {}
        self.host = Side(name, False, options)
        self.device, count = until_it_fits(limit, lambda: Side(name, True, options), lambda: None)
        assert count >= 2, "a table with no memory was made"

    def call(self, op, *arguments, **more):
        """Returns the answers of both."""
        return self.host.call(op, *arguments, **more), self.on_device(op, *arguments, **more)

    def on_device(self, op, *arguments, **more):
        before = state_of(self.device)

        def unchanged():
            for was, now in zip(before, state_of(self.device)):
                same(was, now, f"{op.__name__} without memory")

        answer, count = until_it_fits(self.limit, lambda: self.device.call(op, *arguments, **more), unchanged)
        self.needed[op.__name__] = max(count, self.needed.get(op.__name__, 0))
        return answer

    def train(self, random, batch, step):
        message, splits, received = pack(batch)
        found = self.call(look_up, message, splits, dtype=tf.float32)
        same(found[0].rows, found[1].rows, "rows")
        same(
            self.host.call(ops.table_read, message, splits, dim=DIM, dtype=tf.float32),
            self.on_device(ops.table_read, message, splits, dim=DIM, dtype=tf.float32),
            "rows of inference",
        )
        grads = random.normal(size=[len(received), DIM]).astype(np.float32)
        numbers = np.float32(0.05).reshape(()), np.array(step, np.int64)
        for begin in (True, False):  # the second part finds the sums of the first
            self.host.call(accumulate, found[0].handles, found[0].inverse, grads, begin)
            self.on_device(accumulate, found[1].handles, found[1].inverse, grads, begin)
        self.host.call(apply_accumulated, *numbers)
        self.on_device(apply_accumulated, *numbers)
        self.host.call(apply_gradients, found[0].handles, found[0].inverse, grads, *numbers)
        self.on_device(apply_gradients, found[1].handles, found[1].inverse, grads, *numbers)

    def compare(self):
        compare_tables([self.host, self.device])


class PairOfHostRows(Pair):
    """A pair with rows in host memory. A failed lookup may have counted and made rows, but all values stay."""

    ids = np.arange(-1, 120)
    message = np.array([len(ids), 0, *ids]), np.array([len(ids) + SEGMENTS], np.int32)

    def values(self, side):
        return side.call(ops.table_read, *self.message, dim=DIM, dtype=tf.float32)

    def on_device(self, op, *arguments, **more):
        before = self.values(self.device)
        unchanged = lambda: same(before, self.values(self.device), f"{op.__name__} without memory")  # noqa: E731
        answer, count = until_it_fits(self.limit, lambda: self.device.call(op, *arguments, **more), unchanged)
        self.needed[op.__name__] = max(count, self.needed.get(op.__name__, 0))
        return answer

    def train_with_memory(self, random, batch, step):
        """Leaves rows on the device that host memory lacks; every other call here brings them back first."""
        message, splits, received = pack(batch)
        grads = random.normal(size=[len(received), DIM]).astype(np.float32)
        for side in (self.host, self.device):
            found = side.call(look_up, message, splits, dtype=tf.float32)
            numbers = np.float32(0.05).reshape(()), np.array(step, np.int64)
            side.call(apply_gradients, found.handles, found.inverse, grads, *numbers)

    def compare(self):
        found, count = until_it_fits(self.limit, lambda: self.values(self.device), lambda: None)
        self.needed["bring_back"] = max(count, self.needed.get("bring_back", 0))
        same(self.values(self.host), found, "rows")


def run_host_rows(limit, random):
    for hot_rows, least in (
        (0, {"look_up": 10, "apply_gradients": 2, "table_read": 0, "bring_back": 0}),
        (30, {"look_up": 11, "apply_gradients": 2, "table_read": 0, "bring_back": 1}),
    ):
        options = {**ADAGRAD, "host_rows": True, "hot_rows": hot_rows}
        pair = PairOfHostRows(limit, f"memory of buffers{hot_rows}", options)
        for step, batch in enumerate((range(5), range(3, 60), range(40, 60), range(100))):
            pair.train(random, [[list(batch), []]], step + 1)
            pair.compare()
        for step, batch in enumerate((range(90), range(70, 120))):
            pair.train_with_memory(random, [[list(batch), []]], step + 5)
        pair.compare()
        assert all(pair.needed[name] >= least[name] for name in least), pair.needed
        print(f"rows in host memory, {hot_rows} of them hot: {pair.needed}", flush=True)


def run(limit):
    random = np.random.default_rng(0)
    options = {**ADAGRAD, "max_rows": 40, "eviction": "lru", "record_tombstones": True}
    pair = Pair(limit, "memory", options)
    # Lines double, then rows leave for others.
    for step, (first, most) in enumerate(((0, 5), (0, 35), (30, 30), (60, 35))):
        pair.train(random, [[list(range(first, first + most))] * SEGMENTS], step + 1)
        pair.compare()
    assert np.all(pair.host.call(statistics_of_segments)[:, 2] > 20), "no rows were evicted"
    pair.train(random, [[[94], [94]]], 5)  # others may leave again
    pair.call(ops.table_evict, 1, 7)
    limit(ctypes.c_int64(0))
    refused(
        tf.errors.ResourceExhaustedError,
        "no device memory",
        lambda: pair.device.call(ops.table_remove, 0, np.arange(80, 90)),
    )
    limit(ctypes.c_int64(UNLIMITED))
    pair.call(ops.table_remove, 0, np.arange(60, 70))  # and not those before
    pair.compare()
    assert len(pair.on_device(ops.table_tombstones, 0)) > 10
    exported, handles = pair.on_device(keys_since, np.array(0), np.array([0, 0]))
    records = pair.on_device(ops.table_read_records, handles)
    other = Pair(limit, "other memory", options)
    other.call(ops.table_import, 0, exported, records)
    for tables in (pair, other):
        tables.compare()
        tables.train(random, [[list(range(100, 120)), []]], 9)
        tables.compare()
    counting = Pair(limit, "memory of counts", {**ADAGRAD, "admission_count": 2})
    for step, batch in enumerate((range(30), range(20, 40))):
        counting.train(random, [[list(batch), []]], step + 1)
        counting.compare()
    ids, counts = counting.on_device(ops.table_candidates, 0)
    assert len(ids) == 30
    counting.call(ops.table_import_candidates, 1, ids, counts)
    counting.compare()
    replica = Pair(limit, "memory of replicas", {**options, "averaged": True})
    for step, (first, most) in enumerate(((0, 30), (25, 30))):
        replica.train(random, [[list(range(first, first + most)), []]], step + 1)
        ids = np.arange(first, first + most)
        replica.call(ops.table_note_trained, np.array([most, 0, *ids]), np.array([most + SEGMENTS], np.int32))
    ids, splits = np.array([7, 60, 61, 40]), np.array([0, 3, 4])
    same(*replica.call(ops.table_read_numbers, ids, splits), "numbers of rows")
    numbers = np.ones([4, 2 * DIM], np.float32)
    replica.call(merge, np.array([30, 54]), np.array([0, 2, 2]), ids, splits, numbers, ids + (2 << 32), np.array(3))
    replica.compare()
    taken_by = [taken(replica.host), parts_of(*replica.on_device(ops.table_take_unsynced))]
    assert taken_by[0] == taken_by[1], "ids that replicas exchange"
    least = {
        "table_note_trained": 1, "table_read_numbers": 1, "merge": 6, "table_take_unsynced": 3,
        "look_up": 5, "table_read": 2, "apply_gradients": 2, "accumulate": 5, "apply_accumulated": 0, "table_evict": 4,
        "table_remove": 3, "table_tombstones": 1, "keys_since": 1, "table_read_records": 1, "table_import": 6,
        "table_candidates": 1, "table_import_candidates": 3,
    }  # fmt: skip
    pairs = (pair, other, counting, replica)
    failed = {name: max(p.needed.get(name, 0) for p in pairs) for name in {name for p in pairs for name in p.needed}}
    assert failed.keys() == least.keys() and all(failed[name] >= least[name] for name in least), failed
    print(f"allocations that failed, by call: {failed}", flush=True)
    run_host_rows(limit, random)
