"""Step 5 of 7 (docs/concepts.md): stores and trains rows in this project's own table (custom_ops/hash_table).

A training lookup is one op. It makes keys of (table, id), removes duplicates over sources, finds or inserts rows, and
returns them in the order received. Its handles save the update a second search.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.files.hash_order import mix64, table_seed
from tf_fusedrec.files.manifest import pack_clock, unpack_clock
from tf_fusedrec.optimizers.keras_counterparts import resolve
from tf_fusedrec.optimizers.trainer import Trainer
from tf_fusedrec.tables import places
from tf_fusedrec.tables.records import numbers, put_numbers
from tf_fusedrec.tables.table import LeftOutRows, Message, Table

_BATCH = 1 << 18  # rows per call when rows are restored


class NativeTable(Table):
    """The tables of one group in one HashTable resource.

    Args:
      name: Name of the resource, for messages.
      tables: Tables of equal spec, each with its limits. Table s is segment s.
      seed: Seed of the initial rows.
      accumulate_steps: Number of steps that make one update (MTGRBoost, section 5.2).
      average: True if an update takes the mean over those steps; else their sum.
      averaged: True if replicas of this table train apart and are averaged from time to time.
      moment_scale: moment_scale of the optimizer, unless its record has one other than 1.

    Attributes:
      place: Where the rows are.
      clears: Number of calls of `clear`, which leaves no tombstones and so cannot be in a delta.

    Raises:
      ValueError: the place does not have one of the options, or averaged tables do not.
    """

    owner = "hash_range"
    id_bits = 64  # any int64 is an id

    def __init__(
        self,
        name: str,
        tables: Sequence[TableConfig],
        *,
        seed: int,
        accumulate_steps: int = 1,
        average: bool = True,
        averaged: bool = False,
        moment_scale: float = 1.0,
    ):
        spec = tables[0]
        self.place = places.place_of(spec)
        seeds = [table_seed(seed, table.name) for table in tables]
        records = [table.record(seed=s, averaged=averaged) for s, table in zip(seeds, tables)]
        places.check(self.place, records, accumulate_steps=accumulate_steps)
        self.names = [table.name for table in tables]
        self.left_out = {}
        self.clears = 0
        self.records_tombstones = spec.record_tombstones
        self.prefetches = spec.tier.memory_budget_per_rank > 0
        self.ids_on_host = self.place.ids_on_host
        self._rule = resolve(spec.optimizer).with_moment_scale(moment_scale)
        self.optimizer = Trainer(self._rule, name=name)
        self._dim, self._dtype = spec.dim, tf.as_dtype(spec.dtype)
        self._storage = spec.storage.dtype or spec.dtype
        self._initializer = spec.initializer
        self._with_admission = {table.name for table in tables if table.limits.admission_count > 1}
        self._accumulate_steps, self._average = accumulate_steps, average
        self._waiting = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{name}/waiting")
        self._seeds = seeds
        self._handle = ops.hash_table(
            shared_name=f"fusedrec/{name}/{uuid.uuid4().hex}",
            tables=[{**record, **self._rule.record()} for record in records],
        )
        weakref.finalize(self, ops.table_destroy, self._handle)

    def lookup(
        self,
        request: Message,
        ahead: ops.RowsAhead | None = None,
        *,
        sums: ops.RowSums | None = None,
        with_rows: bool = True,
        lookups_per_update: int = 1,
    ) -> ops.TableRows:
        if with_rows and ahead is None and self.ids_on_host:
            ahead = self.look_ahead(request)  # takes ids where they are; a lookup without it would copy them back
        return ops.table_lookup(
            self._handle, *request, ahead, sums=sums, with_rows=with_rows, window=lookups_per_update, dim=self._dim,
            dtype=self._dtype,
        )  # fmt: skip

    def read(self, request: Message, ahead: ops.RowsAhead | None = None, *, lookups_per_update: int = 0) -> tf.Tensor:
        return ops.table_read(
            self._handle, *request, ahead, window=lookups_per_update, dim=self._dim, dtype=self._dtype
        )

    def look_ahead(self, request: Message) -> ops.RowsAhead:
        if self.place is places.DEVICE:  # it reads nothing ahead, and its ids are on the device
            return ops.RowsAhead.none(self._dim, self._dtype)
        return ops.table_look_ahead(self._handle, *request, dim=self._dim, dtype=self._dtype)

    def prefetch(self, request: Message) -> None:
        ops.table_prefetch(self._handle, *request)

    def check_deferrable(self, steps: int) -> None:
        cause = f"The lookups of {steps} steps come before the update of the first."
        self._check_lookups(steps, cause, "a schedule whose rows are fresh, such as DualBuffer()")

    def check_calls(self, calls: int) -> None:
        cause = f"Their FusedEmbedding was called {calls} times in one training step."
        self._check_lookups(calls, cause, "one call with all features of a step")

    def _check_lookups(self, lookups: int, cause: str, remedy: str) -> None:
        most = self.place.lookups_per_update
        if most is not None and lookups > most:
            raise ValueError(
                f"tables {self.names} have host_rows on a GPU, which holds the rows of one lookup. {cause} Use "
                f"{remedy}, or make the layer under tf.device('/CPU:0')."
            )

    def update(
        self,
        parts: Sequence[tuple[ops.TableRows, tf.Tensor, ops.RowSums | None]],
        scale: float,
        checks: Sequence[tf.Operation] = (),
        *,
        as_they_come: bool = False,
    ) -> LeftOutRows:
        update = self.optimizer.iterations.read_value() + 1
        inverses, gradients = [answer.inverse for answer, _, _ in parts], [grads for _, grads, _ in parts]
        as_they_come = as_they_come and self.place is places.CPU
        if self._accumulate_steps == 1 and (len(parts) == 1 or as_they_come):
            rate, step = self.optimizer.current()
            left_out = []
            for i, part in enumerate(parts):
                # TensorFlow runs checks in program order, so these run after checks of the last micro-batch.
                with tf.control_dependencies([*checks, *gradients] if i == len(parts) - 1 else []):
                    applied = ops.table_apply_gradients(
                        self._handle, *part, scale=scale, learning_rate=rate, step=step, coming=inverses[i + 1 :],
                        begin=i == 0,
                    )  # fmt: skip
                left_out.append(applied)
            with tf.control_dependencies(left_out):
                self.optimizer.count()
            return LeftOutRows(left_out, inverses, update)
        share = scale / self._accumulate_steps if self._average else scale
        # Gradients are summed when they arrive. TensorFlow runs checks in program order, so these run after checks of
        # the last micro-batch. Only the update waits for them. If it is not made, the next step drops the sums. Sums
        # that hold gradients of earlier steps are not dropped: such a step adds all of its gradients or none.
        drops = self._accumulate_steps == 1
        with tf.control_dependencies([] if drops else [*checks, *gradients]):
            left_out = [
                ops.table_accumulate_gradients(self._handle, *part, scale=share, begin=drops and i == 0)
                for i, part in enumerate(parts)
            ]
        with tf.control_dependencies([*checks, *left_out]):
            if drops:
                self._update()
            else:
                waiting = self._waiting.assign_add(1)
                tf.cond(tf.equal(waiting, self._accumulate_steps), self._update, lambda: None)
        return LeftOutRows(left_out, inverses, update)

    def _update(self) -> None:
        rate, step = self.optimizer.current()
        ops.table_apply_accumulated(self._handle, learning_rate=rate, step=step)
        self.optimizer.count()
        self._waiting.assign(0)

    # For replicas.py, which averages tables.

    def note_trained(self, message: tf.Tensor, splits: tf.Tensor) -> None:
        """Notes that rows of the ids of a lookup have been trained."""
        ops.table_note_trained(self._handle, message, splits)

    def updates_make_a_multiple_of(self, steps: int) -> tf.Tensor:
        """<bool>[], whether the last call made the n-th update, for a multiple n of `steps`."""
        return tf.equal(self._waiting, 0) & tf.equal(self.optimizer.iterations % steps, 0)

    def take_unsynced(self) -> ops.Unsynced:
        """The changes of this replica since the last call."""
        return ops.table_take_unsynced(self._handle)

    def read_numbers(self, ids: tf.Tensor, segment_splits: tf.Tensor) -> tf.Tensor:
        """Rows and slots of ids, as ops.table_read_numbers."""
        return ops.table_read_numbers(self._handle, ids, segment_splits)

    @property
    def second_moments(self) -> np.ndarray:
        """<bool>[k], True at numbers that are second moments which decay, Adam's v. They are never negative."""
        wide = np.repeat([slot == "v" for slot in ("row", *self._rule.wide_slots)], self._dim)
        return np.concatenate([wide, [slot == "v" for slot in self._rule.scalar_slots]]).astype(bool)

    def merge(self, **what: tf.Tensor) -> None:
        """Gives this replica the merged rows, as ops.table_merge."""
        ops.table_merge(self._handle, **what, step=self.optimizer.iterations.read_value())

    # Contents. Eager.

    @property
    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by table, see FusedEmbedding.statistics."""
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

    @property
    def _stored_dtype(self) -> str:
        return "float32" if self._storage == "mixed" else self._storage

    def size(self, name: str) -> int:
        return int(ops.table_statistics(self._handle).segments[self.names.index(name), 0])

    def evict(self, name: str, count: int) -> int:
        """Evicts the `count` rows that the policy ranks lowest. Returns the number of evicted rows. Eager."""
        return int(ops.table_evict(self._handle, self.names.index(name), count))

    def remove(self, name: str, ids: np.ndarray) -> None:
        ops.table_remove(self._handle, self.names.index(name), tf.constant(ids, tf.int64))

    def clear(self) -> None:
        """Removes all rows, candidates, tombstones, statistics and waiting gradients. Eager."""
        ops.table_clear(self._handle)
        self._waiting.assign(0)
        self.clears += 1
        self.replaced += 1
        self.left_out.clear()

    def sections_of(self, name: str) -> tuple[str, ...]:
        return ("rows", "candidates") if name in self._with_admission else ("rows",)

    def spec(self, name: str) -> dict[str, Any]:
        slots = [*self._rule.wide_slots, *self._rule.scalar_slots]
        return {"dim": self._dim, "storage": self._stored_dtype, "optimizer": self._rule.spec, "slots": slots}

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
        ids, handles = ops.table_keys(self._handle, segment, since=unpack_clock(since or 0)[::-1])
        # The memory of the op's own answer: .numpy() would copy it once more.
        records = np.asarray(memoryview(ops.table_read_records(self._handle, handles))).view(dtype)[:, 0]
        ids = ids.numpy()
        order = np.argsort(mix64(ids)) if in_hash_order else slice(None)
        return ids[order], records[order]

    def sample(self, name: str, most: int, *, since: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns up to `most` rows [n, D] of a table that were looked up since a `clock`, and their initial rows."""
        segment = self.names.index(name)
        ids, handles = (x.numpy() for x in ops.table_keys(self._handle, segment, since=unpack_clock(since)[::-1]))
        chosen = np.random.default_rng(0).permutation(len(ids))[:most]
        read = ops.table_read_records(self._handle, tf.constant(handles[chosen]))
        rows = numbers(np.asarray(memoryview(read)).view(self.record_dtype("rows"))[:, 0]["row"])
        with tf.device("cpu"):
            initial = ops.initial_rows(
                tf.zeros([len(chosen), self._dim], self._stored_dtype), tf.zeros([len(chosen)], tf.bool),
                tf.constant(ids[chosen]),
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
            put_numbers(records, slot, start)
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
        return pack_clock(version, lookups)

    @clock.setter
    def clock(self, value: int) -> None:
        ops.table_set_clock(self._handle, tf.constant(unpack_clock(value)[::-1], tf.int64))

    def export(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        ids, records = self.snapshot(name)
        order = np.argsort(ids)
        return ids[order], numbers(records["row"])[order].astype(self._dtype.as_numpy_dtype)
