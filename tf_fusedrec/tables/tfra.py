"""Step 5 of 7 (docs/concepts.md): stores rows of a group in one TFRA variable, for any tf_keras or TF1 optimizer.

A row and its optimizer slots lie side by side in one `de.Variable` of (1 + k) * D columns. So a step makes one find and
one insert. TFRA's own DynamicEmbeddingOptimizer keeps a variable per slot and makes 1 + k of each, which take most of a
step's time (benchmarks/train_step). As in TFRA, the update inserts rows and the lookup does not. Initial rows are a
pure function of (seed, table, id), where TFRA's tf_keras initializers repeat rows.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.files.hash_order import mix64, table_seed
from tf_fusedrec.tables import keys
from tf_fusedrec.tables.row_optimizer import RowOptimizer
from tf_fusedrec.tables.table import StoredTable
from tf_fusedrec.tables.tfra_library import de

_IMPORT_BATCH = 1 << 16  # rows per upsert of restore
_names_in_use: collections.Counter = collections.Counter()


class Found(NamedTuple):
    """The result of a lookup, with all that the update needs."""

    rows: tf.Tensor  # [P, D], row of each id in the order received; P >= V, zeros after V
    position: tf.Tensor  # <int32>[V], number of the v-th received id among the distinct ids
    ids: tf.Tensor  # <int64>[W], distinct, grouped by table
    segments: tf.Tensor  # <int64>[W], table of each id
    keys: tf.Tensor  # <int64>[W], keys of the TFRA variable
    exists: tf.Tensor  # <bool>[W], whether the variable holds the row
    distinct: tf.Tensor  # [W, D], rows
    slots: tf.Tensor  # [W, k * D]


def _unique_name(name: str) -> str:
    """Numbers `name` from its second use on, because in TFRA variables of one name silently share a table."""
    _names_in_use[name] += 1
    return name if _names_in_use[name] == 1 else f"{name}_{_names_in_use[name] - 1}"


def _joined(parts: Sequence[Found], sums: Sequence[tf.Tensor]) -> tuple[Found, tf.Tensor]:
    """The rows of several lookups with the sums of their gradients [W, D], each row once."""
    if len(parts) == 1:
        return parts[0], sums[0]
    keys, number = tf.unique(tf.concat([part.keys for part in parts], 0))
    count, places = tf.size(keys), tf.range(tf.size(number))
    first = tf.math.unsorted_segment_min(places, number, count)
    fields = ("ids", "segments", "exists", "distinct", "slots")
    once = {name: tf.gather(tf.concat([getattr(part, name) for part in parts], 0), first) for name in fields}
    return parts[0]._replace(keys=keys, **once), tf.math.unsorted_segment_sum(tf.concat(sums, 0), number, count)


class TfraTable(StoredTable):
    """The tables of one group in one `de.Variable`.

    Args:
      name: Name of the TFRA variable.
      tables: Tables of equal spec. Table s is segment s.
      key_encoding: "bits" or "hash", see tables/keys.py.
      seed: Seed of the initial rows.
      init_capacity: Number of rows for which memory is taken at once.
    """

    owner = "tfra"  # TFRA's files are divided by its partition function
    takes_duplicates = False  # the exchange that removes them also checks that ids fit id_bits

    def __init__(
        self,
        name: str,
        tables: Sequence[TableConfig],
        *,
        key_encoding: str,
        seed: int,
        init_capacity: int,
    ):
        spec = tables[0]
        self.names = [table.name for table in tables]
        self.left_out = {}
        self._dtype = tf.as_dtype(spec.dtype)
        self._dim = spec.dim
        self._initializer = spec.initializer
        self._unknown = spec.unknown
        self._seeds = [table_seed(seed, table.name) for table in tables]
        self._encoding = keys.make_encoding(key_encoding, self.names)
        place = {"devices": ["/CPU:0"], "init_size": init_capacity, "checkpoint": False}
        name = _unique_name(name)
        self._trainer = RowOptimizer(spec.optimizer, spec.dim, self._dtype, name)
        columns = spec.dim * (1 + len(self._trainer.slot_names))
        self.variable = de.Variable(name=name, dim=columns, value_dtype=self._dtype, key_dtype=tf.int64, **place)
        self._reverse: Any = None
        if isinstance(self._encoding, keys.NameHash):  # the keys alone do not tell (table, id)
            self._reverse = de.Variable(
                name=f"{name}-reverse", dim=2, value_dtype=tf.int64, key_dtype=tf.int64, trainable=False, **place
            )
        # TFRA returns these values for a key without a row: zeros, and the first values of the slots.
        self._default = np.concatenate([np.zeros(spec.dim, self._trainer.start.dtype), self._trainer.start])[np.newaxis]

    @property
    def optimizer(self) -> Any:
        """The optimizer that trains these tables: a copy of the configured one, with state of its own."""
        return self._trainer.optimizer

    @property
    def id_bits(self) -> int:  # type: ignore[override]
        """Ids must lie in [0, 2^id_bits); 64 admits every int64."""
        return self._encoding.id_bits

    def lookup(self, message: tf.Tensor, splits: tf.Tensor, *, training: bool) -> Found:
        """Finds rows and inserts none. The update inserts them, as in TFRA."""
        received = ops.unpack_message(message, splits, num_segments=len(self.names))
        ids, splits, inverse = ops.segment_unique(received.ids, received.segment_splits)
        segments = tf.repeat(tf.range(len(self.names), dtype=tf.int64), splits[1:] - splits[:-1])
        merged = self._encoding.encode(ids, segments)
        default = tf.constant(self._default, self._dtype)
        found, exists = self.variable.tables[0].lookup(merged, dynamic_default_values=default, return_exists=True)
        found.set_shape([None, default.shape[1]])
        rows, slots = tf.split(found, [self._dim, default.shape[1] - self._dim], axis=1)  # zeros for a missing row
        if training or self._unknown == "initial":
            rows = ops.initial_rows(
                rows,
                exists,
                ids,
                splits,
                seeds=self._seeds,
                distribution=self._initializer.distribution,
                a=self._initializer.a,
                b=self._initializer.b,
            )
        position = tf.gather(inverse, received.position)
        return Found(
            rows=ops.recover(rows, position, pad=True), position=position, ids=ids, segments=segments, keys=merged,
            exists=exists, distinct=rows, slots=slots,
        )  # fmt: skip

    def apply_gradients(
        self, parts: Sequence[tuple[Found, tf.Tensor]], scale: float, checks: Sequence[tf.Operation] = ()
    ) -> None:
        """Trains the rows of the lookups, and inserts the new ones."""
        with tf.control_dependencies([*checks, *[grads for _, grads in parts]]):
            sums = [
                ops.recover_grad(grads, found.position, tf.size(found.keys, out_type=tf.int64))
                for found, grads in parts
            ]
            self._train(*_joined([found for found, _ in parts], sums), scale)

    def _train(self, found: Found, summed: tf.Tensor, scale: float) -> None:
        summed *= tf.cast(scale, summed.dtype)
        self.variable.upsert(found.keys, self._trainer.train(found.distinct, found.slots, summed))
        if self._reverse is not None:
            new = tf.logical_not(found.exists)
            names = tf.stack([found.segments, found.ids], axis=1)
            self._reverse.upsert(tf.boolean_mask(found.keys, new), tf.boolean_mask(names, new))

    def spec(self, name: str) -> dict[str, Any]:
        return {
            "dim": self._dim, "storage": self._dtype.name,
            "optimizer": {"rule": type(self.optimizer).__name__}, "slots": self._trainer.slot_names,
        }  # fmt: skip

    def record_dtype(self, section: str) -> np.dtype:
        """Structured, packed: "row" and the optimizer's slots, D numbers each; bfloat16 travels as its bits, <u2."""
        kind = "<u2" if self._dtype == tf.bfloat16 else self._default.dtype.newbyteorder("<").str
        return np.dtype([(part, kind, (self._dim,)) for part in ("row", *self._trainer.slot_names)])

    def size(self, name: str) -> int:
        return len(self._stored(name)[0]) if self.variable.size() else 0

    def snapshot(
        self, name: str, section: str = "rows", since: int | None = None, *, in_hash_order: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        if since is not None:
            raise ValueError(f"since must be None for tables {self.names}: TFRA does not know which rows have changed.")
        ids, values = self._stored(name)
        order = np.argsort(mix64(ids)) if in_hash_order else slice(None)
        return ids[order], self._records(values[order])

    def restore(self, name: str, section: str, ids: np.ndarray, records: np.ndarray) -> None:
        bits = np.ascontiguousarray(records).view(f"<u{self._default.dtype.itemsize}")
        values = bits.view(self._default.dtype).reshape(len(ids), self._default.shape[1])
        for begin in range(0, len(ids), _IMPORT_BATCH):
            part = slice(begin, begin + _IMPORT_BATCH)
            merged, names = self._merged(name, ids[part])
            self.variable.upsert(merged, tf.constant(values[part], self._dtype))
            if self._reverse is not None:
                self._reverse.upsert(merged, names)

    def new_records(self, name: str, n: int) -> np.ndarray:
        return self._records(np.repeat(self._default, n, axis=0))

    def remove(self, name: str, ids: np.ndarray) -> None:
        for variable in self._variables():
            variable.remove(self._merged(name, ids)[0])

    def export(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        ids, values = self._stored(name)
        order = np.argsort(ids)
        return ids[order], values[order, : self._dim]

    def clear(self) -> None:
        for variable in self._variables():
            variable.clear()

    def _records(self, values: np.ndarray) -> np.ndarray:
        """Stored values [n, (1 + k) * D] as <record_dtype>[n]; the bytes are the same."""
        bits = np.ascontiguousarray(values).view(f"<u{values.dtype.itemsize}")
        return bits.view(self.record_dtype("rows")).reshape(len(values))

    def _merged(self, name: str, ids: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys <int64>[n] of one table's ids, and the pairs (table, id) behind them, <int64>[n, 2]."""
        bad = np.flatnonzero((ids < 0) | (ids >> min(self.id_bits, 63) > 0))
        if self.id_bits < 64 and len(bad):
            raise ValueError(
                f"ids of table {name!r} must lie in [0, 2^{self.id_bits}) with key_encoding='bits', got {ids[bad[0]]}. "
                "Use key_encoding='hash'."
            )
        flat, segments = tf.constant(ids, tf.int64), tf.constant(self.names.index(name), tf.int64, [len(ids)])
        return self._encoding.encode(flat, segments), tf.stack([segments, flat], axis=1)

    def _variables(self) -> list[Any]:
        return [self.variable, *([self._reverse] if self._reverse else [])]

    def _stored(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """ids <int64>[n] of one table and what the variable holds of them, [n, (1 + k) * D], in no order."""
        merged, values = (t.numpy() for t in self.variable.export())
        ids, segments = self._ids_of(merged)
        mine = segments == self.names.index(name)
        return ids[mine], values[mine]

    def _ids_of(self, merged: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self._encoding, keys.MergedBits):
            return self._encoding.decode(merged)
        pairs = self._reverse.lookup(tf.constant(merged)).numpy()
        return pairs[:, 1], pairs[:, 0]
