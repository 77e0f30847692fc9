"""The contents of this project's own table outside a training step: statistics, removals, checkpoints, exports.

All methods are eager and see this rank's rows alone. A clock, statistics and tombstones are of all tables of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec import ops, optimizers
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.files.hash_order import mix64
from tf_fusedrec.tables import places
from tf_fusedrec.tables.table import StoredTable

_BATCH = 1 << 18  # rows per call when rows are restored
_VERSION_SHIFT = 32  # of `clock`


def _counters(clock: int) -> list[int]:
    """Returns the training lookups and the version of a `clock`."""
    return [clock & ((1 << _VERSION_SHIFT) - 1), clock >> _VERSION_SHIFT]


def _as_numbers(rows: np.ndarray) -> np.ndarray:
    """The rows of records, where bfloat16 travels as its bits."""
    return np.ascontiguousarray(rows).view(tf.bfloat16.as_numpy_dtype) if rows.dtype == np.uint16 else rows


class NativeContents(StoredTable):
    """The part of NativeTable (native.py) that reads and changes rows as records. NativeTable makes the handle.

    Args:
      tables: As for NativeTable.
      rule: The update rule of all tables, whose slots a record holds.

    Attributes:
      place: Where the rows lie.
      clears: Number of calls of `clear`, of which no tombstone and so no delta can tell.
    """

    _handle: tf.Tensor  # <resource>[], of the HashTable
    _seeds: list[int]  # of the initial rows, by table

    def __init__(self, tables: Sequence[TableConfig], rule: optimizers.Rule):
        spec = tables[0]
        self.place = places.place_of(spec)
        self.names = [table.name for table in tables]
        self.clears = 0
        self.replaced = 0
        self.records_tombstones = spec.record_tombstones
        self.left_out = {}
        self._dim = spec.dim
        self._dtype = tf.as_dtype(spec.dtype)
        self._storage = spec.storage_dtype or spec.dtype
        self._rule = rule
        self._initializer = spec.initializer
        self._with_admission = {table.name for table in tables if table.admission_count > 1}

    @property
    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by table: keys, hits (distinct rows that training lookups found), inserts, evictions, refused,
        candidates, left_out (rows that updates left unchanged, because their gradients were not finite).

        A table on a GPU with host_rows adds, since it was made: hot_hits (distinct rows of training lookups that were
        hot_rows), bytes_to_device and bytes_to_host (of rows, with slots and headers, that crossed the bus).
        """
        kinds = ("keys", "hits", "inserts", "evictions", "refused", "candidates", "left_out")
        of_traffic = ("hot_hits", "bytes_to_device", "bytes_to_host") if self.place is places.HOST_ROWS else ()
        counted = ops.table_statistics(self._handle)
        segments, traffic = counted.segments.numpy().tolist(), counted.traffic.numpy().tolist()
        return {
            name: {**dict(zip(kinds, [*row, self.left_out.get(name, 0)])), **dict(zip(of_traffic, its_traffic))}
            for name, row, its_traffic in zip(self.names, segments, traffic)
        }

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of keys and of both pools of rows, as mapped, and the number of rows in each pool."""
        kinds = ("key_bytes", "row_bytes", "second_row_bytes", "rows", "second_rows")
        return dict(zip(kinds, ops.table_statistics(self._handle).bytes.numpy().tolist()))

    def size(self, name: str) -> int:
        return int(ops.table_size(self._handle)[self.names.index(name)])

    def evict(self, name: str, count: int) -> int:
        """Evicts the `count` rows that the policy ranks lowest. Returns the number of evicted rows. Eager."""
        return int(ops.table_evict(self._handle, self.names.index(name), count))

    def remove(self, name: str, ids: np.ndarray) -> None:
        ops.table_remove(self._handle, self.names.index(name), tf.constant(ids, tf.int64))

    def clear(self) -> None:
        """Removes all rows, candidates, tombstones, statistics and waiting gradients. Eager."""
        ops.table_clear(self._handle)
        self.clears += 1
        self.replaced += 1
        self.left_out.clear()

    def sections_of(self, name: str) -> tuple[str, ...]:
        return ("rows", "candidates") if name in self._with_admission else ("rows",)

    def spec(self, name: str) -> dict[str, Any]:
        storage = "float32" if self._storage == "mixed" else self._storage
        slots = [*self._rule.wide_slots, *self._rule.scalar_slots]
        return {"dim": self._dim, "storage": storage, "optimizer": self._rule.spec, "slots": slots}

    def record_dtype(self, section: str) -> np.dtype:
        """Structured, packed: custom_ops/hash_table/cpu/parts/row_records.h; bfloat16 travels as its bits, <u2."""
        if section == "candidates":
            return np.dtype([("count", "<u4")])
        wide = self._storage in ("float32", "mixed")
        row = "<f4" if wide else "<f2" if self._storage == "float16" else "<u2"
        about = [(field, "<u4") for field in ("last", "count", "updated", "pool")]
        slots = [(slot, "<f4" if wide else "<u2", (self._dim,)) for slot in self._rule.wide_slots]
        return np.dtype([*about, ("row", row, (self._dim,)), *slots, *[(s, "<f4") for s in self._rule.scalar_slots]])

    def snapshot(
        self, name: str, section: str = "rows", since: int | None = None, *, in_hash_order: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        segment, dtype = self.names.index(name), self.record_dtype(section)
        if section == "candidates":
            ids, counts = ops.table_candidates(self._handle, segment)
            return ids.numpy(), counts.numpy().astype(dtype["count"]).view(dtype)
        ids, handles = ops.table_keys(self._handle, segment, since=_counters(since or 0))
        # The memory of the op's own answer: .numpy() would copy it once more.
        records = np.asarray(memoryview(ops.table_read_records(self._handle, handles))).view(dtype)[:, 0]
        ids = ids.numpy()
        order = np.argsort(mix64(ids)) if in_hash_order else slice(None)
        return ids[order], records[order]

    def sample(self, name: str, most: int, *, since: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns up to `most` rows [n, D] of a table that were looked up since a `clock`, and their initial rows."""
        segment = self.names.index(name)
        ids, handles = (x.numpy() for x in ops.table_keys(self._handle, segment, since=_counters(since)))
        chosen = np.random.default_rng(0).permutation(len(ids))[:most]
        read = ops.table_read_records(self._handle, tf.constant(handles[chosen]))
        rows = _as_numbers(np.asarray(memoryview(read)).view(self.record_dtype("rows"))[:, 0]["row"])
        with tf.device("cpu"):
            dtype = tf.as_dtype("float32" if self._storage == "mixed" else self._storage)
            initial = ops.initial_rows(
                tf.zeros([len(chosen), self._dim], dtype), tf.zeros([len(chosen)], tf.bool), tf.constant(ids[chosen]),
                tf.constant([0, len(chosen)], tf.int64), seeds=[self._seeds[segment]],
                distribution=self._initializer.distribution, a=self._initializer.a, b=self._initializer.b,
            )  # fmt: skip
        return rows.astype(np.float32), initial.numpy().astype(np.float32)

    def restore(self, name: str, section: str, ids: np.ndarray, records: np.ndarray) -> None:
        segment, ids = self.names.index(name), tf.constant(ids, tf.int64)
        self.replaced += 1
        if section == "candidates":
            counts = tf.constant(records["count"].astype(np.int64))
            ops.table_import_candidates(self._handle, segment, ids, counts)
            return
        size = records.dtype.itemsize
        for begin in range(0, len(records), _BATCH):
            part = np.ascontiguousarray(records[begin : begin + _BATCH]).view(np.uint8).reshape(-1, size)
            ops.table_import(self._handle, segment, ids[begin : begin + _BATCH], tf.constant(part))

    def new_records(self, name: str, n: int) -> np.ndarray:
        records = np.zeros(n, self.record_dtype("rows"))
        for slot, start in self._rule.slot_starts.items():
            narrow = records.dtype[slot].base == np.dtype("<u2")
            bits = np.array(start, tf.bfloat16.as_numpy_dtype).view(np.uint16)
            records[slot] = bits if narrow else start
        return records

    def tombstones(self, name: str) -> np.ndarray:
        return ops.table_tombstones(self._handle, self.names.index(name)).numpy()

    def forget_tombstones(self) -> None:
        """Begins a new record of tombstones, for all tables of the group. Eager."""
        ops.table_forget_tombstones(self._handle)

    @property
    def clock(self) -> int:
        """The table's counters in one number that only grows: version (number of changes) and training lookups."""
        lookups, version = ops.table_clock(self._handle).numpy().tolist()
        return version << _VERSION_SHIFT | lookups

    @clock.setter
    def clock(self, value: int) -> None:
        ops.table_set_clock(self._handle, tf.constant(_counters(value), tf.int64))

    def export(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        ids, records = self.snapshot(name)
        order = np.argsort(ids)
        return ids[order], _as_numbers(records["row"])[order].astype(self._dtype.as_numpy_dtype)
