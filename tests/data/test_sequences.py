"""Files of sequences: a line per user with all items, or a line per item. Errors name unreadable lines."""

import gzip

import pyarrow.parquet as pq
import pytest

from models.data_sets.interactions import convert_sequences
from models.data_sets.layouts import read_items
from tests.data.shards import read_lists
from tests.support.shared import shared_path
from tf_fusedrec import tf
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.fingerprint import hash_strings

TEST = (
    Column("user_id"), Column("item_id", ragged=True), Column("timestamp", ragged=True), Column("target_item"),
    Column("target_timestamp"),
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["7 30 10 20\n\n3\t5 5\n9 1\n", "7 30\n3 5\n7 10\n9 1\n7 20\n3 5\n"],
    ids=["a line a user", "a line an item"],
)
@pytest.mark.parametrize("name", ["seq.txt", "seq.txt.gz"])
def test_sequences_keep_their_order(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    info = convert_sequences(path, tmp_path / "out")
    assert (info.task, info.users, info.items) == ("retrieval", 2, 4)
    assert info.source == (
        f"sequences, {name}, 6 interactions, timestamps are places in the sequence, "
        "1 of 3 users left out (one interaction)"
    )
    assert read_lists(ParquetFolder(tmp_path / "out/test", TEST)) == [
        (3, (5,), (0,), 5, 1),
        (7, (30, 10), (0, 1), 20, 2),
    ]
    assert dict(zip(*(column.tolist() for column in read_items(tmp_path / "out")))) == {5: 1, 10: 1, 20: 0, 30: 1}


def test_string_ids_become_fingerprints(tmp_path):
    (tmp_path / "seq.txt").write_text("A2 x y\nA1 y x\n", encoding="utf-8")
    assert (
        "user_id strings as fingerprints, item_id strings"
        in convert_sequences(tmp_path / "seq.txt", tmp_path / "out").source
    )
    prints = dict(zip(("A1", "A2", "x", "y"), hash_strings(tf.constant(["A1", "A2", "x", "y"])).numpy().tolist()))
    rows = {row[0]: (row[1], row[3]) for row in read_lists(ParquetFolder(tmp_path / "out/test", TEST))}
    assert rows == {prints["A2"]: ((prints["x"],), prints["y"]), prints["A1"]: ((prints["y"],), prints["x"])}
    items = pq.read_table(tmp_path / "out/items.parquet").to_pydict()
    assert {string: prints[string] for string in "xy"} == dict(zip(items["string"], items["item_id"]))


@pytest.mark.parametrize(
    "text, message",
    [
        ("1 2 3\n7\n", "seq.txt, line 2: got '7', want a user and at least one item"),
        ("1 2\n3 4\n", "seq.txt: got 2 interactions of 2 users, none with two or more"),
        ("", "seq.txt: got 0 interactions of 0 users"),
    ],
)
def test_refusals(tmp_path, text, message):
    (tmp_path / "seq.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        convert_sequences(tmp_path / "seq.txt", tmp_path / "out")
    with pytest.raises(ValueError, match="must be the file of sequences, got a folder or nothing"):
        convert_sequences(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_published_file_of_movielens(tmp_path):
    """Reads sasrec_ml-1m.txt, which has a line for every interaction of 6,040 users."""
    info = convert_sequences(shared_path("data/ml-1m") / "sasrec_ml-1m.txt.gz", tmp_path / "out")
    assert (info.users, info.items) == (6040, 3416)
