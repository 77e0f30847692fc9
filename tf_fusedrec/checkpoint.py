"""Checkpoints of dense weights and tables: sharded, checksummed, atomic, from any number of ranks to any other.

A checkpoint is a folder on a file system that all ranks see:

    manifest.json                      format, ranks, crc32 of every table file, the caller's `extra`
    dense.index, dense.data-*          tf.train.Checkpoint of model and optimizer, written by rank 0
    tables/<table>/<column>-<r>.npy    columns "ids", "rows" and "slot-<name>" of the rows that rank r held

It is written under a temporary name and renamed when complete, so an interrupted save leaves the last one whole.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import zlib
from typing import Any

import numpy as np

from tf_fusedrec import collectives
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.tables.tfra import owner_of

_FORMAT = 1


def _dense(model: keras.Model, optimizer: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=model, **({} if optimizer is None else {"optimizer": optimizer}))


def _iterations(embedding: FusedEmbedding) -> dict[str, int]:
    """Steps that the optimizer of each table has counted: Adam's bias correction and schedules hang on them."""
    counted = {}
    for lookup in embedding.lookups:
        iterations = getattr(lookup.table.optimizer, "iterations", None)
        if iterations is not None:
            counted.update(dict.fromkeys(lookup.table.names, int(iterations.numpy())))
    return counted


def _crc32(path: pathlib.Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _replace(final: pathlib.Path, new: pathlib.Path) -> None:
    """Puts `new` in the place of `final` by renames: at every moment one of them is whole on disk."""
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def save(
    directory: str | os.PathLike,
    model: keras.Model,
    embedding: FusedEmbedding,
    optimizer: Any = None,
    *,
    extra: Any = None,
) -> None:
    """Writes a checkpoint; all ranks call it. A checkpoint that stood in `directory` is replaced at the end, at once.

    Args:
      directory: of the checkpoint, on a file system that all ranks see.
      model: dense weights (its FusedEmbedding layers hold none but the anchor).
      embedding: tables; every rank writes its own rows with their optimizer slots.
      optimizer: of the dense weights, or None.
      extra: JSON-able; given back by load.
    """
    final = pathlib.Path(directory)
    partial = final.with_name(final.name + ".partial")
    if collectives.rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    collectives.barrier()
    checksums = {}
    for lookup in embedding.lookups:
        for table, columns in lookup.table.export().items():
            (partial / "tables" / table).mkdir(parents=True, exist_ok=True)
            for column, values in columns.items():
                path = partial / "tables" / table / f"{column}-{collectives.rank()}.npy"
                # bfloat16 has no npy type of its own; its bits travel as they are and the manifest names the type.
                np.save(path, values.view(np.uint16) if values.dtype == tf.bfloat16.as_numpy_dtype else values)
                checksums[str(path.relative_to(partial))] = [_crc32(path), tf.as_dtype(values.dtype).name]
    if collectives.rank() == 0:
        _dense(model, optimizer).write(str(partial / "dense"))
    # The gather is also the barrier: when it returns, every rank has written its files.
    files = {name: entry for part in collectives.all_gather_object(checksums) for name, entry in part.items()}
    if collectives.rank() == 0:
        manifest = {
            "format": _FORMAT,
            "ranks": collectives.size(),
            "iterations": _iterations(embedding),
            "files": files,
            "extra": extra,
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        _replace(final, partial)
    collectives.barrier()


def read_manifest(directory: str | os.PathLike) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
      ValueError: `directory` holds no checkpoint, or one of another format.
    """
    path = pathlib.Path(directory) / "manifest.json"
    if not path.exists():
        raise ValueError(f"directory must hold a checkpoint, but {path} is missing. Was its save interrupted?")
    manifest = json.loads(path.read_text())
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')}, this version reads {_FORMAT}.")
    return manifest


def _read(directory: pathlib.Path, name: str, entry: list) -> np.ndarray:
    path, (crc, dtype) = directory / name, entry
    if not path.exists() or _crc32(path) != crc:
        state = "is damaged (its checksum differs)" if path.exists() else "is missing"
        raise ValueError(f"Checkpoint file {path} {state}. Restore it, or load another checkpoint.")
    values = np.load(path)
    return values.view(tf.as_dtype(dtype).as_numpy_dtype) if dtype == "bfloat16" else values


def read_shards(directory: str | os.PathLike, table: str) -> list[dict[str, np.ndarray]]:
    """Columns of one table, one dict per rank that wrote the checkpoint.

    Raises:
      ValueError: the checkpoint holds no such table, or a file is missing or damaged.
    """
    directory = pathlib.Path(directory)
    manifest = read_manifest(directory)
    shards: list[dict[str, np.ndarray]] = [{} for _ in range(manifest["ranks"])]
    for name, entry in manifest["files"].items():
        _, owner, file = pathlib.PurePosixPath(name).parts
        if owner == table:
            column, rank = file.removesuffix(".npy").rsplit("-", 1)
            shards[int(rank)][column] = _read(directory, name, entry)
    if not any(shards):
        known = sorted({pathlib.PurePosixPath(name).parts[1] for name in manifest["files"]})
        raise ValueError(f"Checkpoint {directory} holds no table {table!r}. It holds {known}.")
    return shards


def read_tables(directory: str | os.PathLike) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All rows of a checkpoint, of all ranks: table name -> ids <int64>[n], ascending, and rows [n, D]. No Horovod."""
    names = sorted({pathlib.PurePosixPath(name).parts[1] for name in read_manifest(directory)["files"]})
    tables = {}
    for name in names:
        shards = read_shards(directory, name)
        ids = np.concatenate([shard["ids"] for shard in shards])
        order = np.argsort(ids, kind="stable")
        tables[name] = ids[order], np.concatenate([shard["rows"] for shard in shards])[order]
    return tables


def load(directory: str | os.PathLike, model: keras.Model, embedding: FusedEmbedding, optimizer: Any = None) -> Any:
    """Restores what save wrote, on any number of ranks; all ranks call it. Rows that the tables held are dropped.

    Dense weights that do not exist yet (a model that was not called, an optimizer before its first step) are restored
    when they are made.

    Returns:
      `extra` as it was saved.

    Raises:
      ValueError: no checkpoint, a missing table, a missing or damaged file.
    """
    directory = pathlib.Path(directory)
    manifest = read_manifest(directory)
    _dense(model, optimizer).read(str(directory / "dense"))
    for lookup in embedding.lookups:
        lookup.table.clear()
        for table in lookup.table.names:
            for shard in read_shards(directory, table):
                mine = owner_of(shard["ids"], collectives.size()) == collectives.rank()
                lookup.table.import_rows(table, {column: values[mine] for column, values in shard.items()})
        counted = [manifest["iterations"][name] for name in lookup.table.names if name in manifest["iterations"]]
        if counted:
            lookup.table.optimizer.iterations.assign(max(counted))
    collectives.barrier()
    return manifest["extra"]
