"""A look-ahead of host_rows waits for no kernel of other work: TensorFlow's stream holds work that nobody has run.

Its copies go on streams of the table's own (emulation/streams.h). An inference lookup, whose ids are on the device,
waits, and so shows that the stream held work.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile

import numpy as np

from tests.cuda.host_rows.programs import PROGRAMS, look_ahead, refresh
from tests.cuda.op_kernels import same
from tests.cuda.op_kernels_table import DIM, Side, batch_of, compare_found, compare_tables, look_up, update
from tests.oracles.hash_table import pack
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


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


def run(library):
    with tempfile.TemporaryDirectory() as folder:
        options = {**PROGRAMS[2], "host_rows": True, "tier_folder": folder}
        sides = [Side("waits", on_device, options) for on_device in (False, True)]
        run_steps(library, sides, np.random.default_rng(5))


def run_steps(library, sides, random):
    batches = [pack(batch_of(random, most=12)) for _ in range(4)]
    both = [side.call(look_up, *batches[0][:2], dtype=tf.float32) for side in sides]
    for step in range(3):
        update(sides, both, batches[step][2], random, step, tf.float32)
        message, splits, received = batches[step + 1]
        with held_work(library) as held:
            for side in sides:
                side.call(ops.table_prefetch, message, splits)
            ahead = [side.call(look_ahead, message, splits, dtype=tf.float32) for side in sides]
            assert held(), "the look-ahead waited"
        both = [side.call(refresh, message, splits, *seen) for side, seen in zip(sides, ahead)]
        compare_found(*both, received)
    compare_tables(sides)
    with held_work(library) as held:
        rows = sides[1].call(ops.table_read, *batches[0][:2], dim=DIM, dtype=tf.float32)
        assert not held(), "no work was held"
    same(sides[0].call(ops.table_read, *batches[0][:2], dim=DIM, dtype=tf.float32), rows, "rows found")
