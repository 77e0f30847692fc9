"""One interpreter of table programs: options and operations drawn from a seed, run by the ops of any kind of table.

A hash covers every answer and, after every second operation, the whole readable state: rows, slots, metadata,
tombstones, candidates, clock, statistics. Each kind of table numbers rows in its own order, so a handle is compared by
its row. Tables in host memory and emulated tables of a GPU have the same hashes. Only the former run the programs from
ON_HOST on.

    python -m tests.golden.tables        # writes tests/golden/tables.json
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.golden import hashes
from tests.oracles.hash_table import pack
from tests.support.table_records import arguments_of
from tf_fusedrec import ops, optimizers
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops import _library

SEGMENTS, ON_HOST, PROGRAMS = 2, 160, 200
RULES = [
    optimizers.SGD(0.1),
    optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    optimizers.Adagrad(0.1),
    optimizers.Adagrad(0.1, 0.2, 1e-3, epsilon_inside=True, clipnorm=0.7, moment_scale=2.0),
    optimizers.RowWiseAdagrad(0.1, 0.1, moment_scale=3.0),
    optimizers.RowWiseAdagrad(0.1, variant="hsp", clipnorm=0.6),
    optimizers.RMSprop(0.1),
    optimizers.RMSprop(0.1, 0.8, 1e-3, epsilon_inside=True, moment_scale=2.0),
    optimizers.Adam(0.1),
    optimizers.AdamW(0.1, 0.05, clipnorm=0.8, moment_scale=2.0),
    optimizers.Ftrl(0.1, l1=0.02, l2=0.1, l2_shrinkage=0.1, beta=0.3, clipnorm=0.9),
]
ERRORS = (tf.errors.ResourceExhaustedError, tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)
Call = Callable[..., Any]  # op, positional tensors, static keywords -> arrays


# Ops with tensors by position.


def _look_up(table, message, splits, *, window, dim, dtype):
    return ops.table_lookup(table, message, splits, window=window, dim=dim, dtype=dtype)


def _peek_and_touch(table, message, splits, *, window, dim, dtype):
    rows = ops.table_read(table, message, splits, window=window, dim=dim, dtype=dtype)
    return ops.table_lookup(table, message, splits, with_rows=False, window=window, dim=dim)._replace(rows=rows)


def refresh(table, message, splits, *ahead, window, dim):
    return ops.table_lookup(table, message, splits, ops.RowsAhead(*ahead), window=window, dim=dim)


def apply_gradients(table, handles, inverse, grads, rate, step):
    rows = ops.TableRows(grads, handles, inverse)
    return ops.table_apply_gradients(table, rows, grads, scale=0.5, learning_rate=rate, step=step)


def accumulate(table, handles, inverse, grads, begin):
    rows = ops.TableRows(grads, handles, inverse)
    return ops.table_accumulate_gradients(table, rows, grads, scale=0.5, begin=begin)


def apply_accumulated(table, rate, step):
    return ops.table_apply_accumulated(table, learning_rate=rate, step=step)


def keys_since(table, segment, since):
    return _library.library.fusedrec_table_keys(table=table, segment=segment, since=since)


def merge(table, left, left_splits, ids, segment_splits, numbers, headers, step):
    return ops.table_merge(
        table, left=left, left_splits=left_splits, ids=ids, segment_splits=segment_splits, numbers=numbers,
        headers=headers, step=step,
    )  # fmt: skip


def call_on(device: str, op: Callable, *arguments: Any, **static: Any) -> Any:
    with tf.device(device):  # an op would take a NumPy array of bfloat16 as float32
        answer = op(*(tf.convert_to_tensor(a) if isinstance(a, np.ndarray) else a for a in arguments), **static)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), answer if answer is not None else ())


class Program:
    """The options and operations of one number. `create` makes a table from options; `call` runs an op on one."""

    def __init__(self, number: int, create: Callable[[dict[str, Any]], Any], call: Call, rule: Any = None):
        self.random, self.create, self.call = random.Random(number), create, call
        self.answers = []  # pairs of a name and an array
        self.number, self.step, self.made, self.since = number, 0, 0, (0, 0)
        self.rule = rule or RULES[number % len(RULES)]
        self.dtype = self.pick([tf.float32, tf.float32, tf.float16, tf.bfloat16])
        self.dim = self.pick([1, 5, 5, 21])
        self.options = self._options()
        self.window = self.options.pop("window")
        self.table = self._new_table()

    def pick(self, values):
        return values[int(self.random.random() * len(values))]

    def below(self, bound):
        return int(self.random.random() * bound)

    def _options(self):
        each = lambda *values: [self.pick(values) for _ in range(SEGMENTS)]  # noqa: E731
        storage = ("float32", "bfloat16", "float16", "mixed")[self.number // len(RULES) % 4]
        distribution, a, b = self.pick(
            [("constant", 0.25, 0.0), ("uniform", -0.5, 0.5), ("normal", 0.1, 0.3), ("truncated_normal", 0.0, 0.1)]
        )
        options = {
            "dim": self.dim, "seeds": [11, -22], "distribution": distribution, "a": a, "b": b,
            "rule": self.rule.rule, "hyperparameters": list(self.rule.parameters.values()),
            "storage": "float32" if storage == "mixed" else storage,
            "stochastic_rounding": self.pick([False, True]) and storage != "float32",
            "unknown": self.pick(["initial", "zeros"]), "record_tombstones": self.pick([False, True]),
            "window": self.pick([1, 1, 2]), "averaged": storage != "mixed" and self.pick([False, True]),
            "hot_after": self.pick([2, 3]) if storage == "mixed" else 0,
            "max_rows": each(0, 0, 30, 44), "eviction": each("none", "lru", "lfu", "lru", "lfu"),
            "ttl": each(0, 0, 2, 4), "admission_count": each(1, 1, 2, 3),
            "max_candidates": each(0, 20), "frequency_decay_steps": each(0, 0, 2, 5),
        }  # fmt: skip
        if self.number >= ON_HOST:
            options.update(memory_budget=self.pick([1 << 13, 1 << 14]), hot_after=0, averaged=False)
        return options

    def _new_table(self):
        self.made += 1
        return self.create({"shared_name": f"golden/{id(self)}/{self.number}/{self.made}", **self.options})

    def kinds(self) -> list[Callable[[], None]]:
        kinds = [self.train, self.train, self.train_ahead, self.accumulate, self.late, self.read, self.leave, self.rest]
        return kinds + [self.average] * self.options["averaged"]

    def digest(self) -> str:
        return hashes.digest([array for _, array in self.answers])

    def run(self) -> None:
        kinds = self.kinds()
        for step in range(7):
            try:
                (self.pick(kinds) if step else self.train)()
            except ERRORS as error:
                self.add("error", type(error).__name__)
            if step % 2 == 0:
                self.state()

    # What other families of programs draw (tests/cuda/op_kernels_programs.py).

    def pick_refresh(self) -> Callable:
        return refresh

    def trains_all(self) -> bool:
        """Whether all ids of a lookup count as trained."""
        return True

    def more_left(self) -> list[int]:
        """Ids that left another replica."""
        return []

    def common(self, headers: np.ndarray) -> np.ndarray:
        """The largest clocks and counts of all replicas."""
        return headers

    # Parts of operations.

    def add(self, name, *values):
        self.answers += [(name, np.asarray(value)) for value in values]

    def run_op(self, op, *arguments, **static):
        return self.call(op, self.table, *arguments, **static)

    def batch(self):
        vocabulary, sources = self.pick([8, 30, 80]), 1 + self.below(3)
        ids = lambda: [self.below(vocabulary) - 2 for _ in range(self.below(18))]  # noqa: E731
        batch = [[ids() for _ in range(SEGMENTS)] for _ in range(sources)]
        if self.pick([False, True]):
            batch[0][0] += [-(2**63), 2**63 - 1, -(2**63)]
        return pack(batch)

    def numbers(self, *shape):
        values = [self.random.random() * 4 - 2 for _ in range(int(np.prod(shape)))]
        return np.array(values, np.float32).reshape(shape)

    def look_up(self, batch, *ahead):
        message, splits, received = batch
        if ahead:
            rows = self.run_op(self.pick_refresh(), message, splits, *ahead, window=self.window, dim=self.dim)
        else:
            op = self.pick([_look_up, _peek_and_touch])
            rows = self.run_op(op, message, splits, window=self.window, dim=self.dim, dtype=self.dtype)
        self.add_rows("lookup", rows.rows, received)
        self.add("absent", rows.handles[rows.inverse] < 0, len(rows.handles))
        if self.options["averaged"] and self.trains_all():
            self.run_op(ops.table_note_trained, message, splits)
        return rows, received

    def add_rows(self, name, rows, received):
        assert not rows[len(received) :].any(), "padding"
        self.add(name, rows[: len(received)])

    def gradients(self, received):
        grads = self.numbers(len(received) + self.below(2), self.dim)
        if received and self.below(4) == 0:
            grads[: 1 + self.below(len(received)), -1] = self.pick([np.nan, np.inf])
        return tf.cast(grads, self.dtype).numpy()

    def rate_and_step(self):
        self.step += 1
        rate = self.pick([0.0, 0.05, 0.05, 0.1])
        return np.float32(rate * self.rule.rate_scale).reshape(()), np.array(self.step, np.int64)

    def add_left_out(self, places, inverse):
        self.add("left out", [n for n, place in enumerate(inverse.tolist()) if place in {*places.tolist()}])

    def apply(self, rows, received):
        grads = self.gradients(received)
        places = self.run_op(apply_gradients, rows.handles, rows.inverse, grads, *self.rate_and_step())
        self.add_left_out(places, rows.inverse)

    # Operations.

    def train(self):
        self.apply(*self.look_up(self.batch()))

    def train_ahead(self):
        first, second = self.batch(), self.batch()
        found = self.look_up(first)
        ahead = self.run_op(ops.table_look_ahead, *second[:2], dim=self.dim, dtype=self.dtype)
        self.apply(*found)
        self.apply(*self.look_up(second, *ahead))

    def accumulate(self, lookups=0):
        for lookup in range(lookups or 1 + self.below(2)):
            rows, received = self.look_up(self.batch())
            grads, cut = self.gradients(received), self.below(len(received) + 1)
            for part, (begin, end) in enumerate(((0, cut), (cut, len(received)))):
                drops = np.array(lookup + part == 0)
                places = self.run_op(accumulate, rows.handles, rows.inverse[begin:end], grads[begin:], drops)
                self.add_left_out(places, rows.inverse)
        self.run_op(apply_accumulated, *self.rate_and_step())

    def late(self):
        """The first update follows the second lookup, which may have evicted its rows."""
        first, second = self.look_up(self.batch()), self.look_up(self.batch())
        self.apply(*first)
        self.apply(*second)

    def read(self):
        message, splits, received = self.batch()
        for window in (0, self.window):
            rows = self.run_op(ops.table_read, message, splits, window=window, dim=self.dim, dtype=self.dtype)
            self.add_rows("read", rows, received)
        self.run_op(ops.table_prefetch, message, splits)

    def leave(self):
        segment = self.below(SEGMENTS)
        gone = np.array([self.below(30) for _ in range(self.below(12))], np.int64)
        self.add("removed", self.run_op(ops.table_remove, segment, gone))
        self.add("evicted", self.run_op(ops.table_evict, segment, self.below(9)))

    def rest(self):
        self.pick([self.move, self.move, self.forget, self.clear])()

    def forget(self):
        self.run_op(ops.table_forget_tombstones)

    def clear(self):
        self.run_op(ops.table_clear)

    def move(self):
        """Moves rows, candidates and the clock to another table, like a checkpoint."""
        old, self.table = self.table, self._new_table()
        for segment in range(SEGMENTS):
            candidates = self.call(ops.table_candidates, old, segment)
            self.run_op(ops.table_import, segment, *self.records(old, segment))
            self.run_op(ops.table_import_candidates, segment, *candidates)
        self.run_op(ops.table_set_clock, self.call(ops.table_clock, old))

    def average(self, meanwhile=lambda: None):
        """Gives the table a common state made from its own and from numbers of its ids that another replica had.

        meanwhile: Runs between the read of the numbers and the merge.
        """
        message, headers = self.run_op(ops.table_take_unsynced)
        counts, ids = message[: 2 * SEGMENTS], message[2 * SEGMENTS :]
        ends = np.cumsum(counts)
        parts = [np.sort(ids[end - count : end]) for count, end in zip(counts, ends)]
        of_id = [
            dict(zip(ids[end - n : end].tolist(), headers[end - n : end].tolist())) for n, end in zip(counts, ends)
        ]
        both = [[*part.tolist(), *range(100, 103)] for part in parts[:SEGMENTS]]
        trained = np.array([i for part in both for i in part], np.int64)
        headers = np.array([of_id[s].get(i, 1 << 32 | 1) for s, part in enumerate(both) for i in part], np.int64)
        splits = np.cumsum([0, *map(len, both)], dtype=np.int64)
        left = [sorted({*part.tolist(), *self.more_left()} - {*ids}) for part, ids in zip(parts[SEGMENTS:], both)]
        left_splits = np.cumsum([0, *map(len, left)], dtype=np.int64)
        gone = np.array([i for part in left for i in part], np.int64)
        self.add("unsynced", *parts, headers)
        numbers = self.run_op(ops.table_read_numbers, trained, splits)[: len(trained)]
        self.add("numbers", numbers)
        meanwhile()
        merged = np.abs((numbers + self.numbers(*numbers.shape)) / np.float32(2))
        headers, step = self.common(headers), np.array(self.step, np.int64)
        self.run_op(merge, gone, left_splits, trained, splits, merged, headers, step)

    # State.

    def records(self, table, segment, since=(0, 0)):
        ids, handles = self.call(keys_since, table, np.array(segment), np.array(since))
        order = np.argsort(ids)
        return ids[order], self.call(ops.table_read_records, table, handles[order])

    def state(self):
        statistics = self.run_op(ops.table_statistics)
        self.add("statistics", statistics.segments, statistics.bytes[3:])
        since, self.since = self.since, self.run_op(ops.table_clock)
        self.add("clock", self.since)
        for segment in range(SEGMENTS):
            self.add("records", *self.records(self.table, segment))
            self.add("changes", *self.records(self.table, segment, since))
            self.add("tombstones", self.run_op(ops.table_tombstones, segment))
            self.add("candidates", *self.run_op(ops.table_candidates, segment))


def run_on_host(number: int, rule: Any = None, family: type[Program] = Program, device: str = "/CPU:0") -> Program:
    """Runs a program, or one with another rule or of another family, on a table in host memory or on a GPU."""
    tables = []
    with tempfile.TemporaryDirectory() as folder:

        def create(options):
            tier = {"tier_folder": folder} if number >= ON_HOST else {}
            with tf.device(device):
                tables.append(ops.hash_table(**arguments_of(**options, **tier)))
            return tables[-1]

        program = family(number, create, functools.partial(call_on, device), rule)
        program.run()
        for table in tables:
            ops.table_destroy(table)
    return program


def differing(numbers: Iterable[int], run: Callable[[int], Program] = run_on_host) -> list[int]:
    """Returns the numbers of the programs that answer other bits than those in tests/golden/tables.json."""
    golden = hashes.read("tables")
    return [number for number in numbers if run(number).digest() != golden[f"program {number}"]]


if __name__ == "__main__":
    hashes.write("tables", {f"program {number}": run_on_host(number).digest() for number in range(PROGRAMS)})
