"""Backend "tfra" of FusedEmbedding: rows of a group in one TFRA variable, trained by any tf_keras or TF1 optimizer.

A row and its optimizer slots share one entry of (1 + k) * D columns in a `de.Variable`, so a step makes one find and
one insert. TFRA's own DynamicEmbeddingOptimizer keeps a variable per slot and makes 1 + k of each, which take most of a
step's time (benchmarks/train_step). As in TFRA, the update inserts rows and the lookup does not. Initial rows are a
pure function of (seed, table, id), where TFRA's tf_keras initializers repeat rows.

RowOptimizer runs a stock optimizer on a number of rows that changes every step. Optimizers make their slots (momenta,
accumulators) once, in the shape of the trained variable. Here the variable has the rows of one step, so it and its
slots have the shape [None, D], and the table keeps their values between steps.

A TFRA variable has a single key. The owner makes it of (table, id) after the exchange (deferred hashing, FusedRec
section 3, "Lossless Lookup"):

- MergedBits (MTGRBoost eq. 8): key = (table number << (63 - k)) | id with k = ceil(log2(m + 1)) bits for m tables.
  It is exact and reversible. Ids must be in [0, 2^(63 - k)). A group of one table needs no bits: its key is the id.
- NameHash: key = Mix64(id xor h(name)) for any id. Two pairs (name, id) share a key with probability 2^-64, so n rows
  have a collision with probability about n^2 / 2^65: 3e-8 for a million rows, 3 % for a billion. A second variable maps
  keys to (table, id).
"""

from __future__ import annotations

import collections
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.files.hash_order import mix64, table_seed
from tf_fusedrec.tables.table import Message, Table, register_backend
from tf_fusedrec.tfra.tfra_library import de

_IMPORT_BATCH = 1 << 16  # rows per upsert of restore
_names_in_use: collections.Counter = collections.Counter()


class TfraRows(NamedTuple):
    """The result of a lookup, with all that the update needs."""

    rows: tf.Tensor  # [P, D], row of each id in the order received; P >= V, zeros after V
    position: tf.Tensor  # <int32>[V], number of the v-th received id among the distinct ids
    ids: tf.Tensor  # <int64>[W], distinct, grouped by table
    segments: tf.Tensor  # <int64>[W], table of each id
    keys: tf.Tensor  # <int64>[W], keys of the TFRA variable
    exists: tf.Tensor  # <bool>[W], whether the variable has the row
    distinct: tf.Tensor  # [W, D], rows
    slots: tf.Tensor  # [W, k * D]


def _joined(parts: Sequence[TfraRows], sums: Sequence[tf.Tensor]) -> tuple[TfraRows, tf.Tensor]:
    """The rows of several lookups with the sums of their gradients [W, D], each row once."""
    if len(parts) == 1:
        return parts[0], sums[0]
    keys, number = tf.unique(tf.concat([part.keys for part in parts], 0))
    count, places = tf.size(keys), tf.range(tf.size(number))
    first = tf.math.unsorted_segment_min(places, number, count)
    fields = ("ids", "segments", "exists", "distinct", "slots")
    once = {name: tf.gather(tf.concat([getattr(part, name) for part in parts], 0), first) for name in fields}
    return parts[0]._replace(keys=keys, **once), tf.math.unsorted_segment_sum(tf.concat(sums, 0), number, count)


