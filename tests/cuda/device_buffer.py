"""Drives rows in host memory behind two device buffers (buffer_cuda.h) through ctypes."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.cuda.device_table import DeviceTable, Refused


class HotRows(ctypes.Structure):
    """FusedrecHotRows."""

    _fields_ = [("ids", ctypes.c_void_p), ("segment_splits", ctypes.c_void_p), ("slots", ctypes.c_void_p)]


class PoolMoves(ctypes.Structure):
    """FusedrecPoolMoves."""

    _fields_ = [(name, ctypes.c_int64) for name in ("numbers", "leaving", "kept", "dropped")]

    def __init__(self, leaving, kept, slots, dropped):
        self.array = np.array([*leaving, *kept, *slots, *dropped, 0], np.int64)
        super().__init__(self.array.ctypes.data, len(leaving), len(kept), len(dropped))


class DeviceBuffer(DeviceTable):
    """Looks up and updates rows of the active buffer.

    Takes the arguments of DeviceTable; hot_rows is the number of slots of the pool.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, host_rows=True, **options)

    def _create(self, spec):
        self.buffer = ctypes.c_void_p()
        pointer = ctypes.byref(self.buffer)
        self._call("buffer_create", spec, self.allocator, pointer, table=False)
        self._take_active()

    def _take_active(self):
        function = self.kernels.library.fusedrec_buffer_active
        function.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(function(self.buffer))

    def close(self):
        self.kernels.library.fusedrec_buffer_destroy(self.buffer)

    def _of_buffer(self, name, *arguments):
        pointer = lambda given: ctypes.c_void_p(given.ctypes.data) if isinstance(given, np.ndarray) else given  # noqa: E731
        self._call(f"buffer_{name}", self.buffer, *map(pointer, arguments), table=False)

    def pinned(self, records):
        """Returns the address of a copy of `records` in page-locked memory, which a copy to the device reads late."""
        at = self.host_memory(records.nbytes)
        ctypes.memmove(at, records.ctypes.data, records.nbytes)
        return ctypes.c_void_p(at)

    def prefetch(self, ids, segment_splits, records, hot=None):
        """Prefetches ids [n] with segment_splits [S + 1] and records [n, record_bytes], or their address from `pinned`.

        hot: ids [m], segment_splits [S + 1] and slots [m] of rows of the pool.
        """
        in_pool = None if hot is None else HotRows(*(array.ctypes.data for array in hot))
        self._of_buffer("prefetch", False, ids, segment_splits, records, in_pool)

    def prefetch_more(self, ids, segment_splits, records):
        """Prefetches further rows of the batch of the last prefetch."""
        self._of_buffer("prefetch", True, ids, segment_splits, records, None)

    def advance(self, late=(None, None, None), moves=None):
        """Begins the next batch.

        late: ids, splits, records of rows that were not prefetched or have changed. moves: PoolMoves.
        """
        self._of_buffer("advance", *late, moves)
        self._take_active()

    def _returned(self, count, name, *arguments):
        """Returns a copy of `count` records, of which a function of the buffer gives the address."""
        address = ctypes.c_void_p()
        self._of_buffer(name, *arguments, ctypes.byref(address))
        size = count * self.record_bytes()
        bytes_ = ctypes.string_at(address, size) if size > 0 else b""
        return np.frombuffer(bytes_, np.uint8).reshape(count, -1 if count > 0 else self.record_bytes())

    def write_back(self):
        """Returns the records of the previous batch, in the order of its ids."""
        return self._returned(self.rows()[1], "write_back")

    def wait_back(self):
        """Waits for the records of the previous batch."""
        self._of_buffer("write_back", ctypes.byref(ctypes.c_void_p()))

    def read_active(self):
        """Returns the records of the current batch, in the order of its ids."""
        return self._returned(self.rows()[0], "read_active")

    def read_hot(self, slots):
        """Returns the records of slots."""
        slots = np.array(slots, np.int64)
        return self._returned(len(slots), "read_hot", slots, len(slots))

    def drop(self):
        self._of_buffer("drop")

    def host_memory(self, size):
        """Returns the address of page-locked memory of this size, when the copies from it have ended."""
        memory, function = ctypes.c_void_p(), self.kernels.library.fusedrec_buffer_host_memory
        code = function(self.buffer, ctypes.c_int64(size), ctypes.byref(memory))
        if code != 0:
            raise Refused(code)
        return memory.value

    def rows(self):
        """Returns the numbers of active rows, of rows to be written back, and of prefetched rows."""
        rows = np.zeros(3, np.int64)
        self.kernels.library.fusedrec_buffer_rows(self.buffer, ctypes.c_void_p(rows.ctypes.data))
        return rows.tolist()
