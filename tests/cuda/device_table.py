"""Drives the table on a device through ctypes, for checks over the emulation, tests on a GPU and benchmarks."""

from __future__ import annotations

import ctypes
import json

import numpy as np

from tests.cuda.memory import Allocator
from tests.support.table_records import PATHS, records_of

STORAGES = {"float32": 0, "bfloat16": 1, "float16": 2}
NOWHERE = 0xFFFFFFFF
INVALID, OUT_OF_MEMORY, FULL, STALE, BAD_HANDLE, BAD_INVERSE, ABSENT, NOT_WRITTEN, WAITING = 1, 2, *range(-1, -8, -1)
TOTALS = (  # fields of FusedrecTableTotals
    "clock", "version", "record_bytes", "width", "full_segment", "line_bytes", "chunk_bytes", "cold_bytes", "cold_rows",
)  # fmt: skip


class IdSink(ctypes.Structure):
    """FusedrecIdSink. Collects what it takes."""

    _fields_ = [
        ("context", ctypes.c_void_p),
        ("take", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]

    def __init__(self):
        super().__init__(None, dict(self._fields_)["take"](self._take))

    def _take(self, _, ids, numbers, count):
        listed = lambda at: (ctypes.c_int64 * count).from_address(at)[:] if at and count else []  # noqa: E731
        self.ids, self.numbers = listed(ids), listed(numbers)


class Texts(ctypes.Structure):
    """FusedrecTableTexts."""

    _fields_ = [
        ("texts", ctypes.POINTER(ctypes.c_char_p)),
        ("segments", ctypes.c_int64),
        ("chunk_rows", ctypes.c_int64),
    ]


class Step(ctypes.Structure):
    """Step of rules/rule.h."""

    _fields_ = [("learning_rate", ctypes.c_float), ("number", ctypes.c_int64)]


class Message(ctypes.Structure):
    """FusedrecMessage."""

    _fields_ = [("entries", ctypes.c_void_p), ("received_splits", ctypes.c_void_p), ("ranks", ctypes.c_int64),
                ("fingerprint", ctypes.c_uint64)]  # fmt: skip


class Gradients(ctypes.Structure):
    """FusedrecGradients."""

    _fields_ = [("handles", ctypes.c_void_p), ("num_rows", ctypes.c_int64), ("inverse", ctypes.c_void_p),
                ("num_ids", ctypes.c_int64), ("grads", ctypes.c_void_p), ("storage", ctypes.c_int64),
                ("scale", ctypes.c_float)]  # fmt: skip


class Refused(Exception):
    """A call returned another code than 0."""


def answer_of(call, *arguments, **more):
    """Returns the library's code for a refused call."""
    try:
        call(*arguments, **more)
    except Refused as refused:
        return refused.args[0]
    return 0


class DeviceTable:
    """Drives a table of `dim` columns with one segment per seed.

    Args:
      kernels: tests.cuda.memory.Kernels.
      rule: Name.
      more: chunk_rows, window of lookups, parameters of rules, and options of tests.support.table_records.
    """

    def __init__(self, kernels, dim, seeds, storage="float32", distribution="constant", rule="sgd", **more):
        self.kernels, self.memory, self.dim, self.storage = kernels, kernels.memory, dim, storage
        self.allocations_left = None  # None: no limit but memory
        self.segments = len(seeds)
        chunk_rows, self.window = more.pop("chunk_rows", 64), more.pop("window", 1)
        options = {name if name in PATHS else f"rule.{name}": value for name, value in more.items()}
        records = records_of(dim, seeds, storage=storage, distribution=distribution, rule=rule, **options)
        texts = (ctypes.c_char_p * len(records))(*(json.dumps(record).encode() for record in records))
        spec = Texts(texts=texts, segments=len(records), chunk_rows=chunk_rows)
        self.allocator = Allocator(self._allocate, self._release)
        self.handle = ctypes.c_void_p()
        self._create(spec)

    def _create(self, spec):
        self._call("table_create", spec, self.allocator, ctypes.byref(self.handle), table=False)

    def close(self):
        self.kernels.library.fusedrec_table_destroy(self.handle)

    def _allocate(self, _, bytes_):
        if self.allocations_left is not None:
            if self.allocations_left == 0:
                return None
            self.allocations_left -= 1
        return self.memory.allocate(bytes_)

    def _release(self, _, address):
        self.memory.release(address)

    def _call(self, name, *arguments, table=True):
        code = self.kernels.answer(name, *((self.handle,) if table else ()), *arguments)
        if code != 0:
            raise Refused(code)

    def message(self, entries, splits):
        """Returns the entries on the device, host splits, and the structure that points to both. Keep all three."""
        device, splits = self.memory.put(np.asarray(entries, np.int64)), np.asarray(splits, np.int32)
        return device, splits, Message(self.memory.pointer(device).value, splits.ctypes.data, len(splits))

    def lookup(self, entries, splits, to="float32", padding=3):
        """Returns (rows [V + padding, D] in their storage, inverse [V], handles [W])."""
        rows, inverse, handles, distinct = self.begin_lookup(entries, splits, to, padding)
        get = self.memory.get
        return get(rows), get(inverse), get(handles)[:distinct]

    def begin_lookup(self, entries, splits, to="float32", padding=3):
        """Returns the arrays of a lookup on the device, which may still fill them, and W."""
        device, splits, message = self.message(entries, splits)
        num_ids = max(len(entries) - len(splits) * self.segments, 0)
        rows = self.memory.empty([num_ids + padding, self.dim], np.float32 if to == "float32" else np.uint16)
        inverse, handles = self.memory.empty([num_ids], np.int32), self.memory.empty([num_ids], np.int64)
        distinct = np.zeros(1, np.int64)
        host = distinct.ctypes.data_as(ctypes.c_void_p)
        self._call("table_lookup", message, self.window, STORAGES[to], rows, num_ids + padding, inverse, handles, host)
        return rows, inverse, handles, int(distinct[0])

    def find(self, entries, splits, to="float32", padding=3):
        """Returns (rows [V + padding, D], row number of each id [V], NOWHERE without a row)."""
        device, splits, message = self.message(entries, splits)
        num_ids = max(len(entries) - len(splits) * self.segments, 0)
        rows = self.memory.empty([num_ids + padding, self.dim], np.float32 if to == "float32" else np.uint16)
        found = self.memory.empty([num_ids], np.uint32)
        self._call("table_find", message, 0, STORAGES[to], rows, num_ids + padding, found)
        return self.memory.get(rows), self.memory.get(found)

    def peek(self, entries, splits, to="float32"):
        """Returns the rows [V, D] that the next lookup would answer."""
        device, splits, message = self.message(entries, splits)
        num_ids = max(len(entries) - len(splits) * self.segments, 0)
        rows = self.memory.empty([num_ids, self.dim], np.float32 if to == "float32" else np.uint16)
        self._call("table_find", message, self.window, STORAGES[to], rows, num_ids, None)
        return self.memory.get(rows)

    def gradients(self, handles, inverse, grads, num_rows, num_ids, storage="float32", scale=1.0):
        """Returns the structure that points to these arrays on the device. Keep them, too."""
        at = [self.memory.pointer(array).value for array in (handles, inverse, grads)]
        return Gradients(at[0], num_rows, at[1], num_ids, at[2], STORAGES[storage], scale)

    def apply(self, handles, inverse, grads, *, learning_rate=1.0, step=1, scale=1.0, storage="float32"):
        """Trains with grads [>= V, D] of the lookup that gave handles and inverse. Returns the places left out."""
        arrays = [self.memory.put(array) for array in (handles, inverse, grads)]
        gradients = self.gradients(*arrays, len(handles), len(inverse), storage, scale)
        places, count = self.memory.empty([len(handles)], np.int32), np.zeros(1, np.int64)
        host = count.ctypes.data_as(ctypes.c_void_p)
        self._call("table_apply", gradients, Step(learning_rate, step), places, host)
        return sorted(self.memory.get(places)[: count[0]].tolist())

    def _count(self, name, *arguments):
        counted = np.zeros(1, np.int64)
        self._call(f"table_{name}", *arguments, counted.ctypes.data_as(ctypes.c_void_p))
        return int(counted[0])

    def evict(self, segment, count):
        return self._count("evict", segment, count)

    def remove(self, segment, ids):
        return self._count("remove", segment, self.memory.put(np.asarray(ids, np.int64)), len(ids))

    def tombstones(self, segment):
        sink = IdSink()
        self._call("table_tombstones", segment, sink)
        return sink.ids

    def forget_tombstones(self):
        self.kernels.library.fusedrec_table_forget_tombstones(self.handle)

    def candidates(self, segment):
        """Returns [(id, count)] in the order of checkpoints."""
        sink = IdSink()
        self._call("table_candidates", segment, sink)
        return list(zip(sink.ids, sink.numbers))

    def export(self, segment, since=(0, 0)):
        """Returns (ids [n], records [n, record_bytes]), in the order of rows."""
        most = int(self.size()[0][segment])
        ids, handles = self.memory.empty([most], np.int64), self.memory.empty([most], np.int64)
        count = self._count("keys", segment, *since, most, ids, handles)
        records = self.read_records(self.memory.get(handles)[:count])
        return self.memory.get(ids)[:count], records

    def read_records(self, handles):
        records = self.memory.empty([len(handles), self.record_bytes()], np.uint8)
        self._call("table_read_records", self.memory.put(handles), len(handles), records)
        return self.memory.get(records)

    def record_bytes(self):
        return self.size()[1]["record_bytes"]

    def set_clock(self, clock, version):
        numbers = [ctypes.c_int64(x) for x in (clock, version)]
        self.kernels.library.fusedrec_table_set_clock(self.handle, *numbers)

    def clear(self):
        self._call("table_clear")

    def statistics(self):
        """Returns [segments, 5]: hits, inserts, evictions, refused, candidates."""
        return self._counts()[0][:, 1:].tolist()

    def size(self):
        """Returns (ids by segment, the fields of FusedrecTableTotals)."""
        counts, totals = self._counts()
        return counts[:, 0], dict(zip(TOTALS, totals.tolist()))

    def _counts(self):
        counts, totals = np.zeros([self.segments, 6], np.int64), np.zeros(len(TOTALS), np.int64)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (counts, totals)]
        self.kernels.library.fusedrec_table_statistics(self.handle, *pointers)
        return counts, totals
