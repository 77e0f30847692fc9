"""load restores a checkpoint on all ranks or on none. read_tables returns all rows to a single process."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint import dense
from tf_fusedrec.checkpoint.consensus import agree
from tf_fusedrec.checkpoint.layers import finds_layers, saved_embeddings
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import gradient_accumulation
from tf_fusedrec.files import table_reader
from tf_fusedrec.files.saves import read_manifest


@finds_layers(2)
def load(
    directory: str | os.PathLike,
    model: keras.Model | FusedEmbedding,
    optimizer: Any = None,
    *,
    save: str | int | None = None,
    partial: bool = False,
    names: Mapping[str, str] | None = None,
    layers: Sequence[FusedEmbedding] = (),
) -> Any:
    """Restores a checkpoint on any number of ranks and with any grouping of tables. Collective.

    Existing rows of the tables are dropped. Tables are matched by name; the model may lack tables of the checkpoint.
    Dense weights that do not exist yet are restored when they are created, so the checkpoint must stay until then.
    Examples are a model before its first call and an optimizer before its first step.

    A refused checkpoint changes nothing. If a table holds rows, this rank's whole part is read and verified before
    they are dropped, which takes memory for that part. Empty tables are filled while rows are read, and emptied again
    on failure.

    Args:
      directory: Folder of the checkpoint.
      model, optimizer, layers: See save.
      save: Name or number of a kept save (tf_fusedrec.checkpoint.saves), or "best"; None: the last one.
      partial: True if tables missing from the checkpoint begin empty; otherwise they are refused.
      names: Name in the checkpoint of each table that has another name now, by this name. Ids that come later begin
        with initial rows of the name now.

    Returns:
      The value `extra` of the save.

    Raises:
      ValueError: `directory` holds no checkpoint or lacks this save; a table is missing or has another spec; `names`
        names a table that the model lacks; dense weights have other shapes; a file is missing, truncated, damaged,
        foreign or forged. The error names the file and the field.
      RuntimeError: another rank refused the checkpoint.
    """
    directory = pathlib.Path(directory)
    embeddings = saved_embeddings(model, layers)
    tables: list[Any] = [lookup.table for layer in embeddings for lookup in layer.lookups]
    names = dict(names or {})
    known = [name for table in tables for name in table.names]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"names has {unknown}, want tables of model {model.name!r}, which has {sorted(known)}.")

    def open_checkpoint() -> tuple[dict[str, Any], list[table_reader.TableReader]]:
        manifest = read_manifest(directory, save)
        readers: list[table_reader.TableReader] = []
        for layer in embeddings:
            of_layer, group = [lookup.table for lookup in layer.lookups], layer.layout.group
            readers += table_reader.open_tables(
                directory, manifest["tables"], of_layer, group.index, group.size, partial, names
            )
        dense.check(directory / manifest["save"], manifest["dense"])
        return manifest, readers

    manifest, readers = agree(open_checkpoint)
    rows = agree(lambda: table_reader.read_all(readers) if table_reader.holds_rows(tables) else None)

    before = dense.state(model, optimizer)
    try:
        agree(lambda: dense.read(directory / manifest["save"], model, optimizer))
    except Exception:
        dense.put_back(before)
        raise
    try:
        agree(lambda: table_reader.restore(readers, tables, rows))
    except Exception:
        dense.put_back(before)
        for table in tables:
            table.clear()
        raise
    gradient_accumulation.forget(optimizer)
    return manifest["extra"]


def read_tables(
    directory: str | os.PathLike, save: str | int | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All rows of a checkpoint, from all ranks that wrote it. Needs no Horovod.

    Args:
      directory: Folder of the checkpoint.
      save: Name or number of a kept save, or "best"; None: the last one.

    Returns:
      {table name: (ids <int64>[n], ascending, and rows <dtype>[n, D])}.

    Raises:
      ValueError: `directory` holds no checkpoint; a file is missing, truncated, damaged or foreign.
    """
    directory = pathlib.Path(directory)
    tables = {}
    for name, described in sorted(read_manifest(directory, save)["tables"].items()):
        reader = table_reader.TableReader(directory, name, described, None, 0, 1).sections["rows"]
        nothing = np.zeros([0], np.int64), np.zeros([0], reader.record)
        chunks = [(ids, records["row"]) for ids, records in [nothing, *reader.chunks()]]
        ids, rows = (np.concatenate(parts) for parts in zip(*chunks))
        order = np.argsort(ids)
        # NumPy has no bfloat16, so files hold its bits.
        tables[name] = ids[order], rows[order].view(tf.bfloat16.as_numpy_dtype) if rows.dtype == "<u2" else rows[order]
    return tables


def dense_prefix(directory: str | os.PathLike, save: str | int | None = None) -> str:
    """Path prefix of the dense weights, for tf.train.Checkpoint.read with root attributes "model" and "optimizer".

    Args:
      directory: Folder of the checkpoint.
      save: Name or number of a kept save, or "best"; None: the last one.

    Raises:
      ValueError: `directory` holds no checkpoint; a dense file is missing or damaged.
    """
    directory = pathlib.Path(directory)
    manifest = read_manifest(directory, save)
    dense.check(directory / manifest["save"], manifest["dense"])
    return str(directory / manifest["save"] / dense.PREFIX)
