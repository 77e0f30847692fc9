"""Two replicas of a table that are averaged: on the device they take, read and merge what they do in host memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.cuda.op_kernels import refused, same
from tests.cuda.op_kernels_table import DIM, PLAIN, SEGMENTS, Side, batch_of, compare_tables, look_up, update
from tests.oracles.hash_table import pack
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

PROGRAMS = [
    {"rule": "adagrad", "hyperparameters": [0.0, 0.1, 1e-7, 1.0, 0.0], **PLAIN, "max_rows": 45, "eviction": "lru",
     "record_tombstones": True},
    {"rule": "rowwise_adagrad", "hyperparameters": [0.7, 0.1, 1e-8, 0.0, 1.0, 2.0], **PLAIN, "storage": "bfloat16",
     "stochastic_rounding": True, "ttl": 3},
]  # fmt: skip


def merge(table, left, left_splits, ids, segment_splits, numbers, headers, step):
    return ops.table_merge(
        table, left=left, left_splits=left_splits, ids=ids, segment_splits=segment_splits, numbers=numbers,
        headers=headers, step=step,
    )  # fmt: skip


class UnderWay(NamedTuple):
    """A lookup of both kinds of tables, whose gradients come later."""

    message: np.ndarray
    splits: np.ndarray
    received: list[tuple[int, int]]
    both: list[ops.TableRows]


def look_up_both(sides, random, most):
    message, splits, received = pack(batch_of(random, most=most))
    both = [side.call(look_up, message, splits, dtype=tf.float32) for side in sides]
    same(both[0].rows, both[1].rows, "rows of a training lookup")
    return UnderWay(message, splits, received, both)


def train(sides, looked_up, random, number):
    update(sides, looked_up.both, looked_up.received, random, number, tf.float32)
    for side in sides:
        side.call(ops.table_note_trained, looked_up.message, looked_up.splits)


def taken(side):
    """Returns {id: header} by segment: trained ids, then ids that left."""
    return parts_of(*side.call(ops.table_take_unsynced))


def parts_of(message, headers):
    parts = np.split(np.arange(len(headers)), np.cumsum(message[: 2 * SEGMENTS])[:-1])
    ids = message[2 * SEGMENTS :]
    return [dict(zip(ids[part].tolist(), headers[part].tolist())) for part in parts]


class Begun(NamedTuple):
    """Arguments of `merge` up to segment_splits, the numbers in each replica, and the common headers."""

    places: tuple[np.ndarray, ...]
    numbers: list[np.ndarray]
    headers: np.ndarray


def read_both(sides, *where):
    host, device = (side.call(ops.table_read_numbers, *where) for side in sides)
    same(host, device, "numbers of rows")
    return host


def begin(replicas):
    """Takes and reads the rows in which replicas differ, as tf_fusedrec/embedding/replicas.py."""
    found = []
    for sides in replicas:
        host, device = (taken(side) for side in sides)
        assert host == device, "ids and counters that replicas exchange"
        assert all(list(part) == sorted(part) for part in device[SEGMENTS:])
        found.append(host)
    union = [sorted({i for parts in found for i in parts[n]}) for n in range(2 * SEGMENTS)]
    halves = union[:SEGMENTS], union[SEGMENTS:]
    ids, left = (np.array([i for part in half for i in part], np.int64) for half in halves)
    splits, left_splits = (np.cumsum([0, *map(len, half)], dtype=np.int64) for half in halves)
    headers = []
    for n, part in enumerate(union[:SEGMENTS]):
        for i in part:
            of = [parts[n].get(i, 0) for parts in found]
            headers.append(max(h >> 32 for h in of) << 32 | max(h & 0xFFFFFFFF for h in of))
    numbers = [read_both(sides, ids, splits) for sides in replicas]
    return Begun((left, left_splits, ids, splits), numbers, np.array(headers, np.int64))


def finish(replicas, begun, step):
    """Gives both replicas the mean and their own changes since then, of which there are none without a delay."""
    mean = np.sum(begun.numbers, axis=0) / np.float32(len(replicas))
    for sides, before in zip(replicas, begun.numbers):
        numbers = mean + (read_both(sides, *begun.places[2:]) - before)
        for side in sides:
            side.call(merge, *begun.places, numbers, begun.headers, np.array(step))
        compare_tables(sides)
    left, _, ids, _ = begun.places
    return len(ids), len(left)


def average_at_once(replicas, random):
    exchanged = []
    for step in range(8):
        for sides in replicas:
            train(sides, look_up_both(sides, random, 8), random, step)
        if step % 4 == 3:
            exchanged.append(finish(replicas, begin(replicas), step))
    return exchanged


def average_late(replicas, random):
    """The mean is begun before an update and merged after it. Meanwhile the lookup of the next batch is under way."""
    exchanged = []
    under_way = [look_up_both(sides, random, 5) for sides in replicas]
    for step in range(12):
        coming = [look_up_both(sides, random, 5) for sides in replicas]
        begun = begin(replicas) if step % 3 == 2 else None
        for sides, looked_up in zip(replicas, under_way):
            train(sides, looked_up, random, step)
        if begun is not None:
            exchanged.append(finish(replicas, begun, step))
        under_way = coming
    return exchanged


def run():
    for number, options in enumerate(PROGRAMS):
        for window, program in ((1, average_at_once), (2, average_late)):
            more = {**options, "averaged": True, "window": window}
            replicas = [
                [Side(f"replica{number}{window}{r}", on_device, more) for on_device in (False, True)] for r in range(2)
            ]
            exchanged = program(replicas, np.random.default_rng(number))
            assert np.min(np.sum(exchanged, axis=0)) > 0, exchanged
            print(f"{program.__name__}: replicas of {options['rule']} agree: {exchanged}", flush=True)
    plain = Side("not averaged", True, {"rule": "sgd", "hyperparameters": [0.0]})
    refused(tf.errors.FailedPreconditionError, "averaged=True", lambda: plain.call(ops.table_take_unsynced))
    one = np.array([0, 1, 0]), np.zeros([1, DIM], np.float32), np.array([1])
    wrong = lambda *numbers: replicas[0][1].call(  # noqa: E731
        merge, np.array([], np.int64), np.zeros(3, np.int64), np.array([4]), one[0], *numbers, np.array(1)
    )
    refused(tf.errors.InvalidArgumentError, "that do not decrease", lambda: wrong(*one[1:]))
