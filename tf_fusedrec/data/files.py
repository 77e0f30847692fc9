"""Where the Parquet files are: partitioned folders on local disks, HDFS, S3 or GCS, all through pyarrow.fs.

A folder is searched to any depth. Names that start with "." or "_" are left out, files and folders alike (_SUCCESS,
_temporary). Folders named key=value, as Hive and Spark write them, give every row below them the value of a column.
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
    """A folder on a file system. `name` is what messages call it, `path` what the file system does."""

    filesystem: fs.FileSystem
    path: str
    name: str

    def open(self, file: str) -> pq.ParquetFile:
        """A Parquet file below the folder, by its path from there. Page checksums are verified where there are any."""
        source = self.filesystem.open_input_file(f"{self.path}/{file}")
        # pre_buffer asks for the pages of a row group together: one round trip to an object store instead of many.
        return pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=True)


def resolve(path: str | os.PathLike, filesystem: fs.FileSystem | None = None) -> Folder:
    """The folder of a local path, or of a URI that pyarrow knows (hdfs://, s3://, gs://, file://).

    Args:
      path: the folder; with `filesystem`, as that names it.
      filesystem: for what a URI cannot say (credentials, a wrapped fsspec file system); None reads it from the path.

    Raises:
      ValueError: no such folder, or a URI that pyarrow does not know.
    """
    name = os.fspath(path)
    inner = name
    if filesystem is None and "://" in name:
        try:
            filesystem, inner = fs.FileSystem.from_uri(name)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"path {name!r} names no file system that pyarrow reads ({error}).") from error
    filesystem = filesystem or fs.LocalFileSystem()
    inner = inner.rstrip("/") or "/"
    found = filesystem.get_file_info(inner)
    if found.type != fs.FileType.Directory:
        raise ValueError(
            f"path must be a folder of Parquet files, got {name!r}, which is "
            f"{'not there' if found.type == fs.FileType.NotFound else 'a file'}. Name the folder, for example "
            "<data set>/train."
        )
    return Folder(filesystem, inner, name.rstrip("/") or "/")


def parquet_files(folder: Folder) -> list[str]:
    """Paths below the folder of all its *.parquet files, in the order of their names.

    Raises:
      ValueError: there is none.
    """
    files = [file for file in _visible(folder) if file.endswith(".parquet")]
    if not files:
        raise ValueError(
            f"path {folder.name!r} has no *.parquet file. Write one with python -m tf_fusedrec.data.convert, "
            "or name the folder that holds the shards."
        )
    return files


def folders_with(folder: Folder, marker: str | None) -> list[str]:
    """Paths below the folder of those folders that hold a file named `marker`, or, with None, a *.parquet file.

    Folders of hidden names (that start with "." or "_") are left out.
    """
    found = set()
    for file in _files(folder):
        parent, _, name = file.rpartition("/")
        named = name == marker if marker is not None else name.endswith(".parquet") and not name.startswith((".", "_"))
        if parent and named and not _hidden(parent):
            found.add(parent)
    return sorted(found)


def partition_values(file: str) -> Mapping[str, str]:
    """{key: value} of the folders key=value on the way to a file: "day=7/hour=12/a.parquet" gives day and hour."""
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


def _visible(folder: Folder) -> list[str]:
    """Paths below the folder of all files, sorted, without what is hidden."""
    return sorted(file for file in _files(folder) if not _hidden(file))


def _files(folder: Folder) -> Iterator[str]:
    for info in folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=True)):
        if info.type == fs.FileType.File:
            yield info.path[len(folder.path) :].lstrip("/")


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))
