"""Tables on a device with rows in host memory and a pool of hot rows (hot_rows.h), beside tables in host memory.

Random programs compare all bits: any pool, any order of calls between lookups, look-aheads that nobody uses. Counted
programs compare the traffic over the bus with a count by hand.
"""

from __future__ import annotations

import os
import pathlib
import tempfile

import numpy as np

from tests.cuda.host_rows.programs import (
    PROGRAMS,
    SGD,
    clear,
    evict_some,
    look_ahead,
    look_at_another,
    nothing,
    peek_and_touch_ahead,
    read,
    refresh,
    remove_some,
    set_some_back,
)
from tests.cuda.op_kernels import same
from tests.cuda.op_kernels_sums import accumulate_parts, update_waiting
from tests.cuda.op_kernels_table import (
    DIM,
    SEGMENTS,
    Side,
    apply_gradients,
    compare_found,
    compare_tables,
    look_up,
    peek_and_touch,
    update,
)
from tests.oracles.hash_table import pack
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

POOLS = (1, 5, 8, 30, 500)
STEPS = 9
# Calls between the update of a batch and the lookup of the next one; most steps have none.
BETWEEN = [*[nothing] * 9, read, evict_some, evict_some, remove_some, set_some_back, look_at_another, clear]


def skewed_batch(random):
    """Ids of which few are frequent, of two sources."""
    ids = lambda: (random.zipf(1.2, random.integers(0, 14)) % 70).tolist()  # noqa: E731
    return pack([[ids() for _ in range(SEGMENTS)] for _ in range(2)])


def traffic_of(table):
    return ops.table_statistics(table).traffic


def train(sides, both, received, random, step):
    """An update, one of several parts, or none."""
    kind = random.integers(0, 6)
    if kind == 0:
        accumulate_parts(sides, both, received, random, tf.float32, begin=True)
        update_waiting(sides, step + 1)
    elif kind > 1:
        update(sides, both, received, random, step, tf.float32)


def run_program(seed, options):
    random = np.random.default_rng(seed)
    hot_rows = int(random.choice(POOLS))
    of_device = {**options, "host_rows": True, "hot_rows": hot_rows}
    sides = [Side(f"hot{seed}", False, options), Side(f"hot{seed}", True, of_device)]
    following, ahead = skewed_batch(random), None
    for step in range(STEPS):
        (message, splits, received), following = following, skewed_batch(random)
        if ahead is None:
            lookup = (look_up, peek_and_touch)[random.integers(0, 2)]
            both = [side.call(lookup, message, splits, dtype=tf.float32) for side in sides]
        else:
            lookup = (refresh, refresh, peek_and_touch_ahead)[random.integers(0, 3)]
            both = [side.call(lookup, message, splits, *seen) for side, seen in zip(sides, ahead)]
        compare_found(*both, received)
        ahead = None
        if random.random() < 0.7:
            ahead = [side.call(look_ahead, *following[:2], dtype=tf.float32) for side in sides]
            if random.random() < 0.2:  # it is given up
                following, ahead = skewed_batch(random), None
        train(sides, both, received, random, step)
        BETWEEN[random.integers(0, len(BETWEEN))](sides, random)
        if random.random() < 0.2:
            compare_tables(sides)
    compare_tables(sides)
    traffic = sides[1].call(traffic_of)
    assert np.all(traffic[:, 1:] > 0) and np.all(sides[0].call(traffic_of) == 0), traffic
    return traffic[:, 0].sum()


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
        same(side.call(traffic_of)[0], expected, f"traffic after rows {ids}")

    train_on(frequent, 0, 8, 0)
    train_on(others, 0, 4, 0)  # new rows; the pool takes the batch before
    train_on(frequent, 8, 0, 0)  # the others are as frequent as the rows of the pool, so they leave
    train_on(others, 0, 4, 4)
    train_on(frequent, 8, 0, 0)
    message = np.array([8, 0, *frequent]), np.array([8 + SEGMENTS], np.int32)
    rows = side.call(ops.table_read, *message, dim=DIM, dtype=tf.float32)
    same(rows[:8], np.full([8, DIM], SGD["a"] - 3 * 0.5, np.float32), "rows of an inference lookup")
    expected[2] += (4 + 8 + 8) * record  # the others, the pool, the batch
    same(side.call(traffic_of)[0], expected, "traffic after an inference lookup")
    side.call(ops.table_read, *message, dim=DIM, dtype=tf.float32)
    same(side.call(traffic_of)[0], expected, "traffic after another one: host memory is up to date")
    # The others become more frequent: four of them take slots.
    train_on(others, 0, 4, 0)
    train_on(others, 0, 4, 0)  # they were sent for the second time without need: the batch before has them
    train_on(others, 0, 4, 4)
    train_on(others, 4, 0, 0, times=4)
    train_on(frequent, 4, 4, 0)


def run_untrained():
    """Rows of the pool that a batch finds and does not train are still newer than in host memory."""
    random = np.random.default_rng(0)
    sides = [Side("untrained", False, SGD), Side("untrained", True, {**SGD, "hot_rows": 8})]
    frequent, others = list(range(4)), list(range(100, 104))
    for step, (ids, trains) in enumerate([(frequent, True), (others, True), (frequent, False), (others, True)]):
        message, splits, received = pack([[ids, *[[]] * (SEGMENTS - 1)]])
        both = [side.call(look_up, message, splits, dtype=tf.float32) for side in sides]
        compare_found(*both, received)
        if trains:
            update(sides, both, received, random, step, tf.float32)
    assert sides[1].call(traffic_of)[0, 0] == 8, "the pool has both batches"
    message, splits, _ = pack([[frequent, *[[]] * (SEGMENTS - 1)]])
    rows = [side.call(ops.table_read, message, splits, dim=DIM, dtype=tf.float32) for side in sides]
    same(*rows, "rows of the pool that a batch found and did not train")
    compare_tables(sides)


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE")


def run_a_pool_that_nobody_fills():
    """The host's memory for a pool grows with the rows in it, not with its size."""
    before, slots = resident_bytes(), 1 << 24
    side = Side("large pool", True, {**SGD, "hot_rows": slots})
    side.call(look_up, *pack([[[1, 2], [3]]])[:2], dtype=tf.float32)
    side.call(look_up, *pack([[[2], [3]]])[:2], dtype=tf.float32)
    assert resident_bytes() - before < 16 * slots, "bytes for slots without rows"


def run():
    run_a_pool_that_nobody_fills()
    run_untrained()
    run_traffic()
    print("the traffic of hot rows is as counted", flush=True)
    hits = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(6):
            options = PROGRAMS[seed % len(PROGRAMS)]
            if "memory_budget" in options:
                options = {**options, "tier_folder": folder}
            hits += run_program(seed, options)
    assert hits > 100, hits
    print(f"tables with hot rows agree; lookups found {hits} of them", flush=True)
