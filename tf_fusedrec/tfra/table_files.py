"""Names and reads TFRA's table files, `<variable>_mht_<device>of<devices>_rank<r>_size<R>-keys` and `-values`.

Both files are raw and little-endian, without a header. Keys are int64 or int32. Values are [n, D], row by row in the
order of the keys. The native tables do not appear here.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_NAME = re.compile(
    r"(?P<variable>.+)_mht_(?P<device>\d+)of(?P<devices>\d+)_rank(?P<rank>\d+)_size(?P<ranks>\d+)-(?P<kind>keys|values)"
)


class Shard(NamedTuple):
    """The part of a variable that a pair of files holds."""

    rank: int
    device: int  # 1 .. devices
    ranks: int
    devices: int


class Files(NamedTuple):
    """The pair of files of one shard."""

    keys: pathlib.Path
    values: pathlib.Path


def file_name(variable: str, rank: int, ranks: int, kind: str) -> str:
    """Returns the file name for a variable with one table per rank; `kind` is "keys" or "values"."""
    return f"{variable.replace('/', '_')}_mht_1of1_rank{rank}_size{ranks}-{kind}"


def folder_of(directory: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the table files.

    It is `directory` itself, or the TFRADynamicEmbedding folder of a SavedModel or of one checkpoint in it.

    Raises:
      ValueError: The directory has no table files, or files of several checkpoints.
    """
    candidates = [directory, directory / "variables" / "TFRADynamicEmbedding", *directory.glob("TFRADynamicEmbedding*")]
    found = sorted({folder for folder in candidates if any(folder.glob("*_mht_*-keys"))})
    if not found:
        raise ValueError(
            f"{directory} has no TFRA table files (*_mht_*-keys). Save with a FileSystemSaver in the layer's "
            "kv_creator, and pass the TFRADynamicEmbedding folder or its parent."
        )
    if len(found) > 1:
        raise ValueError(
            f"{directory} has TFRA table files of several checkpoints: {[f.name for f in found]}. Name one."
        )
    return found[0]


def variables_in(folder: pathlib.Path) -> dict[str, dict[Shard, Files]]:
    """Returns the shards of every variable in a folder.

    Raises:
      ValueError: A shard or one of its two files is missing. Or two saves with different numbers of ranks left files
        of the same variable, which TFRA would merge.
    """
    found: dict[str, dict[Shard, dict[str, pathlib.Path]]] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match:
            shard = Shard(*(int(match[field]) for field in Shard._fields))
            found.setdefault(match["variable"], {}).setdefault(shard, {})[match["kind"]] = path
    return {variable: _checked(folder, variable, shards) for variable, shards in found.items()}


def _checked(
    folder: pathlib.Path, variable: str, shards: Mapping[Shard, Mapping[str, pathlib.Path]]
) -> dict[Shard, Files]:
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


def read(files: Files, dim: int, dtype: np.dtype, key_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys <int64>[n] and values <dtype>[n, D]. The values are memory-mapped and not read yet.

    Raises:
      ValueError: The sizes of the two files contradict each other: one is truncated, or dim or a dtype is wrong.
    """
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
