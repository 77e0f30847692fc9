"""Bad Parquet input: each refusal names the file, the column and the remedy, before the first row where possible."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.shards import COLUMNS, read_lists, user_table, write_folder
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import FeatureConfig
from tf_fusedrec.data import Column, ParquetFolder, TokenBatches
from tf_fusedrec.data.columns import check_features
from tf_fusedrec.data.rows import Ragged, Rows, splits_of
from tf_fusedrec.models.data_sets.layouts import write_dataset

ITEM = Column("item", ragged=True)


def _write(tmp_path, array, name="item"):
    pq.write_table(pa.table({name: array}), tmp_path / "part-0.parquet")
    return tmp_path


def _cut(kept):
    def changed(path):
        file = path / "part-1.parquet"
        file.write_bytes(file.read_bytes()[:kept])

    return changed


NOT_PARQUET = "part-1.parquet: not readable as Parquet"
FOLDERS = {
    "missing": (lambda path: path.rename(path.with_name("e")), "must be a folder of Parquet files, got .* is missing"),
    "no file": (lambda path: [file.unlink() for file in path.iterdir()], r"has no \*.parquet file. Name the folder"),
    "a text file": (
        lambda path: (path / "part-1.parquet").write_text("hello, I am a text file and no Parquet", encoding="utf-8"),
        f"{NOT_PARQUET} .* write it again",
    ),
    **{f"cut at {kept}": (_cut(kept), NOT_PARQUET) for kept in (0, 3, 200, -1)},
    "a column less": (
        lambda path: pq.write_table(pa.table({"user_id": pa.array([1])}), path / "part-7.parquet"),
        r"part-7.parquet: column 'item_id' is missing; the file has \['user_id'\]",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_bad_folders_and_files_are_refused(kind, tmp_path):
    change, words = FOLDERS[kind]
    change(path := write_folder(tmp_path / "d", [5, 50], 10))
    with pytest.raises(ValueError, match=words):
        ParquetFolder(path, COLUMNS)
    with pytest.raises(ValueError, match="which is a file"):
        ParquetFolder(__file__, COLUMNS)


def _damaged_page(tmp_path):
    """Writes a data set with one changed byte in the middle of its only column."""
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


def test_a_damaged_page_is_named_and_costs_its_row_group(tmp_path, caplog):
    path = _damaged_page(tmp_path)
    folder, words = ParquetFolder(path, [ITEM]), r"part-00000.parquet, row group \d: not readable as Parquet"
    with pytest.raises(ValueError, match=f"{words} .*(CRC|checksum)"):
        read_lists(folder)
    with pytest.raises(ValueError, match=words):
        TokenBatches(folder, length_columns=["item"], target_tokens_per_rank=100)  # before the first step
    folder = ParquetFolder(path, [ITEM], bad_rows="skip")
    lost = folder.num_rows - sum(rows.num_rows for rows in folder.read())
    assert lost == folder.bad.skipped_rows in (244, 256)  # one of two row groups
    assert "not readable as Parquet" in caplog.text


def test_errors_inside_tf_data_name_the_file(tmp_path):
    path = write_folder(tmp_path / "d", [20, 20], 5)
    batches = TokenBatches(
        ParquetFolder(path, COLUMNS, threads=1), length_columns=["item_id"], target_tokens_per_rank=5
    )
    (path / "part-1.parquet").unlink()
    with pytest.raises(tf.errors.OpError, match=r"part-1.parquet, row group \d: the file is gone .*Keep the files"):
        for _ in batches.dataset():
            pass


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
        (pa.array([[{"id": 1}]]), ITEM, "Lists of structs are not supported: write one list column for each"),
        (pa.array([{"id": 1}]), Column("item"), r"must be int64, got struct<"),
    ],
)
def test_wrong_type(tmp_path, array, column, message):
    with pytest.raises(ValueError, match=r"part-0.parquet: column 'item' .*" + message):
        ParquetFolder(_write(tmp_path, array), [column])


def _skipped(path, columns=COLUMNS, target_tokens_per_rank=50, length_columns=("item_id",), **options):
    """Returns the first column's values in the batches with bad_rows="skip", and the folder."""
    folder = ParquetFolder(path, columns, bad_rows="skip", **options)
    rows = []
    for batch in TokenBatches(
        folder, length_columns=length_columns, target_tokens_per_rank=target_tokens_per_rank
    ).dataset():
        rows += batch[columns[0].name].numpy().tolist()
    return rows, folder


def _good(num_rows=9):
    users = list(range(num_rows))
    items = [[u * 10, u * 10 + 1] for u in users]
    return {"user": users, "item": items, "time": [[1, 2] for _ in users]}


BAD_COLUMNS = (Column("user"), ITEM, Column("time", ragged=True, aligned_with="item"))


