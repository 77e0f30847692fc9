"""Gathers the rows of all ranks through files: each rank writes its own rows, and rank 0 reads all of them."""

from __future__ import annotations

import pathlib

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.tables.hash_order import hash_range_owner


def write_own_rows(folder: pathlib.Path, embedding: FusedEmbedding, table: str) -> None:
    """Writes this rank's rows of one table. Ranks with replicas of the same rows write a part each."""
    ids, rows = embedding.export_table(table)
    if embedding.layout.replicas.size > 1:
        own = hash_range_owner(ids, collectives.size()) == embedding.layout.piece
        ids, rows = ids[own], rows[own]
    np.save(_file(folder, table, "ids", collectives.rank()), ids)
    # NumPy would write bfloat16 as untyped bytes.
    np.save(_file(folder, table, "rows", collectives.rank()), rows.view(np.uint16) if _is_bfloat16(rows) else rows)


def read_all_rows(folder: pathlib.Path, table: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads ids <int64>[n], ascending, and rows <dtype>[n, D] of all ranks."""
    ids, rows = (
        np.concatenate([np.load(_file(folder, table, kind, rank)) for rank in range(collectives.size())])
        for kind in ("ids", "rows")
    )
    order = np.argsort(ids)
    return ids[order], rows[order].view(tf.as_dtype(dtype).as_numpy_dtype)


def _file(folder: pathlib.Path, table: str, kind: str, rank: int) -> pathlib.Path:
    return folder / f"{table}.{kind}.{rank}.npy"


def _is_bfloat16(rows: np.ndarray) -> bool:
    return rows.dtype == tf.bfloat16.as_numpy_dtype
