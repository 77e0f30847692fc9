"""Calls every op with shapes, dtypes, splits and scalars that this package never passes.

A small scenario records correct calls, which are repeated with some changed arguments. An op may return a result or
raise an error of TensorFlow, ValueError or TypeError. It must not end the process. Under AddressSanitizer
(tools/sanitized_ops.py), every access beyond an array ends it.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from tests.support import attention
from tests.support.hash_tables import Table
from tf_fusedrec import ops, tf
from tf_fusedrec.ops._library import library

CALLS = 3000  # Calls per seed.
# Large valid sizes are excluded, because an op would allocate a gigabyte on request.
INTEGERS = [-(2**63), -(2**31) - 1, -7, -1, 0, 1, 2, 3, 5, 64, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]
FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-45, 0.5, 3e38]
STRINGS = ["", "x", "adam", "float16", "lru", "tfra", "buckets", "../x", "\0"]


class Call(NamedTuple):
    name: str
    arguments: tuple
    keywords: dict[str, Any]


def record(scenario: Callable[[], None]) -> list[Call]:
    """Records the op calls of a scenario."""
    calls: list[Call] = []

    def recorder(name: str, function: Callable) -> Callable:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(Call(name, arguments, keywords))
            return function(*arguments, **keywords)

        return call

    names = [name for name in dir(library) if name.startswith("fusedrec_") and "eager" not in name]
    with mock.patch.multiple(library, **{name: recorder(name, getattr(library, name)) for name in names}):
        scenario()
    return calls


def scenario() -> None:
    """Calls every op of a training step, of a checkpoint and of attention."""
    batch = [[[5, 7, 5], [9]], [[7], []]]
    spec = {"record_tombstones": True, "admission_count": 2, "max_rows": 100, "eviction": "lru"}
    tables = [Table(2), Table(2, rule="adagrad", hyperparameters=(0.0, 0.1, 1e-7, 0.0, 0.0)), Table(2, **spec)]
    tables.append(Table(2, averaged=True))
    for table in tables:
        for _ in range(2):
            found = table.lookup(batch)
            table.apply(found, np.ones([5, 4], np.float32))
        table.find(batch)
        message, splits = tf.constant([2, 1, 5, 7, 9], tf.int64), tf.constant([5], tf.int32)
        ahead = ops.table_look_ahead(table.handle, message, splits, dim=4)
        found = ops.table_lookup(table.handle, message, splits, ahead, dim=4)
        ops.table_accumulate_gradients(table.handle, found, tf.ones([3, 4]), scale=1.0)
        ops.table_apply_accumulated(table.handle, learning_rate=0.5, step=2)
        ops.table_read(
            table.handle,
            message,
            splits,
            ops.table_look_ahead(table.handle, message, splits, dim=4),
            window=1,
            dim=4,
        )
        ops.table_lookup(table.handle, message, splits, with_rows=False, dim=4)
        ops.table_prefetch(table.handle, message, splits)
        ids, handles = ops.table_keys(table.handle, 0)
        ops.table_import(table.handle, 1, ids, ops.table_read_records(table.handle, handles))
        ops.table_import_candidates(table.handle, 1, tf.constant([77], tf.int64), tf.constant([1], tf.int64))
        ops.table_candidates(table.handle, 1)
        ops.table_set_clock(table.handle, ops.table_clock(table.handle))
        ops.table_remove(table.handle, 0, tf.constant([5], tf.int64))
        ops.table_evict(table.handle, 0, 1)
        ops.table_tombstones(table.handle, 0)
        ops.table_forget_tombstones(table.handle)
        ops.table_statistics(table.handle)
    _replicas(tables[-1].handle, message, splits)
    ops.table_clear(tables[0].handle)
    _exchange()
    _attention()
    _states()


def _states() -> None:
    parts = ops.StateParts(((tf.float32, 2), (tf.int64, 1)), ((tf.bfloat16, 3),))
    states = ops.user_states(parts, max_bytes=10_000, page_tokens=2, anonymous=True)
    users, version, now = (tf.constant(number, tf.int64) for number in ([7, 9], 1, 5))
    for _ in range(2):
        revisions = ops.user_states_find(states, users, version, now, parts=parts).revisions
        ops.user_states_write(
            states, users, version, now, revisions=revisions,
            row_splits=tf.constant([0, 1, 4], tf.int64), of_tokens=[tf.ones([4, 2]), tf.ones([4, 1], tf.int64)],
            of_users=[tf.ones([2, 3], tf.bfloat16)],
        )  # fmt: skip
    ops.user_states_find(states, users, version, now, parts=parts)
    ops.user_states_spill(states, tempfile.gettempdir(), 10_000)
    ops.user_states_drop(states, 0)
    ops.user_states_statistics(states)


def _replicas(table: tf.Tensor, message: tf.Tensor, splits: tf.Tensor) -> None:
    ops.table_note_trained(table, message, splits)
    ops.table_take_unsynced(table)
    ids, of_segments = tf.constant([7, 9], tf.int64), tf.constant([0, 1, 2], tf.int64)
    numbers = ops.table_read_numbers(table, ids, of_segments)
    ops.table_merge(
        table, left=ids[:1], left_splits=tf.constant([0, 1, 1], tf.int64), ids=ids, segment_splits=of_segments,
        numbers=numbers, headers=tf.constant([1, 1], tf.int64), step=1,
    )  # fmt: skip


def _exchange() -> None:
    ids, splits = tf.constant([3, 3, 8, 1], tf.int64), tf.constant([0, 3, 4], tf.int64)
    unique = ops.segment_unique(ids, splits)
    ranked = ops.rank_partition(unique.ids, unique.splits, num_ranks=2)
    ops.unpack_message(ranked.message[:7], ranked.send_splits, num_segments=2)
    joined, of_ranks = ops.join_messages([ranked.message, ranked.message], [ranked.send_splits] * 2)
    ops.split_messages(joined[:14], of_ranks, segments=[2, 2])
    window = ops.window_unique([unique, unique])
    ranked = [ops.rank_partition(*new, num_ranks=2) for new in window.new]
    route = ops.window_route(window, ranked, num_segments=2)
    messages, of_ranks = [one.message[: sum(one.send_splits)] for one in ranked], [one.send_splits for one in ranked]
    ops.window_gradients(messages, of_ranks, route.marks, route.marks_splits, num_segments=2)
    row_splits, sizes = tf.constant([0, 2, 3, 4], tf.int64), tf.constant([1, 2], tf.int64)
    ops.cluster_samples([ids, ids], [row_splits] * 2, sizes, tables=[0, 1])
    rows, index = tf.ones([3, 4]), tf.constant([0, 2, 2, 1], tf.int32)
    ops.recover(rows, index)
    ops.recover_grad(tf.ones([4, 4]), index, tf.constant(3, tf.int64))
    bag_splits, bag_scale = tf.constant([0, 1, 4], tf.int64), tf.constant([1.0, 0.5])
    ops.pooled_recover(rows, index, bag_splits, bag_scale)
    ops.pooled_recover_parts([rows, rows[:0], rows], index, bag_splits, bag_scale)
    ops.pooled_recover_grad(tf.ones([2, 4]), index, bag_splits, bag_scale, tf.constant(3, tf.int64))
    ops.initial_rows(
        rows, tf.constant([True, False, False]), tf.constant([1, 2, 3], tf.int64), tf.constant([0, 1, 3], tf.int64),
        seeds=[1, 2], distribution="uniform", a=0.0, b=1.0,
    )  # fmt: skip
    fused = ops.fuse_ids(
        [ids, ids[:2]], {0: tf.constant([0, 4, 4], tf.int64)}, segments=[0, 1], num_segments=2,
        feature_names=["f", "g"], bag_sizes=[0, 2], combiners=["sum", "mean"],
    )  # fmt: skip
    sums = ops.partial_sums(fused, num_ranks=1, row_bytes=1024)  # f as one sum
    ops.partial_sum_terms(sums.terms, sums.terms_splits, sums.send_splits, num_segments=2)


def _attention() -> None:
    case = attention.Case((3, 0, 2), targets=1, attention_window=2, min_full_length=1, position=True, time="buckets")
    for queries in (None, (2, 0, 2)):
        arrays = attention.Arrays(dataclasses.replace(case, queries=queries))
        for channels in (False, True):
            arrays.results(arrays.ours, tf.float32, channels)
    heads = tf.ones([5, 2, 4])
    with tf.GradientTape() as tape:
        tape.watch(heads)
        gate = ops.OutputGate(heads, tf.ones([8]), tf.zeros([8]))
        gated = ops.jagged_attention(heads, heads, heads, tf.constant([0, 3, 3, 5], tf.int64), gate=gate, scale=0.1)
    tape.gradient(gated, heads)


def call_ops(seed: int, calls: int = CALLS) -> collections.Counter:
    """Makes wrong calls and counts the outcomes.

    Raises:
      Any other error of an op.
    """
    chance, right = random.Random(seed), record(scenario)
    counts: collections.Counter = collections.Counter()
    for number in range(calls):
        call = chance.choice(right)
        if call.name == "fusedrec_hash_table":  # A table per call would fill the memory.
            continue
        arguments, keywords = list(call.arguments), dict(call.keywords)
        for _ in range(chance.choice([1, 1, 2, 3])):
            places = [*((arguments, n) for n in range(len(arguments))), *((keywords, name) for name in keywords)]
            container, key = chance.choice(places)
            container[key] = _changed(container[key], chance)
        try:
            getattr(library, call.name)(*arguments, **keywords)
            counts["answers"] += 1
        except (tf.errors.OpError, ValueError, TypeError, MemoryError):
            # MemoryError: TensorFlow's Python binding overflows where an attribute of INT64_MAX counts two lists of
            # outputs. It raises before the op runs. A kernel without memory ends in ResourceExhaustedError.
            counts["refusals"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, call {number} of {call.name}: {error!r}") from error
    return counts


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, (list, tuple)) and not isinstance(value, str):
        items = list(value)
        if not items or chance.random() < 0.3:
            return items[: chance.randrange(len(items) + 1)] + items[:1]
        at = chance.randrange(len(items))
        items[at] = _changed(items[at], chance)
        return items
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return chance.choice(STRINGS)
    if isinstance(value, int):
        return chance.choice(INTEGERS)
    if isinstance(value, float):
        return chance.choice(FLOATS)
    if not tf.is_tensor(value) and not isinstance(value, np.ndarray):
        return value
    tensor = tf.convert_to_tensor(value)
    return tensor if tensor.dtype == tf.resource else _changed_array(tensor.numpy(), chance)


# Values beyond the range of a dtype are among the wrong arguments, so that NumPy has no reason to warn of their casts.
@np.errstate(over="ignore", invalid="ignore")
def _changed_array(array: np.ndarray, chance: random.Random) -> Any:
    """Returns an array with another shape, other values or another dtype."""
    what = chance.randrange(6)
    if what == 0:
        return tf.constant(np.resize(array, chance.choice([(), (0,), (1,), (2, 0), (3,), (7,), (1, 1, 1), (2, 3)])))
    if what == 1 and array.ndim:
        return tf.constant(array[: chance.randrange(len(array) + 1)])
    if what == 2 and array.ndim:
        return tf.constant(np.concatenate([array, array]))
    if what == 3:
        return tf.constant(array.astype(chance.choice([np.int32, np.int64, np.float32, np.float16, np.uint8])))
    array = np.array(array)
    numbers = INTEGERS if array.dtype.kind in "iu" else FLOATS
    for _ in range(chance.choice([1, 1, 3])):
        if array.size and array.dtype.kind in "iuf":
            place = chance.randrange(array.size)
            array.reshape(-1)[place : place + 1] = np.array([chance.choice(numbers)]).astype(array.dtype)
    return tf.constant(array)
