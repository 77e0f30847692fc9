"""Tables on a device whose rows are in host memory (host_rows.h), beside tables in host memory: all bits.

Batches are read ahead while the previous one trains, as in schedules. Other calls on the tables come in between.
"""

from __future__ import annotations

import tempfile

import numpy as np

from tests.cuda.op_kernels import refused, same
from tests.cuda.op_kernels_sums import accumulate, accumulate_parts, apply_accumulated, update_waiting
from tests.cuda.op_kernels_table import (
    DIM,
    PLAIN,
    SEGMENTS,
    Side,
    apply_gradients,
    batch_of,
    compare_found,
    compare_tables,
    keys_since,
    look_up,
    peek_and_touch,
    records_of,
    run_upkeep,
    update,
)  # fmt: skip
from tests.oracles.hash_table import pack
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

SGD = {"rule": "sgd", "hyperparameters": [0.0], "a": 0.25, "host_rows": True}
PROGRAMS = [
    {"rule": "adam", "hyperparameters": [0.0, 0.1, 0.001, 1e-7, 0.0], **PLAIN, "max_rows": 60, "eviction": "lru",
     "record_tombstones": True},
    {"rule": "rowwise_adagrad", "hyperparameters": [0.7, 0.1, 1e-8, 0.0, 1.0, 2.0], **PLAIN, "storage": "bfloat16",
     "stochastic_rounding": True, "max_rows": [55, 0], "eviction": ["lfu", "none"],
     "ttl": [0, 1], "frequency_decay_steps": 3},
    {"rule": "adagrad", "hyperparameters": [0.3, 0.1, 1e-7, 1.0, 0.0], "distribution": "truncated_normal", "a": 0.0,
     "b": 0.1, "storage": "float16", "memory_budget": 70 * 40},
]  # fmt: skip
LONG = 1  # programs with checkpoints and removals


def look_ahead(table, message, splits, dtype):
    return ops.table_look_ahead(table, message, splits, dim=DIM, dtype=dtype)


def refresh(table, message, splits, rows, handles, mark):
    return ops.table_lookup(table, message, splits, ops.RowsAhead(rows, handles, mark), dim=DIM)


def peek_and_touch_ahead(table, message, splits, rows, handles, mark):
    """The lookup of groups that share gradients, whose own rows were read ahead."""
    ahead = ops.RowsAhead(rows, handles, mark)
    rows = ops.table_read(table, message, splits, ahead, as_training=True, dim=DIM, dtype=tf.float32)
    return ops.table_lookup(table, message, splits, with_rows=False, dim=DIM)._replace(rows=rows)


def nothing(sides, random):
    pass


def read(sides, random):
    message, splits, _ = pack(batch_of(random))
    host, device = (side.call(ops.table_read, message, splits, dim=DIM, dtype=tf.float32) for side in sides)
    same(host, device, "rows of an inference lookup")
    compare_tables(sides)


def evict_some(sides, random):
    host, device = (side.call(ops.table_evict, 1, 9) for side in sides)
    same(host, device, "evicted")


def remove_some(sides, random):
    host, device = (side.call(ops.table_remove, 0, np.arange(0, 12)) for side in sides)
    same(host, device, "removed")


def set_some_back(sides, random):
    """Gives rows the records of another id, with old versions."""
    ids, records = records_of(sides[0], 0)
    for side in sides:
        side.call(ops.table_import, 0, ids, np.roll(records, 1, axis=0))


def clear(sides, random):
    for side in sides:
        side.call(ops.table_clear)


def look_at_another(sides, random):
    """A second look-ahead replaces the first, whose lookup then begins anew."""
    message, splits, _ = pack(batch_of(random))
    for side in sides:
        side.call(look_ahead, message, splits, dtype=tf.float32)


# Calls between the update of a batch and the lookup of the next batch, which was read ahead before.
BETWEEN = [nothing, read, evict_some, nothing, remove_some, set_some_back, look_at_another, clear]