class TfraTable(Table):
    """The tables of one group in one `de.Variable`. They have equal specs. Table s is segment s."""

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
        if key_encoding not in KEY_ENCODINGS:
            raise ValueError(f"key_encoding must be one of {tuple(KEY_ENCODINGS)}, got {key_encoding!r}.")
        self._encoding: MergedBits | NameHash = KEY_ENCODINGS[key_encoding](self.names)
        place = {"devices": ["/CPU:0"], "init_size": init_capacity, "checkpoint": False}
        _names_in_use[name] += 1  # In TFRA, variables of one name silently share a table.
        name = name if _names_in_use[name] == 1 else f"{name}_{_names_in_use[name] - 1}"
        self._trainer = RowOptimizer(spec.optimizer, spec.dim, self._dtype, name)
        columns = spec.dim * (1 + len(self._trainer.slot_names))
        self.variable = de.Variable(name=name, dim=columns, value_dtype=self._dtype, key_dtype=tf.int64, **place)
        self._reverse: Any = None
        if isinstance(self._encoding, NameHash):  # the keys do not determine (table, id)
            self._reverse = de.Variable(
                name=f"{name}-reverse", dim=2, value_dtype=tf.int64, key_dtype=tf.int64, trainable=False, **place
            )
        # TFRA returns these values for a key without a row: zeros, and the first values of the slots.
        self._default = np.concatenate([np.zeros(spec.dim, self._trainer.start.dtype), self._trainer.start])[np.newaxis]

    @property
    def optimizer(self) -> Any:
        """The optimizer that trains these tables: a copy of the configured one, with its own state."""
        return self._trainer.optimizer

    @property
    def id_bits(self) -> int:  # type: ignore[override]
        """Ids must be in [0, 2^id_bits); 64 admits every int64."""
        return self._encoding.id_bits

    def check_deferrable(self, steps: int) -> None:
        raise ValueError(
            f"lookups ahead of their step, or several before one update, need backend='native', and {self.names} have "
            "'tfra'."
        )

    def lookup(
        self,
        request: Message,
        ahead: ops.RowsAhead | None = None,
        *,
        sums: ops.RowSums | None = None,
        with_rows: bool = True,
        lookups_per_update: int = 1,
    ) -> TfraRows:
        """Finds rows and inserts none. The update inserts them, as in TFRA."""
        return self._look_up(request, initial=True)

    def read(self, request: Message, ahead: ops.RowsAhead | None = None, *, lookups_per_update: int = 0) -> tf.Tensor:
        return self._look_up(request, initial=lookups_per_update > 0 or self._unknown == "initial").rows

    def _look_up(self, request: Message, *, initial: bool) -> TfraRows:
        received = ops.unpack_message(*request, num_segments=len(self.names))
        ids, splits, inverse = ops.segment_unique(received.ids, received.segment_splits)
        segments = tf.repeat(tf.range(len(self.names), dtype=tf.int64), splits[1:] - splits[:-1])
        merged = self._encoding.encode(ids, segments)
        default = tf.constant(self._default, self._dtype)
        stored, exists = self.variable.tables[0].lookup(merged, dynamic_default_values=default, return_exists=True)
        stored.set_shape([None, default.shape[1]])
        rows, slots = tf.split(stored, [self._dim, default.shape[1] - self._dim], axis=1)  # zeros for a missing row
        if initial:
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
        return TfraRows(
            rows=ops.recover(rows, position, pad=True), position=position, ids=ids, segments=segments, keys=merged,
            exists=exists, distinct=rows, slots=slots,
        )  # fmt: skip

    def update(
        self,
        parts: Sequence[tuple[TfraRows, tf.Tensor, ops.RowSums | None]],
        scale: float,
        checks: Sequence[tf.Operation] = (),
        *,
        as_they_come: bool = False,
    ) -> None:
        """Trains the rows of the lookups, and inserts the new ones, when all gradients are here."""
        with tf.control_dependencies([*checks, *[grads for _, grads, _ in parts]]):
            sums = [
                ops.recover_grad(grads, part.position, tf.size(part.keys, out_type=tf.int64))
                for part, grads, _ in parts
            ]
            rows, summed = _joined([part for part, _, _ in parts], sums)
            summed *= tf.cast(scale, summed.dtype)
            self.variable.upsert(rows.keys, self._trainer.train(rows.distinct, rows.slots, summed))
            if self._reverse is not None:
                is_new = tf.logical_not(rows.exists)
                names = tf.stack([rows.segments, rows.ids], axis=1)
                self._reverse.upsert(tf.boolean_mask(rows.keys, is_new), tf.boolean_mask(names, is_new))

    def spec(self, name: str) -> dict[str, Any]:
        return {
            "dim": self._dim, "storage": self._dtype.name,
            "optimizer": {"rule": type(self.optimizer).__name__}, "slots": self._trainer.slot_names,
        }  # fmt: skip

    def record_dtype(self, section: str) -> np.dtype:
        """Structured, packed: "row" and the optimizer's slots, D numbers each; bfloat16 travels as its bits, <u2."""
        number = "<u2" if self._dtype == tf.bfloat16 else self._default.dtype.newbyteorder("<").str
        return np.dtype([(part, number, (self._dim,)) for part in ("row", *self._trainer.slot_names)])

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
        """Keys <int64>[n] of one table's ids, and their pairs (table, id), <int64>[n, 2]."""
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
        """ids <int64>[n] of one table and their rows and slots, [n, (1 + k) * D], in no order."""
        merged, values = (t.numpy() for t in self.variable.export())
        if isinstance(self._encoding, MergedBits):
            ids, segments = self._encoding.decode(merged)
        else:
            segments, ids = self._reverse.lookup(tf.constant(merged)).numpy().T
        places = segments == self.names.index(name)
        return ids[places], values[places]


