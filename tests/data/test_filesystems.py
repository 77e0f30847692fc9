"""Partitioned folders and other file systems: the found files, their order, and columns from folders' names."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from tests.data.shards import COLUMNS, expected_rows, read_lists, user_table, write_folder
from tf_fusedrec.data import Column, ParquetFolder


def _partitioned(tmp_path):
    """Writes rows 0 .. 11 below day=1/hour=0, day=1/hour=1, day=2/hour=0, and files that readers must overlook."""
    for number, name in enumerate(["day=1/hour=0", "day=1/hour=1", "day=2/hour=0", "day=2/hour=1"]):
        (tmp_path / name).mkdir(parents=True)
        pq.write_table(user_table(3, 3 * number), tmp_path / name / "part-0.parquet")
        (tmp_path / name / "_SUCCESS").touch()
    for name in ("_temporary/0", "day=1/.staging"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "part-9.parquet").write_text("half written", encoding="utf-8")
    return tmp_path


def test_partitions_are_read_in_the_order_of_their_names(tmp_path):
    assert read_lists(ParquetFolder(_partitioned(tmp_path), COLUMNS)) == expected_rows(12)


def test_folders_names_are_columns(tmp_path):
    columns = [Column("hour"), Column("user_id"), Column("day", "string")]
    rows = read_lists(ParquetFolder(_partitioned(tmp_path), columns))
    assert [row[:2] for row in rows] == [(user // 3 % 2, user) for user in range(12)]
    days = [row[2] for row in rows]
    assert len(set(days[:6])) == len(set(days[6:])) == 1 and days[0] != days[6]
    with pytest.raises(ValueError, match="'day' comes from the folder day=1, .*Declare it as a scalar int64 or string"):
        ParquetFolder(tmp_path, [Column("day", ragged=True)])
    (tmp_path / "day=2").rename(tmp_path / "day=late")
    with pytest.raises(ValueError, match="column 'day' must be int64, got the folder day=late. Declare it with"):
        ParquetFolder(tmp_path, [Column("day")])


def test_uris_and_file_systems_of_pyarrow(tmp_path):
    path = write_folder(tmp_path / "d", [7, 12], 5)
    assert read_lists(ParquetFolder(path.as_uri(), COLUMNS)) == expected_rows(19)
    below = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    folder = ParquetFolder("d/", COLUMNS, filesystem=below)
    assert read_lists(folder) == expected_rows(19)
    assert folder.path == "d"


def test_an_object_store_in_memory():
    """Readers use only the promises of pyarrow.fs: no local path, no seek by name."""
    store = fs._MockFileSystem()
    store.create_dir("bucket/train/hour=3")
    with store.open_output_stream("bucket/train/hour=3/a.parquet") as out:
        pq.write_table(pa.table({"user_id": [4, 5]}), out)
    folder = ParquetFolder("bucket/train", [Column("user_id"), Column("hour")], filesystem=store)
    assert read_lists(folder) == [(4, 3), (5, 3)]


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="path 'gopher://x/y' names no file system that pyarrow reads"):
        ParquetFolder("gopher://x/y", COLUMNS)
    with pytest.raises(ValueError, match=r"which is missing. Name the folder, such as <data set>/train"):
        ParquetFolder((tmp_path / "none").as_uri(), COLUMNS)
