"""Emulated tables of a GPU answer the bits of tables in host memory, in programs of tests/golden/tables.py.

Its own programs have their bits in a file. The families here run beside a table in host memory: with other calls
between a look-ahead and its lookup, with rows in host memory behind the device, and as replicas.
"""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.cuda.op_kernels import run_op
from tests.golden import hashes, tables
from tests.support.table_records import arguments_of
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.optimizers.rules import RULES

EVERY = 5  # every fifth program of the file: all rules and storages


def read_ahead_and_touch(table, message, splits, *ahead, window, dim):
    """The lookup of groups that share gradients, whose own rows were read ahead."""
    seen = ops.RowsAhead(*ahead)
    rows = ops.table_read(table, message, splits, seen, window=window, dim=dim, dtype=seen.rows.dtype)
    return ops.table_lookup(table, message, splits, with_rows=False, window=window, dim=dim)._replace(rows=rows)


class Disturbed(tables.Program):
    """Other calls come between a look-ahead and its lookup, and rows of a long ttl grow old."""

    def _options(self):
        return {**super()._options(), "ttl": [self.pick([0, 2, 64]) for _ in range(tables.SEGMENTS)]}

    def kinds(self):
        return [*super().kinds(), self.disturbed, self.disturbed, self.skip, self.count, self.accumulate_long]

    def pick_refresh(self):
        return self.pick([tables.refresh, read_ahead_and_touch])

    def disturbed(self):
        first, second = self.look_up(self.batch()), self.batch()
        ahead = self.look_ahead(second)
        if self.below(3):  # or a lookup that nobody trains
            self.apply(*first)
        self.pick([self.read, self.leave, self.set_back, self.look_at_another, self.clear])()
        self.apply(*self.look_up(second, *ahead))

    def look_ahead(self, batch):
        return self.run_op(ops.table_look_ahead, *batch[:2], dim=self.dim, dtype=self.dtype)

    def look_at_another(self):
        """A second look-ahead replaces the first, whose lookup then begins from the start."""
        self.look_ahead(self.batch())

    def set_back(self):
        """Gives rows the records of another id, with old versions."""
        ids, records = self.records(self.table, 0)
        self.run_op(ops.table_import, 0, ids, np.roll(records, 1, axis=0))

    def accumulate_long(self):
        self.accumulate(3)

    def count(self):
        """Sets counts for admission, as a load does. Some ids have one already, or come twice."""
        ids = np.array([self.below(30) for _ in range(self.below(9))], np.int64)
        counts = np.array([1 + self.below(2) for _ in ids], np.int64)
        self.run_op(ops.table_import_candidates, self.below(tables.SEGMENTS), ids, counts)

    def skip(self):
        """Sets the clock ahead, which ends the handles from before."""
        found = self.look_up(self.batch())
        self.run_op(ops.table_set_clock, self.run_op(ops.table_clock) + [self.below(40), 0])
        self.apply(*found)


class HostRows(Disturbed):
    """Rows lie in host memory, some of them in a pool on the device. A table in host memory ignores both options."""

    def _options(self):
        return {
            **super()._options(), "window": 1, "averaged": False, "hot_after": 0, "admission_count": 1,
            "host_rows": True, "hot_rows": self.pick([0, 1, 5, 8, 30, 500]),
        }  # fmt: skip

    def kinds(self):
        """Without updates that follow the next lookup: their rows have left the device."""
        later = [self.accumulate, self.accumulate_long, self.late]
        return [kind for kind in super().kinds() if kind not in later] + [lambda: self.accumulate(1)]


class Replicas(Disturbed):
    """Averages begin before an update and end after it, and some ids are looked up without training."""

    def _options(self):
        return {**super()._options(), "window": 2, "averaged": True, "hot_after": 0, "admission_count": 1}

    def kinds(self):
        return [self.train, self.late, self.average_late, self.average_late, self.disturbed, self.leave]

    def trains_all(self):
        return self.below(3) > 0

    def more_left(self):
        return [self.below(30) for _ in range(3)]

    def common(self, headers):
        clock = self.run_op(ops.table_clock)[0]
        last = [min(clock, max(1, (header >> 32) + self.pick([0, 0, 1, -1]))) for header in headers.tolist()]
        count = [(header & 0xFFFFFFFF) + self.pick([0, 0, 1, 3]) for header in headers.tolist()]
        return np.array(last, np.int64) << 32 | np.array(count, np.int64)

    def average_late(self):
        first, second = self.look_up(self.batch()), self.look_up(self.batch())
        self.average(lambda: self.apply(*first))
        self.apply(*second)


def call(op, *arguments, **static):
    answer = run_op(True, op, arguments, **static)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), answer)


def run_on_device(number: int, rule: Any = None, family: Any = tables.Program) -> tables.Program:
    with tempfile.TemporaryDirectory() as folder:

        def create(options):
            tier = {"tier_folder": folder} if number >= tables.ON_HOST else {}
            return run_op(True, ops.hash_table, (), **arguments_of(anonymous=True, **options, **tier))

        program = family(number, create, call, rule)
        program.run()
    return program


def from_file(number: int) -> None:
    found, recorded = run_on_device(number).digest(), hashes.read("tables")[f"program {number}"]
    assert found == recorded, f"bits of program {number} differ from those of a table in host memory"


def compare(host: tables.Program, device: tables.Program) -> None:
    for wanted, got in itertools.zip_longest(host.answers, device.answers):
        same = wanted[0] == got[0] and hashes.digest(wanted[1:]) == hashes.digest(got[1:])
        assert same, f"{type(host).__name__} {host.number}: {wanted[0]} {wanted[1]}, on a device {got}"


def beside_host(number: int, family: Any, rule: Any = None) -> None:
    compare(*(run(number, rule, family) for run in (tables.run_on_host, run_on_device)))


def programs() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the names of programs and functions that run them."""
    for number in range(0, tables.ON_HOST, EVERY):
        yield f"program {number}", lambda number=number: from_file(number)
    for family, numbers in ((Disturbed, range(0, 160, 9)), (HostRows, range(3, 200, 7)), (Replicas, range(1, 160, 9))):
        for number in numbers:
            yield f"{family.__name__} {number}", lambda number=number, family=family: beside_host(number, family)
    for number, (name, record) in enumerate(RULES.items()):
        yield name, lambda n=number, r=record: beside_host(13 * n, tables.Program, r(0.1))


def run(library: ctypes.CDLL, only: str = "") -> None:
    """Runs programs whose names begin with `only`, each under another schedule of threads."""
    schedule = lambda workers, preempt, seed: library.emulation_options(  # noqa: E731
        ctypes.c_int(workers), ctypes.c_double(preempt), ctypes.c_uint64(seed)
    )
    for seed, (name, program) in enumerate(programs()):
        if name.startswith(only):
            schedule(1 + seed % 2, seed % 3 * 0.15, seed)
            program()
            print(f"{name} agrees", flush=True)
    schedule(1, 0.0, 0)
