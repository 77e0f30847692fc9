"""A device without memory: each allocation of a call fails once, the op says so, and what follows is as if it had not.

The emulated build counts allocations (emulation/op_kernels.cc): those of small ops and attention, and those of tables.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.cuda import op_kernels_programs as programs
from tests.cuda.launchers import SMALL_OPS
from tests.cuda.op_kernels import LABELS, run_op, same
from tests.cuda.op_kernels_table import DIM, PLAIN, SEGMENTS, Side, look_up
from tests.golden import attention, tables
from tests.support import small_ops
from tests.support.table_records import arguments_of
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

ADAGRAD = {"rule": "adagrad", "hyperparameters": [0.0, 0.1, 1e-7, 1.0, 0.0], **PLAIN}
UNLIMITED = -1
# Allocations of a call of these functions that failed at least.
LEAST = {
    "hash_table": 2, "table_note_trained": 1, "table_read_numbers": 1, "merge": 6, "table_take_unsynced": 3,
    "_look_up": 5, "refresh": 5, "table_read": 2, "apply_gradients": 2, "accumulate": 5,
    "table_evict": 4, "table_remove": 3, "table_tombstones": 1, "keys_since": 1, "table_read_records": 1,
    "table_import": 3, "table_candidates": 1, "table_import_candidates": 3,
}  # fmt: skip


class Lacking:
    """Calls whose allocations fail, each once. `failed` counts them by name.

    Args:
      limit: Sets the number of allocations that succeed.
    """

    def __init__(self, limit: Callable[[ctypes.c_int64], None]):
        self.limit, self.failed = limit, {}

    def until_it_fits(self, name: str, call: Callable[[], Any], unchanged: Callable[[], None] = lambda: None) -> Any:
        for left in itertools.count():
            self.limit(ctypes.c_int64(left))
            try:
                answer = call()
            except tf.errors.ResourceExhaustedError as said:
                if not re.search("no (device )?memory", str(said)):  # max_rows: a table without room
                    raise
                self.limit(ctypes.c_int64(UNLIMITED))
                unchanged()
            else:
                self.failed[name] = max(left, self.failed.get(name, 0))
                return answer
            finally:
                self.limit(ctypes.c_int64(UNLIMITED))


class SmallOps(small_ops.TensorFlowOps):
    """The small ops on a device whose memory ends."""

    def __init__(self, lacking: Lacking):
        super().__init__(LABELS)
        self.lacking = lacking

    def _call(self, function, tensors):
        traced = function.get_concrete_function(*tensors)
        name = next(op.type for op in traced.graph.get_operations() if op.type in LABELS)
        return self.lacking.until_it_fits(name, lambda: traced(*tensors))


def run_small_ops(lacking: Lacking) -> None:
    run = SmallOps(lacking)
    for check in small_ops.checks(SMALL_OPS).values():
        check(run)
    assert {name for name, count in lacking.failed.items() if count == 0} == {"Fusedrec>Recover"}, lacking.failed
    for number in [number for number in range(attention.CASES) if 0 < attention.tokens_of(number) <= 100][:6]:
        run_case = lambda number=number: run_op(True, attention.results, (number,))  # noqa: E731
        # First without memory: TensorFlow folds what it can compute into constants.
        found, wanted = lacking.until_it_fits(f"attention {number}", run_case), run_case()
        assert lacking.failed[f"attention {number}"] > 0
        for theirs, ours in zip(wanted, found):
            same(np.asarray(theirs), np.asarray(ours), "attention")


def run_tables(lacking: Lacking) -> None:
    """Programs end as on a table in host memory, which does not have the calls that failed."""

    def call(op, *arguments, **static):
        return lacking.until_it_fits(op.__name__, lambda: programs.call(op, *arguments, **static))

    def create(options):
        arguments = arguments_of(anonymous=True, **options)
        return lacking.until_it_fits("hash_table", lambda: run_op(True, ops.hash_table, (), **arguments))

    for family, numbers in ((programs.Disturbed, range(4, 160, 21)), (programs.Replicas, range(8, 160, 40))):
        for number in numbers:
            device = family(number, create, call)
            device.run()
            programs.compare(tables.run_on_host(number, family=family), device)
    short = {name: lacking.failed.get(name) for name, least in LEAST.items() if lacking.failed.get(name, 0) < least}
    assert not short, f"allocations that failed: {short}, wanted {LEAST}"


class HostRows:
    """A table with rows in host memory. A failed lookup may have counted and made rows, but all values stay."""

    ids = np.arange(-1, 120)
    message = np.array([len(ids), 0, *ids]), np.array([len(ids) + SEGMENTS], np.int32)

    def __init__(self, lacking, hot_rows):
        options = {**ADAGRAD, "host_rows": True, "hot_rows": hot_rows}
        self.lacking = lacking
        self.host, self.device = (Side(f"memory{hot_rows}", on_device, options) for on_device in (False, True))

    def values(self, side):
        return side.call(ops.table_read, *self.message, dim=DIM, dtype=tf.float32)

    def call(self, op, *arguments, **more):
        before = self.values(self.device)
        unchanged = lambda: same(before, self.values(self.device), f"{op.__name__} without memory")  # noqa: E731
        call = lambda: self.device.call(op, *arguments, **more)  # noqa: E731
        return self.lacking.until_it_fits(f"host rows: {op.__name__}", call, unchanged)

    def train(self, random, ids, step, *, lacks):
        """lacks: Calls lack memory first. Without them, the device has rows that host memory lacks."""
        message, splits = np.array([len(ids), 0, *ids]), np.array([len(ids) + SEGMENTS], np.int32)
        grads = random.normal(size=[len(ids), DIM]).astype(np.float32)
        for call in (self.host.call, self.call if lacks else self.device.call):
            found = call(look_up, message, splits, dtype=tf.float32)
            numbers = np.float32(0.05).reshape(()), np.array(step, np.int64)
            call(tables.apply_gradients, found.handles, found.inverse, grads, *numbers)

    def compare(self):
        found = self.lacking.until_it_fits("bring back", lambda: self.values(self.device))
        same(self.values(self.host), found, "rows")


def run_host_rows(lacking: Lacking) -> None:
    for hot_rows, lookups in ((0, 9), (30, 10)):
        table, random = HostRows(lacking, hot_rows), np.random.default_rng(0)
        for step, ids in enumerate((range(5), range(3, 60), range(40, 60), range(100), range(90), range(70, 120))):
            table.train(random, ids, step + 1, lacks=step < 4)
            table.compare()
        assert lacking.failed["host rows: look_up"] >= lookups and lacking.failed["host rows: apply_gradients"] >= 2
    assert lacking.failed["bring back"] >= 1


def run(library: ctypes.CDLL) -> None:
    lacking = Lacking(library.emulation_allocations_left)
    run_small_ops(lacking)
    run_tables(lacking)
    run_host_rows(lacking)
    print(f"allocations that failed, by call: {lacking.failed}", flush=True)
