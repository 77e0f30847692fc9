"""The same random programs on a table in host memory and on one on a device.

Keys, counts and clocks must be the same, and so must all bits of rows, slots and records: sums are in the order
received, and rules round every operation apart on both (rules/rule.h).
"""

from __future__ import annotations

import concurrent.futures

import numpy as np

from tests.cuda.op_kernels import refused, run_op, same
from tests.oracles.hash_table import pack
from tests.support.table_records import arguments_of
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops import _library

DIM, SEGMENTS = 5, 2
LONG = 2  # programs with all steps; the others test their rules only
PLAIN = {"distribution": "uniform", "a": -0.5, "b": 0.5}
PROGRAMS = [
    {"rule": "adam", "hyperparameters": [0.0, 0.1, 0.001, 1e-7, 0.0], **PLAIN, "max_rows": 40, "eviction": "lru",
     "record_tombstones": True, "admission_count": [2, 1], "max_candidates": 30, "hot_after": 2,
     "frequency_decay_steps": 2, "stochastic_rounding": True},
    {"rule": "rowwise_adagrad", "hyperparameters": [0.7, 0.1, 1e-8, 0.0, 1.0, 2.0], **PLAIN, "storage": "bfloat16",
     "stochastic_rounding": True, "max_rows": [50, 44], "eviction": ["lfu", "lru"], "window": 2,
     "admission_count": [1, 2]},
    {"rule": "adagrad", "hyperparameters": [0.3, 0.1, 1e-7, 1.0, 0.0], "distribution": "truncated_normal", "a": 0.0,
     "b": 0.1, "storage": "float16", "ttl": 3, "record_tombstones": True},
    {"rule": "ftrl", "hyperparameters": [0.0, 0.1, -0.5, 0.02, 0.1, 0.1, 0.3], **PLAIN, "eviction": "lru",
     "admission_count": 2},
    {"rule": "momentum", "hyperparameters": [0.0, 0.9, 1.0], **PLAIN, "max_rows": 45, "ttl": 4, "eviction": "lfu"},
    {"rule": "adam", "hyperparameters": [0.5, 0.1, 0.001, 1e-7, 0.01], **PLAIN, "storage": "bfloat16",
     "unknown": "zeros"},
    {"rule": "sgd", "hyperparameters": [0.0], "a": 0.25, "unknown": "zeros", "anonymous": True},
]  # fmt: skip


class Side:
    """A table of one kind. `call` runs an op on it and returns arrays."""

    def __init__(self, name, on_device, options):
        self.on_device = on_device
        options = {"shared_name": f"{name}/{on_device}", "dim": DIM, "seeds": [11, -22], **options}
        self.handle = run_op(on_device, ops.hash_table, (), **arguments_of(**options))

    def call(self, op, *arguments, **more):
        answer = run_op(self.on_device, op, (self.handle, *arguments), **more)
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), answer)


def apply_gradients(table, handles, inverse, grads, rate, step):
    found = ops.TableRows(grads, handles, inverse)
    return ops.table_apply_gradients(table, found, grads, scale=0.5, learning_rate=rate, step=step)


def accumulate(table, handles, inverse, grads, begin):
    found = ops.TableRows(grads, handles, inverse)
    return ops.table_accumulate_gradients(table, found, grads, scale=0.5, begin=begin)


def refresh(table, message, splits, dtype):
    ahead = ops.table_look_ahead(table, message, splits, dim=DIM, dtype=dtype)
    return ops.table_lookup(table, message, splits, ahead, dim=DIM)


def look_up(table, message, splits, dtype):
    return ops.table_lookup(table, message, splits, dim=DIM, dtype=dtype)


def peek_and_touch(table, message, splits, dtype):
    """Makes a training lookup in two parts."""
    rows = ops.table_read(table, message, splits, as_training=True, dim=DIM, dtype=dtype)
    return ops.table_lookup(table, message, splits, with_rows=False, dim=DIM)._replace(rows=rows)


def keys_since(table, segment, since):
    return _library.library.fusedrec_table_keys(table=table, segment=segment, since=since)


def statistics_of_segments(table):
    return ops.table_statistics(table).segments


def pools_of(table):
    return ops.table_statistics(table).bytes[3:]


