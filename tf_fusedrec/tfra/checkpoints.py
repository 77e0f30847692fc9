"""Reads and writes TFRA's table files: native tables take them in and become them, on any number of ranks.

    tfra.import_checkpoint("saved/variables/TFRADynamicEmbedding", embedding)    # on every rank
    tfra.export_checkpoint("for_tfra/TFRADynamicEmbedding", embedding, ranks=2)  # TFRA reads them on two processes

The files are `<variable>_mht_<device>of<devices>_rank<r>_size<R>-keys` and `-values`, raw and little-endian, without a
header. Keys are int64 or int32. Values are [n, D], row by row in the order of the keys. The files name neither dtypes
nor optimizers. The tables that take the rows supply both.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.collectives import agree, on_rank_0
from tf_fusedrec.files.hash_order import OWNERS, tfra_owner
from tf_fusedrec.tables.records import numbers, put_numbers

# New-style SGD's slot has another name in TFRA than in the records of tf_fusedrec.optimizers.
_ALIASES = {"m": "momentum"}


def import_checkpoint(
    folder: str | os.PathLike,
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
      folder: Folder of the files, a SavedModel, or a checkpoint's folder with one TFRADynamicEmbedding folder.
      embedding: Layer with the tables that take the rows.
      names: TFRA layer name by table name. Only the tables listed here are read. None reads every table from the
        layer of the same name.
      slots: True to read slots. Without them, imported rows get the slots of new rows.
      value_dtype: dtype of the files' values where it differs from the table's: "float32", "float16", "bfloat16" or
        "float64".
      key_dtype: dtype of the files' keys: "int64" or "int32".
      iterations: Number of updates that the optimizer had made, which Adam's bias correction needs. TFRA keeps it in
        the TensorFlow checkpoint as optimizer.iterations. None leaves the counter unchanged.

    Returns:
      The number of rows that this rank has taken, by table name.

    Raises:
      ValueError: The folder has no files, or they are incomplete, truncated or from several saves. Or a table has
        no files, the files' slots differ from the table's, or two files hold the same key.
      RuntimeError: The import failed on another rank.

    Examples:
      >>> fr.tfra.export_checkpoint("tfra_files", embedding)
      >>> fr.tfra.import_checkpoint("tfra_files", embedding)
      {'item': 8}
    """
    tables = agree(lambda: tables_of(embedding, names))

    def open_files() -> list[_Source]:
        shards = variables_in(source := folder_of(pathlib.Path(folder)))
        return [
            _Source(source, shards, table, name, layer, slots, value_dtype, np.dtype(key_dtype))
            for name, (table, layer) in tables.items()
        ]

    sources = agree(open_files)
    records_by_source = agree(
        lambda: [list(source.local_rows(collectives.rank(), collectives.size())) for source in sources]
    )

    def restore() -> dict[str, int]:
        rows = {}
        for source, chunks in zip(sources, records_by_source):
            for ids, records in chunks:
                source.table.restore(source.name, "rows", ids, records)
            rows[source.name] = sum(len(ids) for ids, _ in chunks)
            if iterations is not None:
                source.table.optimizer.iterations.assign(iterations)
        return rows

    return agree(restore)


