"""Rows in host memory behind two buffers on a device (device_buffer_cuda.h), driven through ctypes."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.cuda.device_table import DeviceTable


class DeviceBuffer(DeviceTable):
    """Lookups and updates are those of the active buffer.

    Args:
      capacity: rows of each of the two.
      others: of DeviceTable.
    """

    def __init__(self, kernels, capacity, dim, seeds, *others, **more):
        self.capacity = capacity
        super().__init__(kernels, dim, seeds, *others, **more)

    def _create(self, spec):
        self.buffer = ctypes.c_void_p()
        pointer = ctypes.byref(self.buffer)
        self._call("buffer_create", spec, self.capacity, self.allocator, pointer, table=False)
        self._take_active()

    def _take_active(self):
        function = self.kernels.library.fusedrec_buffer_active
        function.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(function(self.buffer))

    def close(self):
        self.kernels.library.fusedrec_buffer_destroy(self.buffer)

    def _of_buffer(self, name, *arguments):
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in arguments]
        self._call(f"buffer_{name}", self.buffer, *pointers, table=False)

    def prefetch(self, ids, segment_splits, records):
        """ids [n], segment_splits [S + 1], records [n, record_bytes] in host memory."""
        self._of_buffer("prefetch", ids, segment_splits, records)

    def advance(self):
        """Rows that both buffers held."""
        shared = np.zeros(1, np.int64)
        self._of_buffer("advance", shared)
        self._take_active()
        return int(shared[0])

    def write_back(self, records=None):
        """Records of the batch before, in the order of its ids; into `records`, if they are given."""
        records = np.zeros([self.rows()[1], self.record_bytes()], np.uint8) if records is None else records
        self._of_buffer("write_back", records)
        return records

    def rows(self):
        """Rows that are active, that wait to be written back, that were prefetched."""
        rows = np.zeros(3, np.int64)
        self.kernels.library.fusedrec_buffer_rows(self.buffer, ctypes.c_void_p(rows.ctypes.data))
        return rows.tolist()
