"""Reads TFRA's table files, rows and optimizer slots, into native tables on any number of ranks.

    tfra.import_checkpoint("saved/variables/TFRADynamicEmbedding", embedding)  # on every rank

TFRA's files name neither dtypes nor optimizers. The tables that take the rows supply both.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.checkpoint.consensus import agree
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.files.hash_order import OWNERS
from tf_fusedrec.tfra import table_files

# New-style SGD's slot has another name in TFRA than in the records of tf_fusedrec.optimizers.
_ALIASES = {"m": "momentum"}


def import_checkpoint(
    directory: str | os.PathLike,
    embedding: FusedEmbedding,
    *,
    names: Mapping[str, str] | None = None,
    slots: bool = True,
    value_dtype: str | None = None,
    key_dtype: str = "int64",
    iterations: int | None = None,
) -> dict[str, int]:
    """Reads tables and slots that TFRA's FileSystemSaver wrote on any number of ranks. Collective.

    Every rank reads all files and keeps the rows that it owns. Rows of ids that the files lack stay unchanged. A
    refused file changes no table.

    Args:
      directory: Folder of the files, a SavedModel, or a checkpoint's folder with one TFRADynamicEmbedding folder.
      embedding: Layer whose tables take the rows.
      names: TFRA layer name by table name. Only the tables listed here are read. None reads every table from the
        layer of its own name.
      slots: True to read slots. Without them, imported rows get the slots of new rows.
      value_dtype: dtype of the files' values where it differs from the table's: "float32", "float16", "bfloat16" or
        "float64".
      key_dtype: dtype of the files' keys: "int64" or "int32".
      iterations: Number of updates that the optimizer had made, which Adam's bias correction needs. TFRA keeps it in
        the TensorFlow checkpoint as optimizer.iterations. None leaves the counter unchanged.

    Returns:
      The number of rows that this rank has taken, by table name.

    Raises:
      ValueError: The directory has no files, or they are incomplete, truncated or from several saves. Or a table has
        no files, the files' slots differ from the table's, or two files hold the same key.
      RuntimeError: The import failed on another rank.
    """
    wanted = agree(lambda: tables_of(embedding, names))

    def opened() -> list[_Source]:
        found = table_files.variables_in(folder := table_files.folder_of(pathlib.Path(directory)))
        return [
            _Source(folder, found, table, name, layer, slots, value_dtype, np.dtype(key_dtype))
            for name, (table, layer) in wanted.items()
        ]

    sources = agree(opened)
    read = agree(lambda: [list(source.mine(collectives.rank(), collectives.size())) for source in sources])

    def taken() -> dict[str, int]:
        rows = {}
        for source, chunks in zip(sources, read):
            for ids, records in chunks:
                source.table.restore(source.name, "rows", ids, records)
            rows[source.name] = sum(len(ids) for ids, _ in chunks)
            if iterations is not None:
                source.table.optimizer.iterations.assign(iterations)
        return rows

    return agree(taken)


class _Source:
    """The files of one table, checked against it."""

    def __init__(
        self,
        folder: pathlib.Path,
        found: Mapping[str, Mapping[table_files.Shard, table_files.Files]],
        table: Any,
        name: str,
        layer: str,
        slots: bool,
        value_dtype: str | None,
        key_dtype: np.dtype,
    ):
        self.table, self.name, self._key_dtype = table, name, key_dtype
        variable = f"{layer}-parameter"
        if variable not in found:
            raise ValueError(
                f"{folder} has no variable {variable!r} for table {name!r}. It has {sorted(found)}. Name the layer: "
                "names={table: layer}."
            )
        record = table.record_dtype("rows")
        self._dim = table.spec(name)["dim"]
        stored = table.spec(name)["storage"] if value_dtype is None else value_dtype
        self._dtype = tf.as_dtype(stored).as_numpy_dtype
        self._rows = found[variable]
        own = slots_of(table, name)
        prefixes = (f"{variable}_DynamicEmbedding_{layer}-shadow_", f"{variable}_")
        theirs: dict[str, Mapping[table_files.Shard, table_files.Files]] = {}
        for other, shards in found.items():
            prefix = next((p for p in prefixes if other.startswith(p)), None)
            if prefix is not None:
                slot = other.removeprefix(prefix)
                theirs[_ALIASES.get(slot, slot) if slot not in own else slot] = shards
        if slots and sorted(theirs) != sorted(own):
            raise ValueError(
                f"{folder} has slots {sorted(theirs)} for layer {layer!r}, but table {name!r} is trained by "
                f"{table.spec(name)['optimizer']}, which has {sorted(own)}. Give the table the optimizer of the "
                "checkpoint, or take rows alone: slots=False."
            )
        self._slots = theirs if slots else {}
        self._record = record
        for shards in (self._rows, *self._slots.values()):
            if set(shards) != set(self._rows):
                raise ValueError(
                    f"{folder}: slots of layer {layer!r} were saved by another number of ranks than its rows."
                )
            for pair in shards.values():
                self._read(pair)

    def _read(self, pair: table_files.Files) -> tuple[np.ndarray, np.ndarray]:
        return table_files.read(pair, self._dim, np.dtype(self._dtype), self._key_dtype)

    def mine(self, rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields ids <int64>[n] and records of the rows that `rank` owns, shard by shard."""
        seen = np.zeros([0], np.int64)
        for shard, pair in self._rows.items():
            keys, rows = self._read(pair)
            kept = np.flatnonzero(OWNERS[self.table.owner](keys, ranks) == rank)
            ids = keys[kept]
            seen = np.concatenate([seen, ids])
            records = self.table.new_records(self.name, len(ids))
            _put(records, "row", np.asarray(rows[kept]), slice(None))
            for slot, shards in self._slots.items():
                slot_keys, values = self._read(shards[shard])
                order = np.argsort(slot_keys)
                at = np.minimum(np.searchsorted(slot_keys, ids, sorter=order), max(len(order) - 1, 0))
                has = np.flatnonzero(slot_keys[order][at] == ids) if len(order) else np.zeros([0], np.int64)
                _put(records, slot, np.asarray(values[order[at[has]]]), has)
            yield ids, records
        repeated, counts = np.unique(seen, return_counts=True)
        if len(seen) > len(repeated):
            raise ValueError(
                f"Key {repeated[counts > 1][0]} of table {self.name!r} is in the files of two ranks. Every rank must "
                "save its own rows: FileSystemSaver(proc_size=hvd.size(), proc_rank=hvd.rank())."
            )


def _put(records: np.ndarray, field: str, values: np.ndarray, at: Any) -> None:
    """Sets a field, rounded to the table's storage dtype. Tables store bfloat16 as uint16 bits."""
    if records[field].dtype == np.dtype("<u2"):
        values = values.astype(tf.bfloat16.as_numpy_dtype).view(np.uint16)
    records[field][at] = values


def slots_of(table: Any, name: str) -> list[str]:
    return list(table.spec(name)["slots"])


def tables_of(embedding: FusedEmbedding, names: Mapping[str, str] | None) -> dict[str, tuple[Any, str]]:
    """Returns the native table and the TFRA layer name for each table name."""
    tables = {name: lookup.table for lookup in embedding.lookups for name in lookup.table.names}
    unknown = sorted(set(names or {}) - set(tables))
    if unknown:
        raise ValueError(f"names must name tables of {embedding.name!r}, got {unknown}. Its tables: {sorted(tables)}.")
    layers = dict(names) if names is not None else {name: name for name in tables}
    return {name: (tables[name], layer) for name, layer in sorted(layers.items())}
