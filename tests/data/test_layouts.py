"""Layouts on disk are written whole, in small row groups, and read back with their facts."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.shards import read_lists
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.rows import Ragged, Rows, splits_of
from tf_fusedrec.models.data_sets import layouts
from tf_fusedrec.models.data_sets.layouts import read_info, read_items


def _rows(users):
    lengths = np.arange(users) % 3
    items = Ragged(np.arange(lengths.sum()) % 5, splits_of(lengths))
    return Rows({"user_id": np.arange(users), "item_id": items}, users)


def _write(root, **change):
    train = _rows(10)
    arguments = {
        "task": "retrieval", "source": "here", "split": "none", "users": 10, "train": train, "test": _rows(0),
        "item_ids": np.array([4, 3, 2, 1, 0, 9]), "train_items": train.columns["item_id"].values,
    }  # fmt: skip
    return layouts.write_dataset(root, **{**arguments, **change})


def test_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "ROWS_PER_GROUP", 2)
    monkeypatch.setattr(layouts, "GROUPS_PER_FILE", 2)
    root = tmp_path / "new" / "set"
    info = _write(root)
    assert read_info(root) == info
    assert info.columns["train"] == {"user_id": "int64", "item_id": "list<int64>"}
    files = sorted((root / "train").iterdir())
    assert [file.name for file in files] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert [pq.ParquetFile(file).num_row_groups for file in files] == [2, 2, 1]
    columns = [Column("user_id"), Column("item_id", ragged=True)]
    assert [row[0] for row in read_lists(ParquetFolder(root / "train", columns))] == list(range(10))
    assert ParquetFolder(root / "test", columns).num_rows == 0
    ids, counts = read_items(root)
    assert ids.tolist() == [0, 1, 2, 3, 4, 9]
    assert counts.tolist() == [2, 2, 2, 2, 1, 0]


def test_nothing_is_overwritten_and_nothing_half_made_is_left(tmp_path):
    root = tmp_path / "set"
    root.mkdir()  # an empty folder is fine
    _write(root)
    with pytest.raises(ValueError, match="output .*set' is not empty. Remove it"):
        _write(root)
    with pytest.raises(IndexError):
        _write(tmp_path / "other", train_items=np.array([77]))
    assert not (tmp_path / "other").exists()
    _write(tmp_path / "other")  # the rest of the failed attempt does not matter
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "set"]


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"task must be one of \('ranking', 'retrieval'\), got 'sorting'"):
        _write(tmp_path / "set", task="sorting")
    with pytest.raises(ValueError, match="is not a data set of this package: it has no dataset.json"):
        read_info(tmp_path)
    with pytest.raises(ValueError, match="items.parquet is missing"):
        read_items(tmp_path)
    (tmp_path / "dataset.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="dataset.json: not JSON"):
        read_info(tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps({"task": "ranking"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"must hold the fields \['task', .*got \['task'\]"):
        read_info(tmp_path)