class _Source:
    """The files of one table, checked against it. variables: shards of the folder's files, by variable."""

    def __init__(
        self,
        folder: pathlib.Path,
        variables: Mapping[str, Mapping[Shard, Files]],
        table: Any,
        name: str,
        layer: str,
        slots: bool,
        value_dtype: str | None,
        key_dtype: np.dtype,
    ):
        self.table, self.name, self._key_dtype = table, name, key_dtype
        rows = f"{layer}-parameter"
        if rows not in variables:
            raise ValueError(
                f"{folder} has no variable {rows!r} for table {name!r}. It has {sorted(variables)}. Name the layer: "
                "names={table: layer}."
            )
        spec = table.spec(name)
        self._dim = spec["dim"]
        self._dtype = np.dtype(tf.as_dtype(value_dtype or spec["storage"]).as_numpy_dtype)
        self._rows = variables[rows]
        self._slots: dict[str, Mapping[Shard, Files]] = {}
        prefixes = (f"{rows}_DynamicEmbedding_{layer}-shadow_", f"{rows}_")
        for variable, shards in variables.items():
            prefix = next((p for p in prefixes if variable.startswith(p)), None)
            if slots and prefix is not None:
                slot = variable.removeprefix(prefix)
                self._slots[slot if slot in spec["slots"] else _ALIASES.get(slot, slot)] = shards
        if slots and sorted(self._slots) != sorted(spec["slots"]):
            raise ValueError(
                f"{folder} has slots {sorted(self._slots)} for layer {layer!r}, but table {name!r} is trained by "
                f"{spec['optimizer']}, which has {sorted(spec['slots'])}. Give the table the optimizer of the "
                "checkpoint, or take rows alone: slots=False."
            )
        for shards in (self._rows, *self._slots.values()):
            if set(shards) != set(self._rows):
                raise ValueError(
                    f"{folder}: slots of layer {layer!r} were saved by another number of ranks than its rows."
                )
            for pair in shards.values():
                self._read(pair)

    def _read(self, pair: Files) -> tuple[np.ndarray, np.ndarray]:
        return read_files(pair, self._dim, self._dtype, self._key_dtype)

    def local_rows(self, rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields ids <int64>[n] and records of the rows that `rank` owns, shard by shard."""
        all_ids = np.zeros([0], np.int64)
        for shard, pair in self._rows.items():
            keys, rows = self._read(pair)
            kept = np.flatnonzero(OWNERS[self.table.owner](keys, ranks) == rank)
            ids = keys[kept]
            all_ids = np.concatenate([all_ids, ids])
            records = self.table.new_records(self.name, len(ids))
            put_numbers(records, "row", np.asarray(rows[kept]), slice(None))
            for slot, shards in self._slots.items():
                slot_keys, values = self._read(shards[shard])
                order = np.argsort(slot_keys)
                at = np.minimum(np.searchsorted(slot_keys, ids, sorter=order), max(len(order) - 1, 0))
                has = np.flatnonzero(slot_keys[order][at] == ids) if len(order) else np.zeros([0], np.int64)
                put_numbers(records, slot, np.asarray(values[order[at[has]]]), has)
            yield ids, records
        distinct, counts = np.unique(all_ids, return_counts=True)
        if len(all_ids) > len(distinct):
            raise ValueError(
                f"Key {distinct[counts > 1][0]} of table {self.name!r} is in the files of two ranks. Every rank must "
                "save its own rows: FileSystemSaver(proc_size=hvd.size(), proc_rank=hvd.rank())."
            )


def tables_of(embedding: FusedEmbedding, names: Mapping[str, str] | None) -> dict[str, tuple[Any, str]]:
    """Returns the native table and the TFRA layer name for each table name."""
    tables = {name: group.table for group in embedding.internals.groups for name in group.table.names}
    unknown = sorted(set(names or {}) - set(tables))
    if unknown:
        raise ValueError(f"names must name tables of {embedding.name!r}, got {unknown}. Its tables: {sorted(tables)}.")
    layers = dict(names) if names is not None else {name: name for name in tables}
    return {name: (tables[name], layer) for name, layer in sorted(layers.items())}


def export_checkpoint(
    folder: str | os.PathLike,
    embedding: FusedEmbedding,
    *,
    ranks: int | None = None,
    names: Mapping[str, str] | None = None,
    slots: bool = True,
    short_file_name: bool = False,
) -> None:
    """Writes tables as files that TFRA's FileSystemSaver reads on `ranks` processes. Collective.

    Each row goes into the file of the rank that TFRA's default partition function names. TFRA does not check owners
    when it finds as many files as processes.

    Args:
      folder: Folder of the files, on a file system that all ranks see. It must be missing or empty, because TFRA
        merges all files that it finds there.
      embedding: Layer with the tables to write.
      ranks: Number of processes that will load the files. None means as many as now.
      names: TFRA layer name by table name, as in import_checkpoint.
      slots: True to write the optimizer's slots.
      short_file_name: `short_file_name` of the TFRA layers. The names of the slots' files depend on it.

    Raises:
      ValueError: The folder has files, `ranks` is below 1, or TFRA has no tables for the optimizer's slots.
      OSError, RuntimeError: The write failed here or on another rank. `folder` is removed.
    """
    folder = pathlib.Path(folder)
    targets = collectives.size() if ranks is None else ranks
    tables = agree(lambda: _checked_targets(embedding, names, targets, slots))

    def make_folder() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"folder {folder} holds files, which TFRA would merge; it must be missing or empty. Remove it, or "
                "name another."
            )
        folder.mkdir(parents=True, exist_ok=True)

    on_rank_0(make_folder)
    rank, size = collectives.rank(), collectives.size()
    try:
        written = agree(lambda: _write_parts(folder, tables, targets, rank, slots, short_file_name))
        agree(lambda: _join_parts(folder, [name for name, target in written if target % size == rank], size))
    except Exception:
        collectives.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _checked_targets(
    embedding: FusedEmbedding, names: Mapping[str, str] | None, ranks: int, slots: bool
) -> dict[str, tuple[Any, str]]:
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an int >= 1, got {ranks!r}.")
    tables = tables_of(embedding, names)
    for name, (table, _) in tables.items():
        narrow = [s for s in table.spec(name)["slots"] if not table.record_dtype("rows")[s].shape]
        if slots and narrow:
            raise ValueError(
                f"slots {narrow} of table {name!r} are one number per row; TFRA's slots have the row's shape. Write "
                "rows alone: slots=False."
            )
    return tables


def _write_parts(
    folder: pathlib.Path, tables: Mapping[str, tuple[Any, str]], targets: int, rank: int, slots: bool, short: bool
) -> list[tuple[str, int]]:
    """Writes this rank's part of every file and returns (file name, target rank) of all files, equal on all ranks."""
    names = []
    for name, (table, layer) in tables.items():
        ids, records = table.snapshot(name, in_hash_order=False)
        # TFRA stores slots in the dtype of rows. The slots of a native table may be narrower (bfloat16 bits).
        dtype = tf.as_dtype(table.spec(name)["storage"]).as_numpy_dtype
        owner = tfra_owner(ids, targets)
        between = "_" if short else f"_DynamicEmbedding_{layer}-shadow_"
        fields = {"row": f"{layer}-parameter"}
        if slots:
            fields.update({slot: f"{layer}-parameter{between}{slot}" for slot in table.spec(name)["slots"]})
        for target in range(targets):
            rows = np.flatnonzero(owner == target)
            for field, variable in fields.items():
                values = numbers(records[field][rows])
                for part, array in (("keys", ids[rows]), ("values", values.astype(dtype))):
                    names.append((file_name(variable, target, targets, part), target))
                    array.tofile(folder / f"{names[-1][0]}.part{rank}")
    return names


def _join_parts(folder: pathlib.Path, names: list[str], size: int) -> None:
    """Concatenates the parts that all ranks have written."""
    for name in names:
        with (folder / name).open("wb") as joined:
            for rank in range(size):
                part = folder / f"{name}.part{rank}"
                with part.open("rb") as file:
                    shutil.copyfileobj(file, joined)
                part.unlink()


_NAME = re.compile(
    r"(?P<variable>.+)_mht_(?P<device>\d+)of(?P<devices>\d+)_rank(?P<rank>\d+)_size(?P<ranks>\d+)-(?P<part>keys|values)"
)


class Shard(NamedTuple):
    """The part of a variable in a pair of files."""

    rank: int
    device: int  # 1 .. devices
    ranks: int
    devices: int


class Files(NamedTuple):
    """The pair of files of one shard."""

    keys: pathlib.Path
    values: pathlib.Path


def file_name(variable: str, rank: int, ranks: int, part: str) -> str:
    """The file name for a variable with one table per rank; `part` is "keys" or "values"."""
    return f"{variable.replace('/', '_')}_mht_1of1_rank{rank}_size{ranks}-{part}"


def folder_of(directory: pathlib.Path) -> pathlib.Path:
    """The folder of the table files: `directory`, or a SavedModel's or one checkpoint's TFRADynamicEmbedding folder."""
    candidates = [directory, directory / "variables" / "TFRADynamicEmbedding", *directory.glob("TFRADynamicEmbedding*")]
    folders = sorted({folder for folder in candidates if any(folder.glob("*_mht_*-keys"))})
    if not folders:
        raise ValueError(
            f"{directory} has no TFRA table files (*_mht_*-keys). Save with a FileSystemSaver in the layer's "
            "kv_creator, and pass the TFRADynamicEmbedding folder or its parent."
        )
    if len(folders) > 1:
        raise ValueError(
            f"{directory} has TFRA table files of several checkpoints: {[f.name for f in folders]}. Name one."
        )
    return folders[0]


def variables_in(folder: pathlib.Path) -> dict[str, dict[Shard, Files]]:
    """The shards of every variable in a folder."""
    variables: dict[str, dict[Shard, dict[str, pathlib.Path]]] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match:
            shard = Shard(*(int(match[field]) for field in Shard._fields))
            variables.setdefault(match["variable"], {}).setdefault(shard, {})[match["part"]] = path
    return {variable: _checked(folder, variable, shards) for variable, shards in variables.items()}


def _checked(
    folder: pathlib.Path, variable: str, shards: Mapping[Shard, Mapping[str, pathlib.Path]]
) -> dict[Shard, Files]:
    """Refuses missing files, and files of two saves with different numbers of ranks, which TFRA would merge."""
    layouts = sorted({(shard.ranks, shard.devices) for shard in shards})
    if len(layouts) > 1:
        raise ValueError(
            f"Variable {variable!r} in {folder} was saved by different numbers of ranks, {[r for r, _ in layouts]}: "
            "files of an older save were left there. Remove them."
        )
    ((ranks, devices),) = layouts
    for rank in range(ranks):
        for device in range(1, devices + 1):
            files = shards.get(Shard(rank, device, ranks, devices), {})
            missing = sorted({"keys", "values"} - set(files))
            if missing:
                raise ValueError(
                    f"Variable {variable!r} in {folder} lacks the {' and '.join(missing)} of rank {rank} of {ranks}. "
                    "Every rank must save, with its own proc_rank in FileSystemSaver."
                )
    return {shard: Files(files["keys"], files["values"]) for shard, files in sorted(shards.items())}


def read_files(files: Files, dim: int, dtype: np.dtype, key_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Keys <int64>[n] and values <dtype>[n, D]. The values are memory-mapped and not read yet."""
    key_bytes, value_bytes = (path.stat().st_size for path in files)
    rows, rest = divmod(value_bytes, dim * dtype.itemsize)
    if rest or key_bytes != rows * key_dtype.itemsize:
        raise ValueError(
            f"{files.values.name} has {value_bytes} bytes and {files.keys.name} {key_bytes}, which are not "
            f"{key_dtype.name} keys and rows of {dim} {dtype.name}s each. It is truncated, or the table has another "
            "dim, value_dtype or key_dtype."
        )
    if not rows:
        return np.zeros([0], np.int64), np.zeros([0, dim], dtype)
    keys = np.fromfile(files.keys, key_dtype).astype(np.int64)
    return keys, np.memmap(files.values, dtype, mode="r", shape=(rows, dim))