class RowOptimizer:
    """An optimizer, the variable of a step's rows, and its slots.

    A Keras optimizer is copied without its state. A TF1 optimizer is used itself. `dtype` is that of rows and slots.
    """

    def __init__(self, optimizer: Any, dim: int, dtype: tf.DType, name: str):
        self._dim, self._dtype, self._name = dim, dtype, name
        self._rows = self._variable("rows")
        self._slots: dict[str, tf.Variable] = {}
        self._starts: list[np.ndarray] = []
        self.optimizer = self._adopt(optimizer)

    @property
    def slot_names(self) -> list[str]:
        """Names of the slots in the order of their columns."""
        return list(self._slots)

    @property
    def start(self) -> np.ndarray:
        """The values [k * D] of the k slots of a new row."""
        return np.concatenate(self._starts) if self._starts else np.zeros([0], self._dtype.as_numpy_dtype)

    def train(self, rows: tf.Tensor, slots: tf.Tensor, grads: tf.Tensor) -> tf.Tensor:
        """One step on rows and grads [W, D] and slots [W, k * D]. Returns rows and slots after it, [W, (1 + k) * D].

        Each row occurs once, so dense gradients save the search for duplicates.
        """
        variables = [self._rows, *self._slots.values()]
        parts = [rows, *(tf.split(slots, len(self._slots), axis=1) if self._slots else [])]
        with tf.control_dependencies([v.assign(part, read_value=False) for v, part in zip(variables, parts)]):
            done = self.optimizer.apply_gradients([(tf.identity(grads), self._rows)])
        # In a graph the step is an op to wait for; in eager mode it is over.
        with tf.control_dependencies([] if done is None or tf.executing_eagerly() else [done]):
            return tf.concat([v.read_value() for v in variables], axis=1)

    def _variable(self, role: str) -> tf.Variable:
        nothing = tf.zeros([0, self._dim], self._dtype)
        return tf.Variable(nothing, shape=[None, self._dim], trainable=False, name=f"{self._name}/{role}")

    def _slot(self, slot_name: str, start: Any) -> tf.Variable:
        """Returns the slot of this name, and makes it at the first call. `start` [1, D] are a new row's values."""
        if slot_name not in self._slots:
            self._starts.append(np.reshape(np.asarray(start, self._dtype.as_numpy_dtype), [self._dim]))
            self._slots[slot_name] = self._variable(slot_name)
        return self._slots[slot_name]

    def _adopt(self, optimizer: Any) -> Any:
        """An optimizer that keeps its slots here. Refuses an unknown family, and averages of rows over time."""
        if isinstance(optimizer, keras.optimizers.legacy.Optimizer):
            return self._adopt_legacy(type(optimizer).from_config(optimizer.get_config()))
        if isinstance(optimizer, keras.optimizers.Optimizer):
            if getattr(optimizer, "use_ema", False):
                raise ValueError(
                    f"TableConfig.optimizer {type(optimizer).__name__} must not use_ema: an average of rows that come "
                    "and go is not kept. Use use_ema=False."
                )
            return self._adopt_new(type(optimizer).from_config(optimizer.get_config()))
        if isinstance(optimizer, tf.compat.v1.train.Optimizer):
            return self._adopt_tf1(optimizer)
        raise ValueError(
            f"TableConfig.optimizer must be a tf_keras or TF1 optimizer, got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}. Keras 3 optimizers do not train tf_keras models; use keras.optimizers of "
            "tf_fusedrec."
        )

    def _adopt_legacy(self, optimizer: Any) -> Any:
        def add_slot(_, var, slot_name, initializer="zeros", shape=None):
            make = keras.initializers.get(initializer) if isinstance(initializer, str) else initializer
            return self._slot(slot_name, make(shape=[1, self._dim], dtype=self._dtype))

        optimizer.add_slot = types.MethodType(add_slot, optimizer)
        optimizer.get_slot = types.MethodType(lambda _, var, slot_name: self._slots[slot_name], optimizer)
        optimizer._create_all_weights([self._rows])  # a traced step cannot make variables
        return optimizer

    def _adopt_new(self, optimizer: Any) -> Any:
        def add_variable_from_reference(_, model_variable, variable_name, shape=None, initial_value=None):
            zeros = tf.zeros([1, self._dim], self._dtype)
            return self._slot(variable_name, zeros if initial_value is None else initial_value)

        optimizer.add_variable_from_reference = types.MethodType(add_variable_from_reference, optimizer)
        # The optimizer is built for one row, which has a known shape. Then the rows replace that variable.
        optimizer.build([self._one_row()])
        optimizer._index_dict[optimizer._var_key(self._rows)] = 0
        return optimizer

    def _adopt_tf1(self, optimizer: Any) -> Any:
        def zeros_slot(_, var, slot_name, op_name):
            return self._slot(slot_name, tf.zeros([1, self._dim], self._dtype))

        def slot_from_value(_, var, val, slot_name, op_name):
            return self._slot(slot_name, val)

        def slot_from_initializer(_, var, initializer, shape, dtype, slot_name, op_name):
            return self._slot(slot_name, initializer([1, self._dim], dtype))

        optimizer._zeros_slot = types.MethodType(zeros_slot, optimizer)
        optimizer._get_or_make_slot = types.MethodType(slot_from_value, optimizer)
        optimizer._get_or_make_slot_with_initializer = types.MethodType(slot_from_initializer, optimizer)
        optimizer.get_slot = types.MethodType(lambda _, var, slot_name: self._slots[slot_name], optimizer)
        optimizer._create_slots([self._one_row()])
        optimizer._create_slots = lambda var_list: None  # every step would make slots again, of unknown shape
        return optimizer

    def _one_row(self) -> tf.Variable:
        return tf.Variable(tf.zeros([1, self._dim], self._dtype), trainable=False)


