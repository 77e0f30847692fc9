"""Rows of all ranks in one place: each writes its own below a folder that all see, and rank 0 reads them in order."""

from __future__ import annotations

import pathlib

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.tables.hash_order import hash_range_owner


def write_share(folder: pathlib.Path, embedding: FusedEmbedding, table: str) -> None:
    """Writes this rank's rows of one table; of rows that other ranks hold, too, its part."""
    ids, rows = embedding.export_table(table)
    if embedding.place.replicas.size > 1:
        mine = hash_range_owner(ids, collectives.size()) == embedding.place.piece
        ids, rows = ids[mine], rows[mine]
    np.save(_file(folder, table, "ids", collectives.rank()), ids)
    # NumPy has no bfloat16 of its own, and would write it as bytes without a type.
    np.save(_file(folder, table, "rows", collectives.rank()), rows.view(np.uint16) if _is_bfloat16(rows) else rows)


def read_shares(folder: pathlib.Path, table: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """ids <int64>[n], ascending, and rows <dtype>[n, D] of all ranks."""
    ids, rows = (
        np.concatenate([np.load(_file(folder, table, what, rank)) for rank in range(collectives.size())])
        for what in ("ids", "rows")
    )
    order = np.argsort(ids)
    return ids[order], rows[order].view(tf.as_dtype(dtype).as_numpy_dtype)


def _file(folder: pathlib.Path, table: str, what: str, rank: int) -> pathlib.Path:
    return folder / f"{table}.{what}.{rank}.npy"


def _is_bfloat16(rows: np.ndarray) -> bool:
    return rows.dtype == tf.bfloat16.as_numpy_dtype
