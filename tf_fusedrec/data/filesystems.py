"""Finds Parquet files in partitioned folders on local disks, HDFS, S3 or GCS, all through pyarrow.fs.

A folder is searched to any depth. Files and folders with names that start with "." or "_", such as _SUCCESS and
_temporary, are skipped. Folders named key=value, as written by Hive and Spark, give every row below them a
column value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder on a file system. `name` is its name in messages, `path` its path on the file system."""

    filesystem: fs.FileSystem
    path: str
    name: str

    def open(self, file: str) -> pq.ParquetFile:
        """Opens a Parquet file by its path below the folder. Page checksums are verified if the file has them."""
        source = self.filesystem.open_input_file(f"{self.path}/{file}")
        # pre_buffer requests the pages of a row group together, in one round trip to an object store.
        return pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=True)


def resolve(path: str | os.PathLike, filesystem: fs.FileSystem | None = None) -> Folder:
    """Resolves a local path, or a URI that pyarrow supports (hdfs://, s3://, gs://, file://), to a folder.

    `filesystem` expresses settings that a URI cannot (credentials, a wrapped fsspec file system). None derives it from
    the path.
    """
    name = os.fspath(path)
    inner = name
    if filesystem is None and "://" in name:
        try:
            filesystem, inner = fs.FileSystem.from_uri(name)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"path {name!r} names no file system that pyarrow reads ({error}). Use file://, hdfs://, s3:// or gs://."
            ) from error
    filesystem = filesystem or fs.LocalFileSystem()
    inner = inner.rstrip("/") or "/"
    type_ = filesystem.get_file_info(inner).type
    if type_ != fs.FileType.Directory:
        raise ValueError(
            f"path must be a folder of Parquet files, got {name!r}, which is "
            f"{'missing' if type_ == fs.FileType.NotFound else 'a file'}. Name the folder, such as <data set>/train."
        )
    return Folder(filesystem, inner, name.rstrip("/") or "/")


def parquet_files(folder: Folder) -> list[str]:
    """Paths of all *.parquet files below the folder, sorted. Raises ValueError if there is none."""
    files = sorted(file for file in _files(folder) if file.endswith(".parquet") and not _is_hidden(file))
    if not files:
        raise ValueError(f"path {folder.name!r} has no *.parquet file. Name the folder that holds the shards.")
    return files


def folders_with(folder: Folder, marker: str | None) -> list[str]:
    """Paths of the folders below `folder` with a file named `marker`, or with a *.parquet file if `marker` is None."""
    folders = set()
    for file in _files(folder):
        parent, _, name = file.rpartition("/")
        is_marker = name == marker if marker is not None else name.endswith(".parquet") and not _is_hidden(name)
        if parent and is_marker and not _is_hidden(parent):
            folders.add(parent)
    return sorted(folders)


def files_with(folder: Folder, endings: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Size in bytes and time of change in nanoseconds of the files below `folder` with one of the endings, by path."""
    states = {file: (info.size, info.mtime_ns) for file, info in _infos(folder)}
    return {file: state for file, state in states.items() if file.endswith(endings) and not _is_hidden(file)}


def partition_values(file: str) -> Mapping[str, str]:
    """Values {key: value} from the folders of a path: "day=7/hour=12/a.parquet" gives day and hour."""
    return dict(part.split("=", 1) for part in file.split("/")[:-1] if "=" in part)


@contextlib.contextmanager
def readable(where: str) -> Iterator[None]:
    """Turns what Arrow raises on a damaged or missing file into a ValueError that names the place."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(
            f"{where}: the file is gone ({error}). Keep the files of a data set in their place while it is read."
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{where}: not readable as Parquet ({error}). The file is damaged or was cut short: write it again."
        ) from error


def _files(folder: Folder) -> Iterator[str]:
    return (file for file, _ in _infos(folder))


def _infos(folder: Folder) -> Iterator[tuple[str, fs.FileInfo]]:
    for info in folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=True)):
        if info.type == fs.FileType.File:
            yield info.path[len(folder.path) :].lstrip("/"), info


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))
