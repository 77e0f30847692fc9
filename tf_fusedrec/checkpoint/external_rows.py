"""Reads the rows of external tables from another model's checkpoint (FusedRec, section 2).

    TableConfig(name="author", dim=16, external="runs/authors/checkpoint", external_table="user")

Each rank reads the rows that it owns. Any number of ranks, with either backend, may have written the checkpoint.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.checkpoint import resharding
from tf_fusedrec.checkpoint.folders import read_manifest
from tf_fusedrec.config import TableConfig
from tf_fusedrec.tables import external


class _SavedRows:
    """The target table of a TableReader that keeps the records in their saved form."""

    owner = external.ExternalTable.owner

    def __init__(self, record: np.dtype):
        self._record = record

    def sections_of(self, name: str) -> tuple[str, ...]:
        return ("rows",)

    def record_dtype(self, section: str) -> np.dtype:
        return self._record


def read_rows(config: TableConfig, shard: int, shards: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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
    saved = resharding.TableReader(directory, name, tables[name], None, 0, 1).sections["rows"].record
    mine = resharding.TableReader(directory, name, tables[name], _SavedRows(saved), shard, shards)
    for ids, records in mine.sections["rows"].chunks():
        rows = np.ascontiguousarray(records["row"])
        if rows.dtype == "<u2":  # NumPy has no bfloat16, so files hold its bits.
            rows = rows.view(tf.bfloat16.as_numpy_dtype)
        yield ids, rows.astype(np.float32)
