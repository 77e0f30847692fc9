"""load restores a checkpoint on all ranks or on none. read_tables returns all rows to a single process."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.checkpoint import dense
from tf_fusedrec.checkpoint.layers import saved_embeddings
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import dense_gradients
from tf_fusedrec.exchange.collectives import agree
from tf_fusedrec.files.saves import read_manifest
from tf_fusedrec.files.table_reader import Chunk, TableReader, prefetched
from tf_fusedrec.tables.records import numbers, restore_counters


class TableToLoad(NamedTuple):
    """One table of a backend, and the reader of its rows on this rank."""

    backend: Any
    name: str
    reader: TableReader


def load(
    folder: str | os.PathLike,
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

    A refused checkpoint changes nothing. If a table has rows, this rank's complete part is read and verified before
    they are dropped, which takes memory for that part. Empty tables are filled while rows are read, and emptied again
    on failure.

    Args:
      folder: Folder of the checkpoint.
      model, optimizer, layers: See save.
      save: Name or number of a kept save (tf_fusedrec.checkpoint.saves), or "best"; None: the last one.
      partial: True if tables missing from the checkpoint begin empty; otherwise they are refused.
      names: Name in the checkpoint of each table that was saved under a different name, by its present name. New ids
        get the initial rows of the present name.

    Returns:
      The value `extra` of the save.

    Raises:
      ValueError: `folder` has no checkpoint or lacks this save; a table is missing or has another spec; `names`
        names a table that the model lacks; dense weights have other shapes; a file is missing, truncated, damaged,
        foreign or forged. The error names the file and the field.
      RuntimeError: another rank refused the checkpoint.
    """
    folder = pathlib.Path(folder)
    embeddings = saved_embeddings(model, layers, optimizer)
    backends: list[Any] = [group.table for layer in embeddings for group in layer.internals.groups]
    names = dict(names or {})
    known = [name for backend in backends for name in backend.names]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"names has {unknown}, want tables of model {model.name!r}, which has {sorted(known)}.")

    def open_checkpoint() -> tuple[dict[str, Any], list[TableToLoad]]:
        manifest = read_manifest(folder, save)
        tables: list[TableToLoad] = []
        for layer in embeddings:
            of_layer, group = [group.table for group in layer.internals.groups], layer.layout.group
            tables += open_tables(folder, manifest["tables"], of_layer, group.index, group.size, partial, names)
        dense.check(folder / manifest["save"], manifest["dense"])
        return manifest, tables

    manifest, tables = agree(open_checkpoint)

    def read_before_dropping() -> dict[tuple[str, str], list[Chunk]] | None:
        if not any(backend.size(name) for backend in backends for name in backend.names):
            return None
        return {
            (name, section): list(reader.chunks(section))
            for _, name, reader in tables for section in reader.sections
        }  # fmt: skip

    rows = agree(read_before_dropping)
    before = dense.state(model, optimizer)
    try:
        agree(lambda: dense.read(folder / manifest["save"], model, optimizer))
    except Exception:
        dense.put_back(before)
        raise
    try:
        agree(lambda: restore(tables, backends, rows))
    except Exception:
        dense.put_back(before)
        for backend in backends:
            backend.clear()
        raise
    dense_gradients.forget(optimizer)
    return manifest["extra"]


