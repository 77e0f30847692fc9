"""Tables beside tables in host memory: refusals, calls at the edge of the contract, concurrent calls.

op_kernels_programs.py has what both answer in random programs.
"""

from __future__ import annotations

import concurrent.futures

import numpy as np

from tests.cuda.op_kernels import refused, run_op, same
from tests.golden.tables import accumulate, apply_accumulated, apply_gradients, keys_since, merge
from tests.oracles.hash_table import pack
from tests.support.table_records import arguments_of
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

DIM, SEGMENTS = 5, 2
WRONG = tf.errors.InvalidArgumentError
PLAIN = {"distribution": "uniform", "a": -0.5, "b": 0.5}


class Side:
    """A table of one kind. `call` runs an op on it and returns arrays."""

    def __init__(self, name, on_device, options):
        self.on_device = on_device
        options = {"shared_name": f"{name}/{on_device}", "dim": DIM, "seeds": [11, -22], **options}
        self.handle = run_op(on_device, ops.hash_table, (), **arguments_of(**options))

    def call(self, op, *arguments, **more):
        answer = run_op(self.on_device, op, (self.handle, *arguments), **more)
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), answer)


def look_ahead(table, message, splits, dtype):
    return ops.table_look_ahead(table, message, splits, dim=DIM, dtype=dtype)


def refresh(table, message, splits, rows, handles, mark):
    return ops.table_lookup(table, message, splits, ops.RowsAhead(rows, handles, mark), dim=DIM)


def look_up(table, message, splits, dtype):
    return ops.table_lookup(table, message, splits, dim=DIM, dtype=dtype)


def records_of(side, segment, since=(0, 0)):
    """Returns ascending ids and their records."""
    ids, handles = side.call(keys_since, np.array(segment), np.array(since))
    order = np.argsort(ids)
    return ids[order], side.call(ops.table_read_records, handles[order])


def compare_tables(sides):
    same(*(side.call(ops.table_clock) for side in sides), "clocks")
    same(*(side.call(ops.table_statistics).segments for side in sides), "statistics")
    for segment in range(SEGMENTS):
        same(*(side.call(ops.table_tombstones, segment) for side in sides), "tombstones")
        for host, device in zip(*(side.call(ops.table_candidates, segment) for side in sides)):
            same(host, device, "candidates")
        (ids, records), (device_ids, device_records) = (records_of(side, segment) for side in sides)
        same(ids, device_ids, "keys")
        same(records, device_records, "records")


def compare_found(host, device, received):
    same(host.rows, device.rows, "rows of a training lookup")
    assert len(host.handles) == len(device.handles) == len(set(received))
    same(np.unique(device.inverse), np.arange(len(device.handles), dtype=np.int32), "numbers")
    same(host.handles[host.inverse] < 0, device.handles[device.inverse] < 0, "ids without a row")
    for found in (host, device):
        assert [found.inverse[received.index(key)] for key in received] == found.inverse.tolist()


def run_refusals():
    """Wrong calls give a Status, and the table stays unchanged."""
    wrong, stale, full = WRONG, tf.errors.FailedPreconditionError, tf.errors.ResourceExhaustedError
    sgd = {"rule": "sgd", "hyperparameters": [0.0], "a": 0.25}
    tier = {"memory_budget": 1 << 20, "tier_folder": "/tmp"}
    refused(wrong, "must be 0 on a GPU. Use a table under", lambda: Side("tier", True, {**sgd, **tier}))
    words = "dim of table '' must be an int in [1, 1048576], got"
    refused(wrong, words, lambda: Side("w", True, {**sgd, "dim": 2**20 + 1}))
    side = Side("table", True, {**sgd, "max_rows": 4, "record_tombstones": True, "averaged": True})
    message, splits = np.array([2, 1, 5, 6, 7], np.int64), np.array([5], np.int32)
    side.call(ops.table_lookup, message, splits, dim=DIM)
    handles, inverse = side.call(ops.table_lookup, message, splits, dim=DIM)[1:]
    rate, step, begin = np.float32(1.0).reshape(()), np.array(1, np.int64), np.array(True)
    grads, none, one = np.ones([3, DIM], np.float32), np.array([], np.int64), np.array([1])
    before = records_of(side, 0)
    calls = [
        (wrong, "dim must be that of the table", ops.table_lookup, message, splits, {"dim": DIM + 1}),
        (wrong, "received_splits", ops.table_lookup, message, splits + 1, {"dim": DIM}),
        (wrong, "counts that do not fit", ops.table_lookup, message + [1, 0, 0, 0, 0], splits, {"dim": DIM}),
        (
            full,
            "max_rows_per_rank of segment 0 is 4",
            ops.table_lookup,
            np.array([5, 0, *range(5)]),
            splits + 2,
            {"dim": DIM},
        ),
        (wrong, "grads must have shape", apply_gradients, handles, inverse, grads[:2], rate, step),
        (wrong, "step must be >= 1", apply_gradients, handles, inverse, grads, rate, step - 1),
        (wrong, "learning_rate must be finite", apply_gradients, handles, inverse, grads, -rate, step),
        (wrong, "segment must lie in", ops.table_evict, 2, 1),
        (wrong, "segment must lie in", ops.table_tombstones, -1),
        (wrong, "counts must lie in", ops.table_import_candidates, 0, np.array([7]), np.array([0])),
        (wrong, "count must be >= 0", ops.table_evict, 1, -1),
        (wrong, "since must lie in", keys_since, np.array(0), np.array([0, -1])),
        (wrong, "handles must be of one", ops.table_read_records, np.array([99])),
        (wrong, "records must have shape", ops.table_import, 0, one, np.zeros([1, 3], np.uint8)),
        (wrong, "clock must have shape", ops.table_set_clock, np.zeros([3], np.int64)),
        (wrong, "that do not decrease", merge, none, np.zeros(3, np.int64), one, [0, 1, 0], grads[:1], one, step),
    ]
    earlier = (1 << 32) * np.array([0, 1, 0])  # of the lookup before
    for other in (handles - earlier, handles + (1 << 32), handles & 0xFFFFFFFF, handles + 77, handles[:2], handles[:0]):
        words = "handles must be of one TableLookup" if len(other) == 3 else "inverse must lie in"
        calls += [(wrong, words, apply_gradients, other, inverse, grads, rate, step)]
        calls += [(wrong, words, accumulate, other, inverse, grads, begin)]
    for place in (-1, 3, 2**31 - 1):
        elsewhere = np.where([0, 0, 1], place, inverse).astype(np.int32)
        calls += [(wrong, "inverse must lie in", apply_gradients, handles, elsewhere, grads, rate, step)]
    for error, words, op, *arguments in calls:
        more = arguments.pop() if isinstance(arguments[-1], dict) else {}
        tensors = [np.array(a) if isinstance(a, list) else a for a in arguments]
        refused(error, words, lambda: side.call(op, *tensors, **more))  # noqa: B023
    for was, now in zip(before, records_of(side, 0)):
        same(was, now, "a refused call")
    side.call(accumulate, handles, inverse, grads, begin)
    refused(stale, "while accumulated gradients wait", lambda: side.call(ops.table_remove, 0, one))
    side.call(apply_accumulated, rate, step)
    for op, *arguments in ((ops.table_remove, 0, np.array([5])), (ops.table_clear,)):
        handles, inverse = side.call(ops.table_lookup, message, splits, dim=DIM)[1:]
        side.call(op, *arguments)
        words = "have been evicted, removed" if arguments else "handles must be of one TableLookup"
        refused((stale, wrong), words, lambda: side.call(apply_gradients, handles, inverse, grads, rate, step))  # noqa: B023
    plain = Side("not averaged", True, sgd)
    refused(stale, "averaged=True", lambda: plain.call(ops.table_take_unsynced))


