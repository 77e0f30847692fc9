"""load: every rank reads its share of a checkpoint, all of them or none. read_tables: all rows, for one process."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint import dense, shares
from tf_fusedrec.checkpoint.agreement import agree
from tf_fusedrec.checkpoint.folders import read_manifest
from tf_fusedrec.checkpoint.layers import embeddings_of, finds_layers
from tf_fusedrec.embedding import FusedEmbedding


@finds_layers(2)
def load(
    directory: str | os.PathLike,
    model: keras.Model | FusedEmbedding,
    optimizer: Any = None,
    *,
    save: str | int | None = None,
    partial: bool = False,
    layers: Sequence[FusedEmbedding] = (),
) -> Any:
    """Restores what was saved, on any ranks in any groups; all ranks call it. Rows that the tables held are dropped.

    Tables are known by name; those of the checkpoint that the model does not have are left alone. Dense weights that do
    not exist yet (a model that was not called, an optimizer before its first step) are restored when they are made, so
    the checkpoint must stand until then.

    A checkpoint that is refused changes nothing. Where tables hold rows, all is read and verified before they are
    dropped, which takes memory for this rank's share. Empty tables are filled as rows are read, and emptied again.

    Args:
      directory: of the checkpoint.
      model, optimizer, layers: as for save.
      save: which of the saves that are kept, by name or number (tf_fusedrec.checkpoint.saves); None: the last one.
      partial: whether tables that the checkpoint does not hold begin empty; otherwise they are refused.

    Returns:
      `extra` as it was saved.

    Raises:
      ValueError: no checkpoint, or no such save; a missing table or one of another spec; dense weights of other shapes;
        a file that is missing, truncated, damaged, foreign or forged, named with its field.
      RuntimeError: another rank has refused the checkpoint.
    """
    directory = pathlib.Path(directory)
    embeddings = embeddings_of(model, layers)
    tables: list[Any] = [lookup.table for layer in embeddings for lookup in layer.lookups]

    def opened() -> tuple[dict[str, Any], list[shares.TableShare]]:
        manifest = read_manifest(directory, save)
        mine: list[shares.TableShare] = []
        for layer in embeddings:
            of_layer, group = [lookup.table for lookup in layer.lookups], layer.place.group
            mine += shares.open_tables(directory, manifest["tables"], of_layer, group.index, group.size, partial)
        dense.check(directory / manifest["save"], manifest["dense"])
        return manifest, mine

    manifest, mine = agree(opened)
    rows = agree(lambda: shares.staged(mine) if shares.holds_rows(tables) else None)

    before = dense.state(model, optimizer)
    try:
        agree(lambda: dense.read(directory / manifest["save"], model, optimizer))
    except Exception:
        dense.put_back(before)
        raise
    try:
        agree(lambda: shares.restore(mine, tables, rows))
    except Exception:
        dense.put_back(before)
        for table in tables:
            table.clear()
        raise
    return manifest["extra"]


def read_tables(
    directory: str | os.PathLike, save: str | int | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All rows of a checkpoint, of all ranks: table name -> ids <int64>[n], ascending, and rows [n, D]. No Horovod.

    Args:
      directory: of the checkpoint.
      save: as for load.

    Raises:
      ValueError: no checkpoint; a missing, truncated, damaged or foreign file.
    """
    directory = pathlib.Path(directory)
    tables = {}
    for name, described in sorted(read_manifest(directory, save)["tables"].items()):
        source = shares.TableShare(directory, name, described, None, 0, 1).sections["rows"]
        nothing = np.zeros([0], np.int64), np.zeros([0], source.record)
        chunks = [(ids, records["row"]) for ids, records in [nothing, *source.chunks()]]
        ids, rows = (np.concatenate(parts) for parts in zip(*chunks))
        order = np.argsort(ids)
        # bfloat16 is no type of NumPy; its bits travel as they are.
        tables[name] = ids[order], rows[order].view(tf.bfloat16.as_numpy_dtype) if rows.dtype == "<u2" else rows[order]
    return tables


def dense_prefix(directory: str | os.PathLike, save: str | int | None = None) -> str:
    """Where tf.train.Checkpoint.read finds the dense weights of a checkpoint: root attributes "model" and "optimizer".

    Args:
      directory: of the checkpoint.
      save: as for load.

    Raises:
      ValueError: no checkpoint, or a dense file that is missing or damaged.
    """
    directory = pathlib.Path(directory)
    manifest = read_manifest(directory, save)
    dense.check(directory / manifest["save"], manifest["dense"])
    return str(directory / manifest["save"] / dense.PREFIX)