def open_tables(
    folder: pathlib.Path,
    described: Mapping[str, Any],
    backends: Sequence[Any],
    rank: int,
    ranks: int,
    partial: bool = False,
    names: Mapping[str, str] | None = None,
) -> list[TableToLoad]:
    """Opens one rank's readers of all tables; arguments as for load. Makes every check that needs no rows."""
    names, tables = names or {}, []
    for backend in backends:
        for name in backend.names:
            saved_name = names.get(name, name)
            if saved_name not in described:
                if partial and name not in names:
                    continue
                raise ValueError(
                    f"Checkpoint {folder} holds no table {saved_name!r}. It holds {sorted(described)}. To start "
                    "with an empty table, load with partial=True; to load a table of another name, with "
                    f"names={{{name!r}: <its name there>}}."
                )
            spec, saved = json.loads(json.dumps(backend.spec(name))), described[saved_name]["spec"]
            if spec != saved:
                called = f"Table {name!r}" if saved_name == name else f"Table {name!r} (saved as {saved_name!r})"
                raise ValueError(
                    f"{called} of checkpoint {folder} has another spec. Saved: {saved}. Now: {spec}. Use the "
                    "saved spec, or load the rows alone with tf_fusedrec.checkpoint.warm_start."
                )
            reader = TableReader(
                folder, saved_name, described[saved_name], rank, ranks, owner=backend.owner,
                records={section: backend.record_dtype(section) for section in backend.sections_of(name)},
                id_bits=getattr(backend, "id_bits", 64),
            )  # fmt: skip
            tables.append(TableToLoad(backend, name, reader))
    return tables


def restore(
    tables: Sequence[TableToLoad],
    backends: Sequence[Any],
    rows: Mapping[tuple[str, str], list[Chunk]] | None = None,
) -> None:
    """Replaces the contents of the backends by `rows`, by table and section, or by rows that are read now."""
    for backend in backends:
        backend.clear()
    for backend, name, reader in tables:
        for section in reader.sections:
            for ids, records in prefetched(reader.chunks(section)) if rows is None else rows[name, section]:
                backend.restore(name, section, ids, records)
    for backend in backends:
        if saved := [reader.described for of_table, _, reader in tables if of_table is backend]:
            restore_counters(backend, saved)


class SavedRows(NamedTuple):
    """All rows of a table, by ascending id. Tables of TFRA count no lookups, so the last three are None."""

    ids: np.ndarray  # <int64>[n]
    rows: np.ndarray  # <dtype>[n, D]
    lookups: np.ndarray | None = None  # <uint32>[n], in training, after any decay
    last: np.ndarray | None = None  # <uint32>[n], step of the last lookup
    updated: np.ndarray | None = None  # <uint32>[n], change of the last update; every update of the table is a change


def read_tables(folder: str | os.PathLike, save: str | int | None = None) -> dict[str, SavedRows]:
    """All rows of a checkpoint, from all ranks that wrote it. Needs no Horovod.

    Args:
      folder: Folder of the checkpoint.
      save: Name or number of a kept save, or "best"; None: the last one.

    Returns:
      {table name: SavedRows}.

    Raises:
      ValueError: `folder` has no checkpoint; a file is missing, truncated, damaged or foreign.
    """
    folder = pathlib.Path(folder)
    tables = {}
    for name, described in sorted(read_manifest(folder, save)["tables"].items()):
        reader = TableReader(folder, name, described)
        record = reader.record_dtype("rows")
        fields = [field for field in ("row", "count", "last", "updated") if field in (record.names or ())]
        empty = np.zeros([0], np.int64), np.zeros([0], record)
        chunks = [(ids, *(records[field] for field in fields)) for ids, records in [empty, *reader.chunks()]]
        ids, rows, *counters = (np.concatenate(parts) for parts in zip(*chunks))
        order = np.argsort(ids)
        tables[name] = SavedRows(ids[order], numbers(rows[order]), *(counter[order] for counter in counters))
    return tables


def dense_prefix(folder: str | os.PathLike, save: str | int | None = None) -> str:
    """Path prefix of the dense weights, for tf.train.Checkpoint.read with root attributes "model" and "optimizer".

    Args:
      folder: Folder of the checkpoint.
      save: Name or number of a kept save, or "best"; None: the last one.

    Raises:
      ValueError: `folder` has no checkpoint; a dense file is missing or damaged.
    """
    folder = pathlib.Path(folder)
    manifest = read_manifest(folder, save)
    dense.check(folder / manifest["save"], manifest["dense"])
    return str(folder / manifest["save"] / dense.PREFIX)
