"""Stage 6 of 8: rows of one group in one TFRA variable, trained by any optimizer that TFRA accepts.

A row and its optimizer slots lie side by side in ONE `de.Variable` of (1 + k) * D columns: one find and one insert per
step, where TFRA's own DynamicEmbeddingOptimizer keeps a variable per slot and pays 1 + k of each (they are most of a
step's time; benchmarks/train_step). TFRA's rule holds that a lookup inserts nothing, the update does. Initial rows
are a pure function of (seed, table, id); TFRA's tf_keras initializers repeat rows.
"""

from __future__ import annotations

import collections
import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.tables import keys
from tf_fusedrec.tables.base import Table
from tf_fusedrec.tables.hash_order import mix64
from tf_fusedrec.tables.row_optimizer import RowOptimizer

# At every import TFRA prints a notice about TensorFlow's savers and warns of a collection that nobody uses here.
_level = tf.get_logger().level
tf.get_logger().setLevel("ERROR")
with contextlib.redirect_stdout(io.StringIO()):
    import tensorflow_recommenders_addons.dynamic_embedding as de
    from tensorflow_recommenders_addons.dynamic_embedding.python.ops import dynamic_embedding_variable as _variables
tf.get_logger().setLevel(_level)

default_partition_fn = _variables.default_partition_fn
_IMPORT_BATCH = 1 << 16  # rows per upsert of restore
_names_in_use: collections.Counter = collections.Counter()


class Found(NamedTuple):
    """What a lookup found: all that the update needs, so that nothing is derived again."""

    rows: tf.Tensor  # [P, D], row of each id in the order received; P >= V, zeros behind V
    position: tf.Tensor  # <int32>[V], which of the distinct ids the v-th received one is
    ids: tf.Tensor  # <int64>[W], distinct, grouped by table
    segments: tf.Tensor  # <int64>[W], table of each id
    keys: tf.Tensor  # <int64>[W], keys of the TFRA variable
    exists: tf.Tensor  # <bool>[W], whether the variable holds the row
    distinct: tf.Tensor  # [W, D], rows
    slots: tf.Tensor  # [W, k * D]


def _unique_name(name: str) -> str:
    """`name`, numbered from its second use on: in TFRA, variables and slots of one name silently are one table."""
    _names_in_use[name] += 1
    return name if _names_in_use[name] == 1 else f"{name}_{_names_in_use[name] - 1}"