def run_program(number, options):
    random = np.random.default_rng(number)
    sides = [Side(f"host_rows{number}", on_device, {**options, "host_rows": True}) for on_device in (False, True)]
    batches = [pack(batch_of(random, most=1 if step == 4 else 20)) for step in range(len(BETWEEN) + 2)]
    since, ahead = (0, 0), [None, None]
    for step, (message, splits, received) in enumerate(batches):
        if ahead[0] is None:
            lookup = look_up if step == 0 else peek_and_touch
            both = [side.call(lookup, message, splits, dtype=tf.float32) for side in sides]
        else:
            lookup = peek_and_touch_ahead if step == 4 else refresh
            both = [side.call(lookup, message, splits, *seen) for side, seen in zip(sides, ahead)]
        compare_found(*both, received)
        ahead = [None, None]
        if step + 1 < len(batches) and step != 2:
            ahead = [side.call(look_ahead, *batches[step + 1][:2], dtype=tf.float32) for side in sides]
        if step % 3 == 1:
            keys = [side.call(keys_since, np.array(0), np.array([0, 0])) for side in sides]
        if step % 3 == 2:
            accumulate_parts(sides, both, received, random, tf.float32, begin=True)
            accumulate_parts(sides, both, received, random, tf.float32, begin=step == 2, spoils=True)
            update_waiting(sides, step + 1)
        elif step != 6:  # a lookup that nobody trains
            update(sides, both, received, random, step, tf.float32)
        if step % 3 == 1:  # rows that were trained since
            host, device = (
                side.call(ops.table_read_records, handles[np.argsort(ids)]) for side, (ids, handles) in zip(sides, keys)
            )
            same(host, device, "records of keys from before the update")
        BETWEEN[step % len(BETWEEN)](sides, random)
        if step % 3 == 2:
            compare_tables(sides, since)
            since = sides[0].call(ops.table_clock)
    compare_tables(sides)
    for segment in range(SEGMENTS):
        host, device = (np.sort(side.call(ops.table_tombstones, segment)) for side in sides)
        same(host, device, "tombstones")
    return sides, random, tf.float32


def run_refusals():
    """Wrong calls give a Status, and no row is lost."""
    wrong = tf.errors.InvalidArgumentError
    schema = ops.table_schema()
    lacking, on_device = (
        {path for path in schema if place in schema[path]["lacks"]} for place in ("host_rows", "device")
    )
    assert lacking - on_device == {"storage.hot_after", "limits.admission_count", "lookups_per_update", "averaged"}
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
        refused(tf.errors.ResourceExhaustedError, "max_rows of", lambda: call(*too_many, *seen))  # noqa: B023
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
        refused(tf.errors.FailedPreconditionError, "have been evicted or removed", lambda: train(found))  # noqa: B023
    step = np.float32(1.0).reshape(()), np.array(1, np.int64)
    stale = tf.errors.FailedPreconditionError
    add = lambda found, begin: side.call(accumulate, found.handles, found.inverse, grads, begin)  # noqa: E731
    add(find_rows(message), False)
    found = find_rows(message)  # the rows whose gradients wait leave the device
    for call in (lambda: add(found, False), lambda: side.call(apply_accumulated, *step)):
        refused(stale, "have been evicted or removed", call)
    add(found, True)
    side.call(apply_accumulated, *step)


def run_many_rows():
    """So many rows that several threads pack them (row_transfers.cc)."""
    options = {**SGD, **PLAIN, "storage": "bfloat16"}
    random = np.random.default_rng(1)
    sides = [Side("many rows", on_device, options) for on_device in (False, True)]
    message, splits, received = pack([[[*range(5000)], [*range(1000)]]])
    both = [side.call(look_up, message, splits, dtype=tf.float32) for side in sides]  # all of them are new, hence late
    for step in range(2):
        compare_found(*both, received)
        update(sides, both, received, random, step, tf.float32)
        message, splits, received = pack([[[*range(step + 1, 5000)], [*range(500)]]])
        ahead = [side.call(look_ahead, message, splits, dtype=tf.float32) for side in sides]
        both = [side.call(refresh, message, splits, *seen) for side, seen in zip(sides, ahead)]
    compare_tables(sides)


def run():
    with tempfile.TemporaryDirectory() as folder:
        for number, options in enumerate(PROGRAMS):
            if "memory_budget" in options:
                options = {**options, "tier_folder": folder}
            done = run_program(number, options)
            if number < LONG:
                run_upkeep(*done, f"host{number}", {**options, "host_rows": True})
            print(f"rows in host memory agree, {options['rule']}", flush=True)
    run_many_rows()
    run_refusals()
