"""Lookups that fail: rows in host memory (host_rows.h) beside a table in host memory. Both leave no trace."""

from __future__ import annotations

import numpy as np

from tests.cuda.host_rows.programs import look_ahead, refresh
from tests.cuda.op_kernels import refused
from tests.cuda.op_kernels_sums import accumulate, apply_accumulated
from tests.cuda.op_kernels_table import (
    DIM,
    PLAIN,
    SEGMENTS,
    Side,
    apply_gradients,
    compare_found,
    compare_tables,
    look_up,
)  # fmt: skip
from tests.oracles.hash_table import pack
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

# A lookup could make room in the first segment, but the second one is full.
OPTIONS = {"rule": "adagrad", "hyperparameters": [0.3, 0.1, 1e-7, 1.0, 0.0], **PLAIN, "storage": "bfloat16",
           "stochastic_rounding": True, "max_rows": [4, 2], "eviction": ["lru", "none"]}  # fmt: skip
FIRST = [[[0, 1, 2, 3], [0, 1]]]
RATE, STEP = np.float32(0.5).reshape(()), np.array(1, np.int64)


class Pair:
    """Both tables, the answers to their last lookup and the gradients of its ids."""

    def __init__(self, name, hot_rows):
        more = {"host_rows": True, "hot_rows": hot_rows}
        self.sides = [Side(name, False, OPTIONS), Side(name, True, {**OPTIONS, **more})]
        self.random = np.random.default_rng(hot_rows)

    def look_up(self, batch, ahead=False):
        message, splits, received = pack(batch)
        seen = [side.call(look_ahead, message, splits, dtype=tf.float32) if ahead else None for side in self.sides]
        self.found = [
            side.call(refresh, message, splits, *of_side) if ahead
            else side.call(look_up, message, splits, dtype=tf.float32)
            for side, of_side in zip(self.sides, seen)
        ]  # fmt: skip
        compare_found(*self.found, received)
        self.grads = self.random.normal(size=[len(received), DIM]).astype(np.float32)

    def train(self):
        for side, found in zip(self.sides, self.found):
            side.call(apply_gradients, found.handles, found.inverse, self.grads, RATE, STEP)

    def fail(self, ids):
        """Looks up `ids` of the first segment, and more of the second one than it may have."""
        message, splits, _ = pack([[ids, [0, 1, 2]]])
        full = tf.errors.ResourceExhaustedError
        for side in self.sides:
            call = lambda: side.call(look_up, message, splits, dtype=tf.float32)  # noqa: B023, E731
            refused(full, "max_rows of", call)


def no_row_leaves(name, hot_rows, ahead):
    """The first segment has room for the lookup, and keeps its rows, because the second one has none."""
    pair = Pair(name, hot_rows)
    pair.look_up(FIRST)
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
    pair = Pair(name, hot_rows)
    pair.look_up(FIRST)
    pair.train()
    pair.fail([0])
    assert [side.call(ops.table_evict, 0, 3) for side in pair.sides] == [0, 0]
    pair.train()
    pair.look_up(FIRST, ahead)
    pair.train()
    compare_tables(pair.sides)


def rows_stay(name, hot_rows, ahead):
    """No row leaves: gradients of the lookup before are welcome, and their update has its own version."""
    pair = Pair(name, hot_rows)
    pair.look_up(FIRST)
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


def run():
    assert len(OPTIONS["max_rows"]) == SEGMENTS
    for hot_rows in (0, 3, 30):
        for ahead in (False, True):
            for program in (no_row_leaves, rows_stay_pinned, rows_stay):
                program(f"{program.__name__}{hot_rows}{ahead}", hot_rows, ahead)
        print(f"lookups that failed left no row behind, hot_rows = {hot_rows}", flush=True)
