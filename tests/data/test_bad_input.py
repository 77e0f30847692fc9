"""Bad Parquet input: each refusal names the file, the column and the remedy, before the first row where it can."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.shards import COLUMNS, read_lists, write_folder
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data import Column, ParquetFolder, token_balanced_dataset
from tf_fusedrec.data.layouts import write_dataset
from tf_fusedrec.data.rows import Ragged, Rows, splits_of

ITEM = Column("item", ragged=True)


def _write(tmp_path, array, name="item"):
    pq.write_table(pa.table({name: array}), tmp_path / "part-0.parquet")
    return tmp_path


def test_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="must be a folder of Parquet files, got .*missing.* which is not there"):
        ParquetFolder(tmp_path / "missing", [ITEM])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="which is a file"):
        ParquetFolder(tmp_path / "file", [ITEM])


def test_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"has no \*.parquet file. Write one with python -m tf_fusedrec.data.convert"):
        ParquetFolder(tmp_path, [ITEM])


def test_file_that_is_no_parquet(tmp_path):
    path = write_folder(tmp_path / "d", [5, 5], 2)
    (path / "part-1.parquet").write_text("hello, I am a text file and no Parquet")
    with pytest.raises(ValueError, match=r"part-1.parquet: not readable as Parquet .* write it again"):
        ParquetFolder(path, COLUMNS)


@pytest.mark.parametrize("kept", [0, 3, 200, -1])
def test_truncated_file(tmp_path, kept):
    path = write_folder(tmp_path / "d", [50], 10)
    file = path / "part-0.parquet"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="part-0.parquet: not readable as Parquet"):
        ParquetFolder(path, COLUMNS)


def _damaged_page(tmp_path):
    """A data set of ours with one byte changed in the middle of its only column."""
    values = np.random.default_rng(0).integers(0, 2**60, 5000)
    rows = Rows({"item": Ragged(values, splits_of(np.full(500, 10)))}, 500)
    write_dataset(
        tmp_path / "d", task="retrieval", source="test", split="none", users=500, train=rows, test=rows,
        item_ids=np.unique(values), train_items=values,
    )  # fmt: skip
    file = tmp_path / "d" / "train" / "part-00000.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.parent


def test_damaged_page(tmp_path):
    folder = ParquetFolder(_damaged_page(tmp_path), [ITEM])
    with pytest.raises(ValueError, match=r"part-00000.parquet, row group \d: not readable as Parquet .*(CRC|checksum)"):
        read_lists(folder)


def test_damaged_page_through_tensorflow_names_the_file(tmp_path):
    folder = ParquetFolder(_damaged_page(tmp_path), [ITEM])
    dataset = token_balanced_dataset(folder, length_columns=["item"], target_tokens=100)
    with pytest.raises(tf.errors.OpError, match=r"part-00000.parquet, row group \d: not readable as Parquet"):
        for _ in dataset:
            pass


def test_missing_column_in_any_file(tmp_path):
    path = write_folder(tmp_path / "d", [5], 2)
    pq.write_table(pa.table({"user_id": pa.array([1])}), path / "part-7.parquet")
    with pytest.raises(ValueError, match=r"part-7.parquet: column 'item_id' is missing; the file has \['user_id'\]"):
        ParquetFolder(path, COLUMNS)


@pytest.mark.parametrize(
    "array, column, message",
    [
        (pa.array([[1]], pa.list_(pa.int32())), ITEM, r"must be list<int64>, got list<.*int32>"),
        (pa.array([["a"]]), ITEM, r"must be list<int64>, got list<.*string>"),
        (pa.array([1]), ITEM, r"must be list<int64>, got int64. Rewrite the file with that type, or declare"),
        (pa.array([[1]]), Column("item"), r"must be int64, got list<"),
        (pa.array([1.0]), Column("item", "float32"), r"must be float32, got double"),
        (pa.array([[[1]]]), ITEM, r"must be list<int64>, got list<.*list<"),
        (pa.array(["a"]).dictionary_encode(), Column("item"), r"must be int64, got dictionary<"),
        (pa.array([[{"id": 1, "time": 2}]]), ITEM, r"Lists of structs are not read: write one list column for each"),
        (pa.array([{"id": 1}]), Column("item"), r"must be int64, got struct<"),
    ],
)
def test_wrong_type(tmp_path, array, column, message):
    with pytest.raises(ValueError, match=r"part-0.parquet: column 'item' .*" + message):
        ParquetFolder(_write(tmp_path, array), [column])


@pytest.mark.parametrize(
    "array, column, message",
    [
        (pa.array([1, None], pa.int64()), Column("item"), "has 1 null values"),
        (pa.array([[1], None], pa.list_(pa.int64())), ITEM, "has 1 null rows"),
        (pa.array([[1, None], [None]], pa.list_(pa.int64())), ITEM, "has 2 null values inside its lists"),
    ],
)
def test_nulls(tmp_path, array, column, message):
    folder = ParquetFolder(_write(tmp_path, array), [column])
    with pytest.raises(ValueError, match=rf"part-0.parquet, row group 0: column 'item' {message}. Write a value"):
        read_lists(folder)


def test_lists_that_lie_about_their_lengths(tmp_path):
    table = pa.table({"item": [[1, 2], [3], [4]], "time": [[1, 2], [3, 4], []]})  # 4 and 4 in all
    pq.write_table(table, tmp_path / "part-0.parquet")
    folder = ParquetFolder(tmp_path, [ITEM, Column("time", ragged=True, aligned_with="item")])
    with pytest.raises(ValueError, match=r"'time' must have as many values as 'item' in every row, got 2 and 1.*row 1"):
        read_lists(folder)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: [Column("item", "string")], r"Column.dtype of 'item' must be one of \['float32', 'int64'\]"),
        (lambda: [Column("item", keep_last=3)], "is a scalar, so keep_last and aligned_with mean nothing"),
        (lambda: [Column("item", ragged=True, keep_last=0)], "keep_last of 'item' must be >= 1, got 0"),
        (list, "columns must name at least one Column"),
        (lambda: [ITEM, ITEM], "columns names 'item' more than once"),
        (lambda: [Column("t", ragged=True, aligned_with="x"), ITEM], r"aligned_with 'x', which is not a list column"),
        (lambda: [ITEM, Column("t", ragged=True, keep_last=2, aligned_with="item")], "Give both the same"),
    ],
)
def test_declarations_are_checked(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        ParquetFolder(tmp_path, make())
