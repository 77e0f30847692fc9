"""Writes native tables, with their optimizer slots, as TFRA's table files for any number of TFRA processes.

tfra.export_checkpoint("for_tfra/TFRADynamicEmbedding", embedding, ranks=2)  # TFRA reads them on two processes
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.checkpoint.consensus import agree, on_rank_0
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.files.hash_order import tfra_owner
from tf_fusedrec.tfra import table_files
from tf_fusedrec.tfra.importing import slots_of, tables_of


def export_checkpoint(
    directory: str | os.PathLike,
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
      directory: Folder of the files, on a file system that all ranks see. It must be missing or empty, because TFRA
        merges all files that it finds there.
      embedding: Layer whose tables are written.
      ranks: Number of processes that will load the files. None means as many as now.
      names: TFRA layer name by table name, as in import_checkpoint.
      slots: True to write the optimizer's slots.
      short_file_name: `short_file_name` of the TFRA layers. The names of the slots' files depend on it.

    Raises:
      ValueError: The directory holds files, `ranks` is below 1, or TFRA has no tables for the optimizer's slots.
      OSError, RuntimeError: The write failed here or on another rank. `directory` is removed.
    """
    folder = pathlib.Path(directory)
    targets = collectives.size() if ranks is None else ranks
    wanted = agree(lambda: _checked_targets(embedding, names, targets, slots))

    def begun() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"directory {folder} holds files, which TFRA would merge; it must be missing or empty. Remove it, or "
                "name another."
            )
        folder.mkdir(parents=True, exist_ok=True)

    on_rank_0(begun)
    rank, size = collectives.rank(), collectives.size()
    try:
        written = agree(lambda: _write_parts(folder, wanted, targets, rank, slots, short_file_name))
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
    wanted = tables_of(embedding, names)
    for name, (table, _) in wanted.items():
        narrow = [s for s in slots_of(table, name) if not table.record_dtype("rows")[s].shape]
        if slots and narrow:
            raise ValueError(
                f"slots {narrow} of table {name!r} are one number per row; TFRA's slots have the row's shape. Write "
                "rows alone: slots=False."
            )
    return wanted


def _write_parts(
    folder: pathlib.Path, wanted: Mapping[str, tuple[Any, str]], targets: int, rank: int, slots: bool, short: bool
) -> list[tuple[str, int]]:
    """Writes this rank's part of every file and returns (file name, target rank) of all files, equal on all ranks."""
    names = []
    for name, (table, layer) in wanted.items():
        ids, records = table.snapshot(name, in_hash_order=False)
        owner = tfra_owner(ids, targets)
        between = "_" if short else f"_DynamicEmbedding_{layer}-shadow_"
        fields = {"row": f"{layer}-parameter"}
        if slots:
            fields.update({slot: f"{layer}-parameter{between}{slot}" for slot in slots_of(table, name)})
        for target in range(targets):
            mine = np.flatnonzero(owner == target)
            for field, variable in fields.items():
                values = _as_stored(table, name, np.ascontiguousarray(records[field][mine]))
                for kind, array in (("keys", ids[mine]), ("values", values)):
                    names.append((table_files.file_name(variable, target, targets, kind), target))
                    array.tofile(folder / f"{names[-1][0]}.part{rank}")
    return names


def _as_stored(table: Any, name: str, values: np.ndarray) -> np.ndarray:
    """Casts a field to the rows' dtype, because TFRA stores slots in it and ours may be narrower (bfloat16 bits)."""
    dtype = tf.as_dtype(table.spec(name)["storage"])
    if values.dtype == np.dtype("<u2"):
        values = values.view(tf.bfloat16.as_numpy_dtype)
    return values.astype(dtype.as_numpy_dtype)


def _join_parts(folder: pathlib.Path, names: list[str], size: int) -> None:
    """Concatenates the parts that all ranks have written into whole files."""
    for name in names:
        with (folder / name).open("wb") as whole:
            for rank in range(size):
                part = folder / f"{name}.part{rank}"
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
                part.unlink()
