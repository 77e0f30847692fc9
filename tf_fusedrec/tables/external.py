"""Step 5 of 7 (docs/concepts.md): reads rows of other models, which are never trained (FusedRec, section 2).

The owner looks rows up by (table, id), as in the model's own tables. Deferred hashing makes this possible, because the
owner receives the id itself. A NativeTable that nothing updates holds the rows in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tf_fusedrec import initializers, optimizers
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.tables.native import NativeTable
from tf_fusedrec.tables.table import InferenceRows, Table

# Yields a shard's ids <int64>[n] and rows <float32>[n, D], a part at a time. The arguments are the config of an
# external table, a shard and the number of shards.
Reader = Callable[[TableConfig, int, int], Iterator[tuple[np.ndarray, np.ndarray]]]
_reader: Reader | None = None


def read_with(reader: Reader) -> None:
    """Sets the reader of external rows, because tables know no checkpoints. checkpoint/external_rows.py has it."""
    global _reader
    _reader = reader


class ExternalTable(Table):
    """The external tables of one group.

    Args:
      name: Name of the resource, for messages.
      tables: Tables of equal dim and dtype, each with its checkpoint.
      shard, shards: Number of this part of the rows, and of all parts.

    Raises:
      ValueError: a checkpoint is missing, damaged, or without the table or its dim.
    """

    owner = NativeTable.owner
    id_bits = NativeTable.id_bits
    optimizer = None

    def __init__(self, name: str, tables: Sequence[TableConfig], shard: int, shards: int):
        assert _reader is not None, "tf_fusedrec/__init__.py imports the reader"
        self.names = [table.name for table in tables]
        self.left_out = {}
        self._row_bytes = tables[0].dim * tf.as_dtype(tables[0].dtype).size
        # An id without a row has an initial row of zeros. The rule needs no slots and is never applied.
        rule, zeros = optimizers.SGD(0.0), initializers.Zeros()
        stored = [TableConfig(table.name, table.dim, rule, zeros, table.dtype) for table in tables]
        self._rows = NativeTable(name, stored, seed=0)
        for table in tables:
            for ids, rows in _reader(table, shard, shards):
                records = self._rows.new_records(table.name, len(ids))
                bits = table.dtype == "bfloat16"
                records["row"] = rows.astype(tf.bfloat16.as_numpy_dtype).view(np.uint16) if bits else rows
                self._rows.restore(table.name, "rows", ids, records)

    def lookup(self, message: tf.Tensor, splits: tf.Tensor, *, training: bool) -> InferenceRows:
        return InferenceRows(self._rows.lookup(message, splits, training=False).rows)

    def apply_gradients(
        self, parts: Sequence[tuple[InferenceRows, tf.Tensor]], scale: float, checks: Sequence[tf.Operation] = ()
    ) -> None:
        """Raises ValueError: these rows belong to another model."""
        raise ValueError(f"Tables {self.names} are external: their rows are never trained.")

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    def size(self, name: str) -> int:
        return self._rows.size(name)

    def export(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self._rows.export(name)