@pytest.mark.parametrize(
    "spoil, named, lost",
    [
        (lambda c: c["time"].__setitem__(4, [1]), "column 'time' must have as many values as 'item'.*Row 1 is", [4]),
        (lambda c: c["user"].__setitem__(4, None), "column 'user' has 1 null values.*Row 1 is the first", [4]),
        (lambda c: c["item"].__setitem__(5, None), "column 'item' has 1 null rows.*Row 2 is the first", [5]),
        (lambda c: c["item"].__setitem__(3, [7, None]), "column 'item' has 1 null values inside .*Row 0 is", [3]),
        (lambda c: c["item"].__setitem__(3, [7] * 60), r"column \['item'\] has a row of 60 tokens.*Row 0 ", [3]),
    ],
    ids=["lengths", "null_scalar", "null_list", "null_inside", "huge_row"],
)
def test_bad_rows_are_left_out_named_and_counted(tmp_path, caplog, spoil, named, lost):
    columns = _good()
    spoil(columns)
    columns["time"] = columns["time"] if lost != [3] else [[0] * len(items) for items in columns["item"]]
    types = {"user": pa.int64(), "item": pa.list_(pa.int64()), "time": pa.list_(pa.int64())}
    table = pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    for _ in range(2):  # the next epoch meets it again and counts it once
        rows, folder = _skipped(tmp_path, BAD_COLUMNS, length_columns=["item"])
        assert rows == [user for user in range(9) if user not in lost]
        assert folder.bad.skipped_rows == 1
    assert [record for record in caplog.messages if record.startswith("skipped: ")]
    assert re.search(rf"a.parquet, row group 1.* ?{named}.*\(1 rows; in all 1 rows at ", caplog.text, re.DOTALL)
    with pytest.raises((ValueError, tf.errors.OpError), match=rf"a.parquet, row group 1.* ?{named}"):
        list(
            TokenBatches(
                ParquetFolder(tmp_path, BAD_COLUMNS), length_columns=["item"], target_tokens_per_rank=50
            ).dataset()
        )


def test_a_file_with_floats_for_ids(tmp_path, caplog):
    path = write_folder(tmp_path / "d", [5, 5], 5)
    table = user_table(5, 5)
    floats = table.set_column(0, "user_id", table["user_id"].cast(pa.float64()))
    pq.write_table(floats, path / "part-1.parquet")
    with pytest.raises(ValueError, match="part-1.parquet: column 'user_id' must be int64, got double. Rewrite"):
        ParquetFolder(path, COLUMNS)
    rows, folder = _skipped(path)
    assert rows == [0, 1, 2, 3, 4] and folder.bad.skipped_rows == 5
    (told,) = caplog.messages
    assert "part-1.parquet: column 'user_id' must be int64, got double" in told
    assert told.endswith("(5 rows; in all 5 rows at 1 places)")


def test_an_empty_row_group(tmp_path, caplog):
    table = user_table(6)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for rows in (table.slice(0, 2), table.slice(0, 0), table.slice(2)):
            writer.write_table(rows)
    with pytest.raises(ValueError, match=r"a.parquet, row group 1: holds no rows of .*'item_id', 'rating'"):
        ParquetFolder(tmp_path, COLUMNS)
    assert _skipped(tmp_path)[0] == list(range(6))
    (told,) = caplog.messages
    assert "a.parquet, row group 1: holds no rows" in told and told.endswith("(0 rows; in all 0 rows at 1 places)")


@pytest.mark.parametrize("scope", ["rank", "global"])
def test_a_file_that_vanishes_during_the_epoch(tmp_path, caplog, scope):
    path = write_folder(tmp_path / "d", [10, 10], 5)
    folder = ParquetFolder(path, COLUMNS, bad_rows="skip", shuffle_seed=1)
    batches = TokenBatches(folder, length_columns=["item_id"], target_tokens_per_rank=5, scope=scope)
    (path / "part-0.parquet").unlink()
    users = sum((batch["user_id"].numpy().tolist() for batch in batches.dataset()), [])
    assert sorted(users) == list(range(10, 20))
    assert folder.bad.skipped_rows == 10
    for group in (0, 1):
        assert f"part-0.parquet, row group {group}: the file is gone" in caplog.text
    assert [message.rpartition("(")[2] for message in caplog.messages] == [
        "5 rows; in all 5 rows at 1 places)", "5 rows; in all 10 rows at 2 places)"
    ]  # fmt: skip


def test_a_row_group_with_fewer_rows_than_its_footer_said(tmp_path, caplog):
    path = write_folder(tmp_path / "d", [10, 10], 10)
    folders = [ParquetFolder(path, COLUMNS, bad_rows=policy) for policy in ("error", "skip")]
    write_folder(tmp_path / "d", [7, 10], 10)
    with pytest.raises(ValueError, match=r"part-0.parquet, row group 0: it ends after row 7, and .* it has 10 or more"):
        read_lists(folders[0])
    users = [user for rows in folders[1].read() for user in rows.columns["user_id"].tolist()]
    assert len(users) == 17 and folders[1].bad.skipped_rows == 3 and "it ends after row 7" in caplog.text


def test_features_must_have_a_column_of_ids():
    features = [FeatureConfig("item_id", "item"), FeatureConfig("negative", "item")]
    check_features(COLUMNS, features, made=["negative"])
    with pytest.raises(ValueError, match=r"feature 'negative' \(table 'item'\) has no column among"):
        check_features(COLUMNS, features)
    with pytest.raises(ValueError, match="feature 'rating' .* needs ids, but its column is list<float32>. Store"):
        check_features(COLUMNS, [FeatureConfig("rating", "item")])
    check_features([Column("item_id", "string")], features[:1])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: [Column("item", "int32")], r"Column.dtype of 'item' must be one of \['float32', 'int64', 'string'\]"),
        (lambda: [Column("item", keep_last=3)], "is a scalar, so keep_last and aligned_with do not apply"),
        (lambda: [Column("item", ragged=True, keep_last=0)], "keep_last of 'item' must be >= 1, got 0"),
        (list, "columns must name at least one Column"),
        (lambda: [ITEM, ITEM], "columns names 'item' more than once"),
        (lambda: [Column("t", ragged=True, aligned_with="x"), ITEM], "aligned_with 'x', which is not a declared list"),
        (lambda: [ITEM, Column("t", ragged=True, keep_last=2, aligned_with="item")], "Give both the same"),
    ],
)
def test_declarations_are_checked(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        ParquetFolder(tmp_path, make())
