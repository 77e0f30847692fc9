"""Embedding tables as they are served: fixed ids and rows, found by binary search with stock TensorFlow ops.

Has FusedEmbedding's call, so a model takes one for the other; see export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_fusedrec import keras, tf


class FrozenEmbedding(keras.layers.Layer):
    """Rows of a checkpoint. An id that the table does not hold gets the default row, zeros.

    Args:
      tables: table name -> ids <int64>[n], ascending, and rows <float>[n, D]; from fr.checkpoint.read_tables.
      table_of: feature name -> table name.

    Call:
      inputs: feature name -> ids, <int64>[...] or RaggedTensor <int64>[B,(L)].
      training: accepted as FusedEmbedding accepts it; these rows never change.
      returns feature name -> rows, <float>[..., D] or RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: a feature of an unknown table, ids that do not ascend, or other than one row per id.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[np.ndarray, np.ndarray]],
        table_of: Mapping[str, str],
        name: str = "embedding",
    ):
        super().__init__(name=name)
        for feature, table in table_of.items():
            if table not in tables:
                raise ValueError(f"feature {feature!r} reads table {table!r}; there are {sorted(tables)}.")
        self._table_of = dict(table_of)
        self._variables_of = _Untracked(
            {table: _variables(table, *tables[table]) for table in sorted(set(table_of.values()))}
        )

    @property
    def table_variables(self) -> list[tf.Variable]:
        """Ids and rows of all tables. The layer does not track them: they are no weights of a checkpoint."""
        return [variable for pair in self._variables_of.value.values() for variable in pair]

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> dict[str, Any]:
        rows = {}
        for feature, ids in inputs.items():
            known, table = self._variables_of.value[self._table_of[feature]]
            if isinstance(ids, tf.RaggedTensor):
                rows[feature] = ids.with_values(_lookup(known, table, ids.values))
            else:
                rows[feature] = _lookup(known, table, ids)
        return rows


def _lookup(known: tf.Variable, table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(tf.cast(ids, tf.int64), [-1])
    # The last entry is the default row; its id repeats the largest, which a search from the left never answers.
    default = tf.shape(table)[0] - 1
    at = tf.minimum(tf.searchsorted(known, flat), default)
    found = tf.gather(known, at) == flat
    rows = tf.gather(table, tf.where(found, at, default))
    return tf.reshape(rows, tf.concat([tf.shape(ids), [table.shape[1]]], axis=0))


def _variables(name: str, ids: np.ndarray, rows: np.ndarray) -> tuple[tf.Variable, tf.Variable]:
    """ids [n+1] and rows [n+1, D]: the table and, behind it, the default row."""
    if ids.ndim != 1 or rows.ndim != 2 or len(ids) != len(rows):
        raise ValueError(f"table {name!r} must be ids [n] and rows [n, D], got shapes {ids.shape} and {rows.shape}.")
    if (np.diff(ids) <= 0).any():
        raise ValueError(f"ids of table {name!r} must ascend without repeats. Take fr.checkpoint.read_tables.")
    last = ids[-1:] if len(ids) else np.array([np.iinfo(np.int64).max])
    return (
        tf.Variable(np.concatenate([ids, last]).astype(np.int64), trainable=False, name=f"{name}_ids"),
        tf.Variable(
            np.concatenate([rows, np.zeros([1, rows.shape[1]], rows.dtype)]), trainable=False, name=f"{name}_rows"
        ),
    )


class _Untracked:
    """Holds a value out of sight of Keras' and TensorFlow's attribute tracking."""

    def __init__(self, value: Any):
        self.value = value
