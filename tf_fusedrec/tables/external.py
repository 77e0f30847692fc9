"""Step 5 of 7 (docs/concepts.md): reads rows of other models, which are never trained (FusedRec, section 2).

The owner looks rows up by (table, id), as in the model's own tables. Deferred hashing makes this possible, because the
owner receives the id itself. A NativeTable that nothing updates holds the rows in memory.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from tf_fusedrec import config, optimizers
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.files.saves import read_manifest
from tf_fusedrec.files.table_reader import TableReader
from tf_fusedrec.tables.native import NativeTable
from tf_fusedrec.tables.table import InferenceRows, Table


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
        self.names = [table.name for table in tables]
        self.left_out = {}
        self._row_bytes = tables[0].dim * tf.as_dtype(tables[0].dtype).size
        # An id without a row has an initial row of zeros. The rule needs no slots and is never applied.
        rule, zeros = optimizers.SGD(0.0), config.Zeros()
        stored = [TableConfig(table.name, table.dim, rule, zeros, table.dtype) for table in tables]
        self._rows = NativeTable(name, stored, seed=0)
        for table in tables:
            for ids, rows in _read_rows(table, shard, shards):
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


class _SavedRows:
    """The target table of a TableReader that keeps the records in their saved form."""

    owner = "hash_range"

    def __init__(self, record: np.dtype):
        self._record = record

    def sections_of(self, name: str) -> tuple[str, ...]:
        return ("rows",)

    def record_dtype(self, section: str) -> np.dtype:
        return self._record


def _read_rows(config: TableConfig, shard: int, shards: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the rows of one shard of an external table: ids <int64>[n] and rows <float32>[n, D]. Not collective.

    Args:
      config: Config of the external table.
      shard: Number of the shard, in [0, shards).
      shards: Number of shards.

    Raises:
      ValueError: the folder holds no checkpoint; the checkpoint lacks the table or has another dim; a file is missing,
        truncated, damaged or foreign.
    """
    directory, name = pathlib.Path(config.external or ""), config.external_table or config.name
    tables = read_manifest(directory)["tables"]
    if name not in tables:
        raise ValueError(
            f"Checkpoint {directory} holds no table {name!r} for the external table {config.name!r}. It holds "
            f"{sorted(tables)}. Name one of them in TableConfig.external_table."
        )
    dim = tables[name]["spec"]["dim"]
    if dim != config.dim:
        raise ValueError(
            f"TableConfig.dim of the external table {config.name!r} is {config.dim}, but table {name!r} of checkpoint "
            f"{directory} has {dim}. Use dim={dim}."
        )
    saved = TableReader(directory, name, tables[name], None, 0, 1).sections["rows"].record
    mine = TableReader(directory, name, tables[name], _SavedRows(saved), shard, shards)
    for ids, records in mine.sections["rows"].chunks():
        rows = np.ascontiguousarray(records["row"])
        if rows.dtype == "<u2":  # NumPy has no bfloat16, so files hold its bits.
            rows = rows.view(tf.bfloat16.as_numpy_dtype)
        yield ids, rows.astype(np.float32)