class TfraTable(Table):
    """The tables of one group in one `de.Variable`.

    Args:
      name: of the TFRA variable.
      tables: of equal spec; table s is segment s.
      key_encoding: "bits" or "hash", see tables/keys.py.
      seed: of the initial rows.
      init_capacity: rows for which memory is taken at once.
      keep_reverse_map: with "hash": remember (table, id) of every key, so that rows can be exported.
    """

    owner = "tfra"  # TFRA's partition function: its files are laid out by it
    takes_duplicates = False  # the exchange that takes them out also checks that ids fit id_bits

    def __init__(
        self,
        name: str,
        tables: Sequence[TableConfig],
        *,
        key_encoding: str,
        seed: int,
        init_capacity: int,
        keep_reverse_map: bool,
    ):
        spec = tables[0]
        self.names = [table.name for table in tables]
        self.left_out = {}
        self._dtype = tf.as_dtype(spec.dtype)
        self._dim = spec.dim
        self._initializer = spec.initializer
        self._unknown = spec.unknown
        self._seeds = [keys.table_seed(seed, table.name) for table in tables]
        self._encoding = keys.make_encoding(key_encoding, self.names)
        place = {"devices": ["/CPU:0"], "init_size": init_capacity, "checkpoint": False}
        name = _unique_name(name)
        self._trainer = RowOptimizer(spec.optimizer, spec.dim, self._dtype, name)
        columns = spec.dim * (1 + len(self._trainer.slot_names))
        self.variable = de.Variable(name=name, dim=columns, value_dtype=self._dtype, key_dtype=tf.int64, **place)
        self._reverse = None
        if keep_reverse_map and isinstance(self._encoding, keys.NameHash):
            self._reverse = de.Variable(
                name=f"{name}-reverse", dim=2, value_dtype=tf.int64, key_dtype=tf.int64, trainable=False, **place
            )
        # What TFRA gives for a key that it does not hold: no row yet, slots as the optimizer starts them.
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
        """Finds rows and inserts none: the update inserts (TFRA's rule)."""
        received = ops.unpack_message(message, splits, num_segments=len(self.names))
        ids, splits, inverse = ops.segment_unique(received.ids, received.segment_splits)
        segments = tf.repeat(tf.range(len(self.names), dtype=tf.int64), splits[1:] - splits[:-1])
        merged = self._encoding.encode(ids, segments)
        default = tf.constant(self._default, self._dtype)
        found, exists = self.variable.tables[0].lookup(merged, dynamic_default_values=default, return_exists=True)
        found.set_shape([None, default.shape[1]])
        rows, slots = tf.split(found, [self._dim, default.shape[1] - self._dim], axis=1)  # zeros where there is no row
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
        """Trains the rows of one lookup, and inserts the new ones."""
        ((found, grads),) = parts
        with tf.control_dependencies([*checks, grads]):
            self._train(found, grads, scale)

    def _train(self, found: Found, grads: tf.Tensor, scale: float) -> None:
        summed = ops.recover_grad(grads, found.position, tf.size(found.keys, out_type=tf.int64))
        summed *= tf.cast(scale, summed.dtype)
        self.variable.upsert(found.keys, self._trainer.train(found.distinct, found.slots, summed))
        if self._reverse is not None:
            new = tf.logical_not(found.exists)
            names = tf.stack([found.segments, found.ids], axis=1)
            self._reverse.upsert(tf.boolean_mask(found.keys, new), tf.boolean_mask(names, new))

    # What a checkpoint asks of a backend. TFRA keeps no count of lookups, no time of a row's change and no candidates.
    sections = ("rows",)
    records_tombstones = False
    clock = 0

    def spec(self, name: str) -> dict[str, Any]:
        """What a stored row is; rows go from one table to another exactly when both say the same. JSON-able."""
        return {
            "dim": self._dim, "storage": self._dtype.name,
            "optimizer": {"rule": type(self.optimizer).__name__}, "slots": self._trainer.slot_names,
        }  # fmt: skip

    def record_dtype(self, section: str) -> np.dtype:
        """Structured, packed: "row" and the optimizer's slots, D numbers each; bfloat16 travels as its bits, <u2."""
        kind = "<u2" if self._dtype == tf.bfloat16 else self._default.dtype.newbyteorder("<").str
        return np.dtype([(part, kind, (self._dim,)) for part in ("row", *self._trainer.slot_names)])

    @property
    def row_bytes(self) -> int:
        return self.record_dtype("rows").itemsize

    def size(self, name: str) -> int:
        return len(self._stored(name)[0]) if self.variable.size() else 0

    def snapshot(
        self, name: str, section: str = "rows", since: int | None = None, *, in_hash_order: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """A copy of this rank's rows of one table: ids <int64>[n], by ascending Mix64(id) if wanted, and records [n].

        Raises:
          ValueError: `since`: TFRA does not know which rows have changed.
          RuntimeError: keys are hashed and no reverse map was kept.
        """
        if since is not None:
            raise ValueError(f"since must be None for tables {self.names}: TFRA does not know which rows have changed.")
        ids, values = self._stored(name)
        order = np.argsort(mix64(ids)) if in_hash_order else slice(None)
        return ids[order], self._records(values[order])

    def restore(self, name: str, section: str, ids: np.ndarray, records: np.ndarray) -> None:
        """Inserts or overwrites rows as `snapshot` gave them. Eager.

        Raises:
          ValueError: ids that key_encoding="bits" has no room for.
        """
        bits = np.ascontiguousarray(records).view(f"<u{self._default.dtype.itemsize}")
        values = bits.view(self._default.dtype).reshape(len(ids), self._default.shape[1])
        for begin in range(0, len(ids), _IMPORT_BATCH):
            part = slice(begin, begin + _IMPORT_BATCH)
            merged, names = self._merged(name, ids[part])
            self.variable.upsert(merged, tf.constant(values[part], self._dtype))
            if self._reverse is not None:
                self._reverse.upsert(merged, names)

    def new_records(self, name: str, n: int) -> np.ndarray:
        """<record_dtype>[n] of rows that were never trained: "row" is zero, slots are as they start."""
        return self._records(np.repeat(self._default, n, axis=0))

    def remove(self, name: str, ids: np.ndarray) -> None:
        """Removes rows; ids without a row are passed over. Eager."""
        for variable in self._variables():
            variable.remove(self._merged(name, ids)[0])

    def tombstones(self, name: str) -> np.ndarray:
        """Raises ValueError: what was removed is not recorded."""
        raise ValueError(f"TFRA records no removed ids, so tables {self.names} have no tombstones.")

    def export(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        ids, values = self._stored(name)
        order = np.argsort(ids)
        return ids[order], values[order, : self._dim]

    def clear(self) -> None:
        """Removes all rows, slots and reverse entries. Eager."""
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
        if self._reverse is None:
            raise RuntimeError(
                f"Rows of tables {self.names} cannot be exported: key_encoding='hash' was used with "
                "keep_reverse_map=False, so the ids behind the keys are not known. Keep the map, or use 'bits'."
            )
        pairs = self._reverse.lookup(tf.constant(merged)).numpy()
        return pairs[:, 1], pairs[:, 0]


def forget_variable(name: str) -> None:
    """Lets go of a `de.Variable` that TFRA keeps, for the life of the process, for layers of the same name."""
    _variables.variable_scope._get_default_variable_store()._vars.pop(name, None)


def owner_of(ids: np.ndarray, ranks: int) -> np.ndarray:
    """<int64>[n] owner rank of NumPy ids under TFRA's partition function (custom_ops/common/hash.h: TfraOwner)."""
    return (ids & 0x7FFFFFFF) % ranks
