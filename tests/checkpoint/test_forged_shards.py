"""Shards with right checksums and wrong contents are refused with file and field, before any change."""

import re

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.forger import IDS, forge_shard, refused, save_two
from tests.checkpoint.tables import DictTable
from tf_fusedrec import checkpoint
from tf_fusedrec.files.hash_order import OWNERS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a checkpoint. Each test restores its forged files."""
    return save_two(tmp_path_factory.mktemp("forged") / "c")


def header(name, value):
    return lambda header, ids, records: header.__setitem__(name, value)


def swap(header, ids, records):
    ids[[3, 4]] = ids[[4, 3]]


def repeat(header, ids, records):
    ids[3] = ids[4]


SHARDS = {
    "no JSON": (lambda *_: b"{", "its header is not JSON"),
    "a list": (lambda *_: b"[]", r"the header is \[\]"),
    "a field more": (header("more", 1), "the header is"),
    "rows negative": (header("rows", -1), "rows is -1"),
    "rows a float": (header("rows", 2.0), "rows is 2.0"),
    "rows more": (header("rows", 10**9), "is truncated"),
    "block 0": (header("block", 0), "block is 0"),
    "block text": (header("block", "x"), "block is 'x'"),
    "rank a float": (header("rank", 0.0), "rank is 0.0"),
    "rank beyond": (header("rank", 1), "rank is 1"),
    "ranks 0": (header("ranks", 0), "ranks is 0"),
    "save null": (header("save", None), "save is None"),
    "record null": (header("record", None), "record is None"),
    "record of objects": (header("record", [["row", "|O"]]), r"record is '\|O', want the dtype of a number"),
    "record without dtype": (header("record", [["row"]]), "record is"),
    "record twice": (header("record", [["row", "<f4"], ["row", "<f4"]]), "record is"),
    "record of a shape of text": (header("record", [["row", "<f4", ["x"]]]), "record is 'x'"),
    "record of two dimensions": (header("record", [["row", "<f4", [2, 2]]]), "record is"),
    "ids not in order": (swap, "are not in hash order"),
    "an id twice": (repeat, "are not in hash order"),
}


@pytest.mark.parametrize("kind", list(SHARDS))
def test_a_forged_shard_is_refused_with_file_and_field(kind, whole):
    (path,) = whole.glob("save-1-*/user.rows-0.shard")
    before = path.read_bytes()
    change, words = SHARDS[kind]
    forge_shard(path)
    assert path.read_bytes() == before, "the forger writes what a save writes"
    forge_shard(path, change)
    try:
        refused(whole, f"{re.escape(str(path))} .*{words}")
        with pytest.raises(ValueError, match=words):
            checkpoint.read_tables(whole)
    finally:
        path.write_bytes(before)


def test_an_index_that_lies_is_refused(whole):
    (path,) = whole.glob("save-1-*/user.rows-0.shard")
    before = path.read_bytes()
    try:
        forge_shard(path, index=lambda entries: entries["first_hash"].__setitem__(0, 5))
        refused(whole, f"{re.escape(str(path))} .*are not in hash order")
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_id_of_another_rank_is_refused_at_either_end(rank, tmp_path):
    """A shard is in hash order: a foreign id is the last one of rank 0 and the first one of rank 1."""
    owners, tables = OWNERS["hash_range"](np.array(IDS[:20]), 2), [DictTable("item"), DictTable("item")]
    for number, table in enumerate(tables):
        ids = [id_ for id_, owner in zip(IDS, owners) if owner == number]
        foreign = [id_ for id_, owner in zip(IDS, owners) if owner != number][: number == rank]
        table.train("item", ids + foreign, np.random.default_rng(0))
    simulated.save(tmp_path / "c", tables)
    with pytest.raises(ValueError, match=rf"id -?\d+ does not belong to rank {rank} of 2"):
        checkpoint.read_tables(tmp_path / "c")


def test_ids_of_another_rank_are_refused(tmp_path):
    """Refuses a shard of rank 1 of 2 with rows of rank 0, which a load would lose or read twice."""
    for owner in ("hash_range", "tfra"):
        tables = [DictTable("item", owner=owner) for _ in range(2)]
        for table in tables:
            table.train("item", IDS[:20], np.random.default_rng(0))
        simulated.save(tmp_path / owner, tables)
        with pytest.raises(
            ValueError, match=r"item.rows-[01].shard is forged or damaged: id -?\d+ does not belong to rank [01] of 2"
        ):
            checkpoint.read_tables(tmp_path / owner)
