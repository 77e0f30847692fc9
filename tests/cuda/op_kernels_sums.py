"""Several lookups or parts of a lookup in one update, on a table in host memory and on one on a device: all bits.

FrozenWindow, Nested and several output dtypes cut a lookup into parts. accumulate_steps sums over lookups. SemiAsync
looks up once more before an update.
"""

from __future__ import annotations

import numpy as np

from tests.cuda.op_kernels import refused, same
from tests.cuda.op_kernels_table import (
    DIM,
    PROGRAMS,
    Side,
    accumulate,
    batch_of,
    compare_found,
    compare_tables,
    look_up,
    peek_and_touch,
    update,
)  # fmt: skip
from tests.oracles.hash_table import pack
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

# With a time to live that ends while gradients wait; no max_rows, because waiting rows would fill it.
OPTIONS = [{**PROGRAMS[n], "max_rows": 0, "ttl": ttl} for n, ttl in ((0, 2), (1, 1), (2, 3))]
OPTIONS[0]["max_rows"] = 160
OPTIONS[1].update(max_rows=[0, 0], ttl=[1, 0])


def apply_accumulated(table, rate, step):
    return ops.table_apply_accumulated(table, learning_rate=rate, step=step)


def accumulate_parts(sides, both, received, random, dtype, *, begin, spoils=False):
    """Adds gradients of the received ids, but for the last ones, in up to three parts."""
    ends = np.sort(random.integers(0, max(len(received) - 2, 1), 3))
    grads = tf.cast(random.normal(size=[len(received) + 1, DIM]), dtype).numpy()
    if spoils:
        grads[: len(received) // 3, 1] = np.inf
    for part, (first, last) in enumerate(zip([0, *ends], ends)):
        drops, mine = begin and part == 0, grads[first : last + 1]
        places = [
            side.call(accumulate, found.handles, found.inverse[first:last], mine, drops)
            for side, found in zip(sides, both)
        ]
        left_out = [
            {key for key, place in zip(received, found.inverse) if place in of_side}
            for of_side, found in zip(places, both)
        ]
        assert left_out[0] == left_out[1], f"rows left out: {left_out}"


def update_waiting(sides, step):
    for side in sides:
        side.call(apply_accumulated, np.float32(0.05).reshape(()), np.array(step, np.int64))


def run_sums(number, options):
    """Sums over parts of one to three lookups. Some steps drop the sums of a step that failed."""
    random = np.random.default_rng(20 + number)
    sides = [Side(f"sums{number}", on_device, options) for on_device in (False, True)]
    dtype = tf.float16 if number == 1 else tf.float32
    for step in range(1, 4):
        if step == 2:
            accumulate_parts(sides, *looked_up(sides, random, dtype), random, dtype, begin=False)
        waits = False  # admission may have refused every id
        for lookup in range(step):
            found = looked_up(sides, random, dtype, (look_up, peek_and_touch)[lookup % 2])
            waits = waits or bool((found[0][0].handles >= 0).any())
            accumulate_parts(sides, *found, random, dtype, begin=lookup == 0, spoils=step == 3)
            if lookup == 2:  # a rank without ids in a step
                empty = [(found.handles[:0], found.inverse[:0], np.zeros([1, DIM], np.float32)) for found in found[0]]
                for side, arguments in zip(sides, empty):
                    side.call(accumulate, *arguments, False)
        for side in sides if waits else ():
            gone = lambda: side.call(ops.table_remove, 0, np.array([1]))  # noqa: B023, E731
            refused(tf.errors.FailedPreconditionError, "while accumulated gradients wait", gone)
        update_waiting(sides, step)
        compare_tables(sides)
    for side in sides:
        side.call(ops.table_remove, 0, np.array([1]))
    compare_tables(sides)


def looked_up(sides, random, dtype, lookup=look_up):
    """Looks up a batch on both. Returns what each found, and the received ids."""
    message, splits, received = pack(batch_of(random))
    both = [side.call(lookup, message, splits, dtype=dtype) for side in sides]
    compare_found(*both, received)
    host, device = (side.call(ops.table_read, message, splits, dim=DIM, dtype=dtype) for side in sides)
    same(host, device, "rows of an inference lookup")
    return both, received


def run_late(options):
    """Each update follows the next lookup. Rows of two lookups stay."""
    random = np.random.default_rng(30)
    sides = [Side("late", on_device, {**options, "window": 2}) for on_device in (False, True)]
    before = looked_up(sides, random, tf.float32)
    for step in range(4):
        found = looked_up(sides, random, tf.float32)
        update(sides, *before, random, step, tf.float32)
        before = found
    compare_tables(sides)


def run():
    for number, options in enumerate(OPTIONS):
        run_sums(number, options)
        print(f"sums agree, {options['rule']}", flush=True)
    run_late({**PROGRAMS[0], "max_rows": 130})