def run_alike():
    """Calls at the edge of the contract change both tables alike, or are refused alike."""
    options = {"rule": "adam", "hyperparameters": [0.0, 0.1, 0.001, 1e-7, 0.0], **PLAIN}
    sides = [Side("alike", on_device, options) for on_device in (False, True)]
    wrong, stale, full = WRONG, tf.errors.FailedPreconditionError, tf.errors.ResourceExhaustedError
    message, splits, _ = pack([[[5, 6, 5, 7], [8]]])
    grads, rate, step = np.ones([5, DIM], np.float32), np.float32(0.5).reshape(()), np.array(2, np.int64)
    for side in sides:
        call = lambda op, *of: side.call(op, *of, dtype=tf.float32)  # noqa: B023, E731
        train = lambda *of: side.call(apply_gradients, *of, rate, step)  # noqa: B023, E731
        found = call(look_up, message, splits)
        train(found.handles, found.inverse, grads)
        train(found.handles, found.inverse[:1], grads[:1])  # rows of other parts of the lookup stay as they are
        train(found.handles, found.inverse[:0], grads[:0])
        twice = np.concatenate([found.handles, found.handles[2:3]])
        refused(wrong, "must be distinct, got", lambda: train(twice, found.inverse, grads))  # noqa: B023
        begin = np.array(True)
        refused(wrong, "must be distinct, got", lambda: side.call(accumulate, twice, found.inverse, grads, begin))  # noqa: B023
        train(np.append(found.handles, [-1, -1]), found.inverse, grads)
        ids, records = records_of(side, 0)
        side.call(ops.table_import, 0, ids[:0], records[:0])
        train(found.handles, found.inverse, grads)
        refused(wrong, "must be distinct, got 7 twice", lambda: side.call(ops.table_import, 0, ids * 0 + 7, records))  # noqa: B023
        side.call(ops.table_import, 0, ids, records)
        refused(stale, "have been evicted", lambda: train(found.handles, found.inverse, grads))  # noqa: B023
        empty = call(look_up, message[:0], splits[:0])
        assert empty.handles.size == empty.inverse.size == 0 and not empty.rows.any()
        ends = np.array([2**31 - 1, 9])
        refused(wrong, "clock must lie in", lambda: side.call(ops.table_set_clock, ends + 1))  # noqa: B023
        side.call(ops.table_set_clock, ends)
        refused(full, "the last lookup that it can count", lambda: call(look_up, message, splits))  # noqa: B023
    compare_tables(sides)


def run_keys_beside_lookups():
    """Lookups make rows between the size of a table and the list of its keys."""
    side = Side("keys", True, {"rule": "sgd", "hyperparameters": [0.0]})
    ids = iter(range(10**6))
    grow = lambda: side.call(look_up, *pack([[[next(ids) for _ in range(50)], []]])[:2], dtype=tf.float32)  # noqa: E731
    grow()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        lookups = [pool.submit(grow) for _ in range(60)]
        while not all(lookup.done() for lookup in lookups):
            keys, handles = side.call(keys_since, np.array(0), np.array([0, 0]))
            assert len(keys) == len(handles) == len({*keys.tolist()})
        for lookup in lookups:
            lookup.result()
    assert side.call(ops.table_statistics).segments[0, 0] == 50 * 61


def run(_):
    run_refusals()
    run_alike()
    run_keys_beside_lookups()
