"""Drives a table on a device as one of several replicas that are averaged."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.cuda.device_table import DeviceTable

_ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *(ctypes.POINTER(ctypes.c_void_p),) * 2
)


class UnsyncedSink(ctypes.Structure):
    """FusedrecUnsyncedSink."""

    _fields_ = [("context", ctypes.c_void_p), ("allocate", _ALLOCATE)]


class Merge(ctypes.Structure):
    """FusedrecMerge."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("left", "left_splits", "ids", "id_splits", "numbers", "headers")),
        ("step", ctypes.c_int64),
    ]


class ReplicaTable(DeviceTable):
    """A DeviceTable with `averaged`."""

    def note_trained(self, entries, splits):
        device, splits, message = self.message(entries, splits)
        self._call("table_note_trained", message)

    def take_unsynced(self):
        """Returns (counts [2 * segments], ids [n], headers [n])."""
        given = []

        def allocate(_, entries, ids, message, headers):
            given.extend(self.memory.empty([n], np.int64) for n in (entries, ids))
            for at, array in zip((message, headers), given):
                at[0] = self.memory.pointer(array).value
            return 0

        self._call("table_take_unsynced", UnsyncedSink(None, _ALLOCATE(allocate)))
        message, headers = (self.memory.get(array) for array in given)
        return np.split(message, [2 * self.segments]) + [headers]

    def width(self):
        return self.kernels.count("table_width", self.handle)

    def read_numbers(self, ids, splits, padding=3):
        numbers = self.memory.empty([len(ids) + padding, self.width()], np.float32)
        host = np.asarray(splits, np.int64)
        device = self.memory.put(np.asarray(ids, np.int64))
        self._call("table_read_numbers", device, ctypes.c_void_p(host.ctypes.data), numbers, len(ids) + padding)
        return self.memory.get(numbers)

    def merge(self, left, left_splits, ids, id_splits, numbers, headers, step=1):
        hosts = [np.asarray(splits, np.int64) for splits in (left_splits, id_splits)]
        devices = [self.memory.put(np.asarray(x, np.int64)) for x in (left, ids, headers)]
        devices.append(self.memory.put(np.asarray(numbers, np.float32)))
        at = [self.memory.pointer(array).value for array in devices]
        self._call("table_merge", Merge(at[0], hosts[0].ctypes.data, at[1], hosts[1].ctypes.data, at[3], at[2], step))
