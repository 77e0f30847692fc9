"""Stage 6 of 8: rows of one group in one TFRA variable, trained by any optimizer that TFRA accepts.

A row and its optimizer slots lie side by side in ONE `de.Variable` of (1 + k) * D columns: one find and one insert per
step, where TFRA's own DynamicEmbeddingOptimizer keeps a variable per slot and pays 1 + k of each (they are most of a
step's time; benchmarks/train_step.py). TFRA's rule holds that a lookup inserts nothing, the update does. Initial rows
are a pure function of (seed, table, id); TFRA's tf_keras initializers repeat rows.
"""

from __future__ import annotations

import collections
import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.tables import keys
from tf_fusedrec.tables.slots import RowTrainer

# At every import TFRA prints a notice about TensorFlow's savers and warns of a collection that nobody uses here.
_level = tf.get_logger().level
tf.get_logger().setLevel("ERROR")
with contextlib.redirect_stdout(io.StringIO()):
    import tensorflow_recommenders_addons.dynamic_embedding as de
tf.get_logger().setLevel(_level)

_IMPORT_BATCH = 1 << 16  # rows per upsert of import_rows
_names_in_use: collections.Counter = collections.Counter()


class Lookup(NamedTuple):
    """What a lookup found: all that the update needs, so that nothing is derived again."""

    ids: tf.Tensor  # <int64>[W], distinct, grouped by table
    segments: tf.Tensor  # <int64>[W], table of each id
    keys: tf.Tensor  # <int64>[W], keys of the TFRA variable
    exists: tf.Tensor  # <bool>[W], whether the variable holds the row
    rows: tf.Tensor  # [W, D]
    slots: tf.Tensor  # [W, k * D]


def _unique_name(name: str) -> str:
    """`name`, numbered from its second use on: in TFRA, variables and slots of one name silently are one table."""
    _names_in_use[name] += 1
    return name if _names_in_use[name] == 1 else f"{name}_{_names_in_use[name] - 1}"


class TfraTable:
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
        self._dtype = tf.as_dtype(spec.dtype)
        self._dim = spec.dim
        self._initializer = spec.initializer
        self._seeds = [keys.table_seed(seed, table.name) for table in tables]
        self._encoding = keys.make_encoding(key_encoding, self.names)
        place = {"devices": ["/CPU:0"], "init_size": init_capacity, "checkpoint": False}
        name = _unique_name(name)
        self._trainer = RowTrainer(spec.optimizer, spec.dim, self._dtype, name)
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
    def id_bits(self) -> int:
        """Ids must lie in [0, 2^id_bits); 64 admits every int64."""
        return self._encoding.id_bits

    def lookup(self, ids: tf.Tensor, splits: tf.Tensor) -> Lookup:
        """Finds rows; a row that is not there has its initial value and is not inserted.

        Args:
          ids: <int64>[W], distinct, grouped by table.
          splits: <int64>[S+1], table bounds inside ids.

        Returns:
          Lookup.
        """
        segments = tf.repeat(tf.range(len(self.names), dtype=tf.int64), splits[1:] - splits[:-1])
        merged = self._encoding.encode(ids, segments)
        default = tf.constant(self._default, self._dtype)
        found, exists = self.variable.tables[0].lookup(merged, dynamic_default_values=default, return_exists=True)
        found.set_shape([None, default.shape[1]])
        stored, slots = tf.split(found, [self._dim, default.shape[1] - self._dim], axis=1)
        rows = ops.initial_rows(
            stored,
            exists,
            ids,
            splits,
            seeds=self._seeds,
            distribution=self._initializer.distribution,
            a=self._initializer.a,
            b=self._initializer.b,
        )
        return Lookup(ids=ids, segments=segments, keys=merged, exists=exists, rows=rows, slots=slots)

    def apply_gradients(self, found: Lookup, grads: tf.Tensor) -> None:
        """Trains the rows of a lookup with their summed gradients <dtype>[W, D], and inserts those that were new."""
        self.variable.upsert(found.keys, self._trainer.train(found.rows, found.slots, grads))
        if self._reverse is not None:
            new = tf.logical_not(found.exists)
            names = tf.stack([found.segments, found.ids], axis=1)
            self._reverse.upsert(tf.boolean_mask(found.keys, new), tf.boolean_mask(names, new))

    def export(self) -> dict[str, dict[str, np.ndarray]]:
        """Rows of this rank by table: {"ids": <int64>[n], "rows": [n, D], "slot-<name>": [n, D]}, ids ascending. Eager.

        Raises:
          RuntimeError: keys are hashed and no reverse map was kept.
        """
        merged, values = (t.numpy() for t in self.variable.export())
        ids, segments = self._ids_of(merged)
        parts = np.split(values, range(self._dim, values.shape[1], self._dim), axis=1)
        columns = {"ids": ids, **dict(zip(self._columns(), parts))}
        exported = {}
        for s, name in enumerate(self.names):
            mine = np.flatnonzero(segments == s)
            mine = mine[np.argsort(ids[mine], kind="stable")]
            exported[name] = {column: values[mine] for column, values in columns.items()}
        return exported

    def _columns(self) -> list[str]:
        """Names under which the parts of a stored value are exported, in their order."""
        return ["rows", *(f"slot-{slot}" for slot in self._trainer.slot_names)]

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

    def clear(self) -> None:
        """Removes all rows, slots and reverse entries. Eager."""
        for variable in [self.variable, *([self._reverse] if self._reverse else [])]:
            variable.clear()

    def import_rows(self, name: str, columns: Mapping[str, np.ndarray]) -> None:
        """Inserts rows of one table as `export` gave them; slots that `columns` lacks start as for new rows. Eager."""
        segment, ids = self.names.index(name), columns["ids"]
        starts = dict(zip(self._columns(), np.split(self._default, len(self._columns()), axis=1)))
        values = np.concatenate(
            [columns.get(part, np.broadcast_to(start, columns["rows"].shape)) for part, start in starts.items()], axis=1
        )
        for begin in range(0, len(ids), _IMPORT_BATCH):
            batch = tf.constant(ids[begin : begin + _IMPORT_BATCH], tf.int64)
            segments = tf.fill(tf.shape(batch), tf.constant(segment, tf.int64))
            merged = self._encoding.encode(batch, segments)
            self.variable.upsert(merged, tf.constant(values[begin : begin + _IMPORT_BATCH], self._dtype))
            if self._reverse is not None:
                self._reverse.upsert(merged, tf.stack([segments, batch], axis=1))


def owner_of(ids: np.ndarray, ranks: int) -> np.ndarray:
    """<int64>[n] owner rank of NumPy ids under TFRA's partition function (custom_ops/common/hash.h: TfraOwner)."""
    return (ids & 0x7FFFFFFF) % ranks