class MergedBits:
    """Keys of MTGRBoost eq. 8."""

    def __init__(self, names: Sequence[str]):
        table_bits = math.ceil(math.log2(len(names) + 1)) if len(names) > 1 else 0
        self._shift = 63 - table_bits
        self.id_bits = self._shift if len(names) > 1 else 64

    def encode(self, ids: tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
        """<int64>[W] keys of ids <int64>[W] in tables <int64>[W]. The sender of the ids has checked their range."""
        if self.id_bits == 64:
            return ids
        return tf.bitwise.bitwise_or(tf.bitwise.left_shift(segments, tf.cast(self._shift, tf.int64)), ids)

    def decode(self, keys: Any) -> tuple[Any, Any]:
        """ids and table numbers, both <int64>[W], of keys <int64>[W], which are NumPy or TensorFlow."""
        if self.id_bits == 64:
            return keys, np.zeros_like(keys) if isinstance(keys, np.ndarray) else tf.zeros_like(keys)
        return keys % (1 << self._shift), keys // (1 << self._shift)


class NameHash:
    """Keys from a 64-bit hash of the table's name and the id."""

    id_bits = 64

    def __init__(self, names: Sequence[str]):
        self._salts = tf.constant([table_seed(0, name) for name in names], tf.int64)

    def encode(self, ids: tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
        """<int64>[W] keys of ids <int64>[W] in tables <int64>[W]."""
        salted = tf.bitwise.bitwise_xor(ids, tf.gather(self._salts, segments))
        return tf.bitcast(tensor_mix64(tf.bitcast(salted, tf.uint64)), tf.int64)


def tensor_mix64(x: tf.Tensor) -> tf.Tensor:
    """MurmurHash3's 64-bit finalizer on <uint64>, as in custom_ops/common/hash.h."""
    shift = tf.constant(33, tf.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, shift)) * tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, shift))


KEY_ENCODINGS: dict[str, Callable[[Sequence[str]], MergedBits | NameHash]] = {"bits": MergedBits, "hash": NameHash}
register_backend("tfra", TfraTable)