def batch_of(random, most=20, vocabulary=60):
    ids = lambda: (random.integers(-2, vocabulary, random.integers(0, most)) // random.integers(1, 3)).tolist()  # noqa: E731
    batch = [[ids() for _ in range(SEGMENTS)] for _ in range(3)]
    batch[0][0] += [-(2**63), 2**63 - 1, -(2**63)]
    return batch


def records_of(side, segment, since=(0, 0)):
    """Returns ascending ids and their records."""
    ids, handles = side.call(keys_since, np.array(segment), np.array(since))
    order = np.argsort(ids)
    return ids[order], side.call(ops.table_read_records, handles[order])


def compare_tables(sides, since=(0, 0)):
    for op in (ops.table_size, ops.table_clock, statistics_of_segments):
        host, device = (side.call(op) for side in sides)
        same(host, device, str(op))
    for segment in range(SEGMENTS):
        same(*(side.call(ops.table_tombstones, segment) for side in sides), "tombstones")
        for host, device in zip(*(side.call(ops.table_candidates, segment) for side in sides)):
            same(host, device, "candidates")
        (ids, records), (device_ids, device_records) = (records_of(side, segment, since) for side in sides)
        same(ids, device_ids, "keys")
        same(records, device_records, "records")


def train(sides, random, number, lookup, dtype):
    """Looks up on both, and updates the found rows. The host numbers rows by shard, the device by arrival."""
    message, splits, received = pack(batch_of(random))
    if len(received) % 3 == 0:
        host, device = (side.call(ops.table_read, message, splits, dim=DIM, dtype=dtype) for side in sides)
        same(host, device, "rows of an inference lookup")
    both = [side.call(lookup, message, splits, dtype=dtype) for side in sides]
    compare_found(*both, received)
    update(sides, both, received, random, number, dtype)


def compare_found(host, device, received):
    same(host.rows, device.rows, "rows of a training lookup")
    assert len(host.handles) == len(device.handles) == len(set(received))
    same(np.unique(device.inverse), np.arange(len(device.handles), dtype=np.int32), "numbers")
    same(host.handles[host.inverse] < 0, device.handles[device.inverse] < 0, "ids without a row")
    for found in (host, device):
        assert [found.inverse[received.index(key)] for key in received] == found.inverse.tolist()


def update(sides, both, received, random, number, dtype):
    """Updates with some non-finite gradients. Both leave out the same rows."""
    grads = tf.cast(random.normal(size=[len(received) + number % 2, DIM]), dtype).numpy()
    spoilt = received[: number % 2 * 3]
    grads[: len(spoilt), -1] = np.nan
    for side, found in zip(sides, both):
        left_out = side.call(apply_gradients, found.handles, found.inverse, grads, np.float32(0.05).reshape(()),
                             np.array(number + 1, np.int64))  # fmt: skip
        has_row = found.handles >= 0
        assert left_out.tolist() == sorted({n for n in found.inverse[: len(spoilt)] if has_row[n]})


def run_program(number, options, steps):
    """Runs lookups, updates and evictions, and compares both tables after every second step."""
    random = np.random.default_rng(number)
    sides = [Side(f"program{number}", on_device, options) for on_device in (False, True)]
    dtype = tf.float16 if number == 1 else tf.float32
    since = (0, 0)
    for step in range(steps):
        train(sides, random, step, (look_up, peek_and_touch, refresh)[step % 3], dtype)
        pools = [side.call(pools_of) for side in sides]
        same(*pools, "rows in float32, and in 16 bits")
        if step % 2:
            compare_tables(sides, since)
            since = sides[0].call(ops.table_clock)
    assert "hot_after" not in options or pools[0].min() > 2, pools[0]
    return sides, random, dtype


def run_upkeep(sides, random, dtype, number, options):
    """Removes rows, moves the rest by a checkpoint to a table of the other kind, and clears it."""
    gone = np.array([0, 1, 2, 3, 10**12, -(2**63)], np.int64)
    for op, *arguments in ((ops.table_evict, 1, 7), (ops.table_remove, 0, gone)):
        host, device = (side.call(op, *arguments) for side in sides)
        same(host, device, op.__name__)
    compare_tables(sides)
    others = [Side(f"other{number}", on_device, options) for on_device in (False, True)]
    for side, other in zip(sides, others[::-1]):
        other.call(ops.table_import_candidates, 0, np.array([7]), np.array([1]))
        for segment in range(SEGMENTS):
            other.call(ops.table_import, segment, *records_of(side, segment))
        other.call(ops.table_set_clock, side.call(ops.table_clock))
    compare_tables(others)
    train(others, random, 6, look_up, dtype)
    compare_tables(others)
    for side in sides:
        side.call(ops.table_prefetch, *pack(batch_of(random))[:2])
        side.call(ops.table_forget_tombstones)
        side.call(ops.table_clear)
        assert side.call(ops.table_size).tolist() == [0] * SEGMENTS
        assert side.call(ops.table_tombstones, 0).size == 0 and side.call(ops.table_candidates, 1)[0].size == 0
    train(sides, random, 7, look_up, dtype)
    compare_tables(sides)


def run_refusals():
    """Wrong calls give a Status, and the table stays unchanged."""
    wrong = tf.errors.InvalidArgumentError
    sgd = {"rule": "sgd", "hyperparameters": [0.0], "a": 0.25}
    tier = {"memory_budget": 1 << 20, "tier_folder": "/tmp"}
    refused(wrong, "must be 0 on a GPU. Use a table under", lambda: Side("tier", True, {**sgd, **tier}))
    refused(
        wrong, "dim of table '' must be an int in [1, 1048576], got", lambda: Side("w", True, {**sgd, "dim": 2**20 + 1})
    )
    side = Side("table", True, {**sgd, "max_rows": 4, "record_tombstones": True})
    message, splits = np.array([2, 1, 5, 6, 7], np.int64), np.array([5], np.int32)
    lookup = lambda message, splits, dim=DIM: side.call(ops.table_lookup, message, splits, dim=dim)  # noqa: E731
    found = lookup(message, splits)
    numbers = (np.float32(1.0).reshape(()), np.array(1, np.int64))
    grads = np.ones([3, DIM], np.float32)
    update = lambda handles, inverse, grads=grads, numbers=numbers: side.call(  # noqa: E731
        apply_gradients, handles, inverse, grads, *numbers
    )
    before = records_of(side, 0)
    refused(wrong, "dim must be that of the table", lambda: lookup(message, splits, dim=DIM + 1))
    refused(wrong, "received_splits", lambda: lookup(message, splits + 1))
    refused(wrong, "counts that do not fit", lambda: lookup(message + np.array([1, 0, 0, 0, 0]), splits))
    refused(
        tf.errors.ResourceExhaustedError,
        "max_rows of segment 0 is 4",
        lambda: lookup(np.array([5, 0, *range(5)]), np.array([7], np.int32)),
    )
    refused(wrong, "handles must be of one TableLookup", lambda: update(found.handles + 77, found.inverse))
    refused(wrong, "inverse must lie in", lambda: update(found.handles, found.inverse + 3))
    refused(wrong, "grads must have shape", lambda: update(found.handles, found.inverse, grads[:2]))
    refused(
        wrong, "step must be >= 1", lambda: update(found.handles, found.inverse, grads, (numbers[0], numbers[1] - 1))
    )
    refused(
        wrong,
        "learning_rate must be finite",
        lambda: update(found.handles, found.inverse, grads, (-numbers[0], numbers[1])),
    )
    refused(wrong, "segment must lie in", lambda: side.call(ops.table_evict, 2, 1))
    refused(wrong, "segment must lie in", lambda: side.call(ops.table_tombstones, -1))
    refused(
        wrong, "counts must lie in", lambda: side.call(ops.table_import_candidates, 0, np.array([7]), np.array([0]))
    )
    refused(wrong, "count must be >= 0", lambda: side.call(ops.table_evict, 1, -1))
    refused(wrong, "since must lie in", lambda: records_of(side, 0, since=(0, -1)))
    refused(wrong, "handles must be of one", lambda: side.call(ops.table_read_records, np.array([99])))
    refused(
        wrong,
        "records must have shape",
        lambda: side.call(ops.table_import, 0, np.array([1]), np.zeros([1, 3], np.uint8)),
    )
    refused(wrong, "clock must have shape", lambda: side.call(ops.table_set_clock, np.zeros([3], np.int64)))
    for was, now in zip(before, records_of(side, 0)):
        same(was, now, "a refused call")
    side.call(ops.table_remove, 0, np.array([5]))
    refused(
        tf.errors.FailedPreconditionError, "have been evicted or removed", lambda: update(found.handles, found.inverse)
    )


def run_alike():
    """Calls at the edge of the contract change both tables alike, or are refused alike."""
    options = {"rule": "adam", "hyperparameters": [0.0, 0.1, 0.001, 1e-7, 0.0], **PLAIN}
    sides = [Side("alike", on_device, options) for on_device in (False, True)]
    wrong, stale, full = (
        tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError, tf.errors.ResourceExhaustedError
    )  # fmt: skip
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
    assert side.call(ops.table_size)[0] == 50 * 61


def run():
    for number, options in enumerate(PROGRAMS):
        done = run_program(number, options, steps=2 if number >= LONG else 4)
        if number < LONG:
            run_upkeep(*done, number, options)
        print(f"program {number} of {options['rule']} agrees", flush=True)
    run_refusals()
    run_alike()
    run_keys_beside_lookups()
