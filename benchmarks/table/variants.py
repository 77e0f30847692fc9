"""The variants of benchmarks.table in TensorFlow: one table each, with equal rows and the same training step.

A step is a layer's forward and backward pass in sequence form. It takes ids <int64>[N] and gradients <float32>[N, D],
returns rows <float32>[N, D], and updates the table.
"""

from __future__ import annotations

import abc
import itertools
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.table.work import INITIAL_VALUE, LEARNING_RATE
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.tables.tfra_library import de

_FILL_BATCH = 1 << 18  # rows per call
_tfra_layers = itertools.count()

OPTIMIZERS = {
    "rowwise_adagrad": lambda: optimizers.RowWiseAdagrad(LEARNING_RATE, variant="2d_sp"),
    "rowwise_adagrad_mean": lambda: optimizers.RowWiseAdagrad(LEARNING_RATE, variant="torchrec"),  # FBGEMM's
    "sgd": lambda: optimizers.SGD(LEARNING_RATE),
    "adagrad": lambda: keras.optimizers.legacy.Adagrad(LEARNING_RATE),
    "adam": lambda: keras.optimizers.legacy.Adam(LEARNING_RATE),
}


def after(rows: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
    """Returns the gradients, but not before the rows exist, as in every training step."""
    with tf.control_dependencies([rows]):
        return tf.identity(gradients)


class Variant(abc.ABC):
    """A table of D columns under one optimizer."""

    name: str

    def __init__(self, optimizer: str, dim: int):
        self._dim = dim
        self.layer = self._make_layer(OPTIMIZERS[optimizer]())
        # AutoGraph needs seconds to convert TFRA's code, and no variant needs it.
        self.step = tf.function(tf.autograph.experimental.do_not_convert(self.plain_step), autograph=False)

    @abc.abstractmethod
    def _make_layer(self, optimizer: Any) -> keras.layers.Layer:
        """Returns the layer with an empty table."""

    @abc.abstractmethod
    def plain_step(self, ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        """Returns the rows [N, D] of ids [N], and trains the table."""

    @abc.abstractmethod
    def fill(self, ids: np.ndarray) -> None:
        """Gives each of these distinct ids a row of INITIAL_VALUE and initial slots."""


class Native(Variant):
    """FusedEmbedding over one native table."""

    name = "ours"

    def _make_layer(self, optimizer: Any) -> keras.layers.Layer:
        initializer = fr.Constant(value=INITIAL_VALUE)
        table = fr.TableConfig(name="rows", dim=self._dim, optimizer=optimizer, initializer=initializer)
        return fr.FusedEmbedding([table], [fr.FeatureConfig(name="ids", table="rows")])

    @property
    def table(self) -> fr.tables.NativeTable:
        return self.layer.lookups[0].table

    @property
    def payload(self) -> int:
        """Bytes of a row and its slots."""
        record = self.table.record_dtype("rows")
        header = ("last", "count", "updated", "pool")
        return sum(record[name].itemsize for name in record.names or () if name not in header)

    @property
    def overhead(self) -> float:
        """Bytes per row, beyond the payload, that are mapped for keys and rows."""
        memory = self.table.memory
        return (memory["key_bytes"] + memory["row_bytes"]) / memory["rows"] - self.payload

    @staticmethod
    def bytes_wanted(rows: int, dim: int, slots: int) -> int:
        """Returns an upper bound of the memory of `rows` rows with `slots` slots of D numbers each."""
        return rows * (4 * dim * (1 + slots) + 80)

    def plain_step(self, ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = self.layer({"ids": ids})["ids"]
        tape.gradient(rows, self.layer.trainable_variables, output_gradients=after(rows, gradients))
        return rows

    def fill(self, ids: np.ndarray) -> None:
        records = self.table.new_records("rows", _FILL_BATCH)
        records["row"] = INITIAL_VALUE
        for begin in range(0, len(ids), _FILL_BATCH):
            part = ids[begin : begin + _FILL_BATCH]
            self.table.restore("rows", "rows", part, records[: len(part)])


class Tfra(Variant):
    """TFRA as its users write it: its Keras layer over a CuckooHashTable, and its optimizer over a legacy Keras one."""

    name = "tfra"

    def __init__(self, optimizer: str, dim: int, capacity: int):
        self._capacity = capacity
        super().__init__(optimizer, dim)
        self._optimizer = de.DynamicEmbeddingOptimizer(OPTIMIZERS[optimizer]())
        # The legacy Adagrad of Keras starts its accumulators at 0.1. Adam's slots start at zero.
        self._starts = {self.layer.params.name: INITIAL_VALUE, "accumulator": 0.1}

    def _make_layer(self, optimizer: Any) -> keras.layers.Layer:
        return de.keras.layers.Embedding(
            embedding_size=self._dim, key_dtype=tf.int64, value_dtype=tf.float32, devices=["/CPU:0"],
            initializer=keras.initializers.Constant(INITIAL_VALUE), init_capacity=self._capacity,
            # Two layers of TFRA must not share a name, which is also the name of the table.
            name=f"rows_{next(_tfra_layers)}",
        )  # fmt: skip

    def plain_step(self, ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = self.layer(ids)
        weights = self.layer.trainable_variables
        slices = tape.gradient(rows, weights, output_gradients=after(rows, gradients))
        self._optimizer.apply_gradients(zip(slices, weights))
        return rows

    def fill(self, ids: np.ndarray) -> None:
        # The trace creates the tables of slots. No step runs.
        self.step.get_concrete_function(
            tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, self._dim], tf.float32)
        )  # fmt: skip
        for variable in (self.layer.params, *self.layer.optimizer_vars):
            start = self._starts.get(variable.name.rsplit("/", 1)[-1], 0.0)
            values = tf.fill([_FILL_BATCH, self._dim], tf.constant(start))
            for begin in range(0, len(ids), _FILL_BATCH):
                part = tf.constant(ids[begin : begin + _FILL_BATCH])
                variable.upsert(part, values[: len(part)])

    @staticmethod
    def bytes_wanted(rows: int, dim: int, slots: int) -> int:
        """Returns the memory of rows and slots, each in a table whose number of buckets of four is a power of two."""
        buckets = 1 << max(0, (-(-rows // 4) - 1)).bit_length()
        return (1 + slots) * 4 * buckets * (4 * dim + 16)
