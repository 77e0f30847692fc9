"""One file of a checkpoint: its contents, its reads, and its refusals."""

import os

import numpy as np
import pytest

from tests.checkpoint.oracle import EDGE_IDS, mix64
from tf_fusedrec.files.hash_order import LAST_HASH, hash_range
from tf_fusedrec.files.shard_file import Label, ShardFile, write

LABEL = Label("save-1-ab", "item", "rows", 1, 3)
RECORD = np.dtype([("last", "<u4"), ("row", "<f4", (5,)), ("scale", "<f4")])
BLOCK = 65536 // (8 + RECORD.itemsize)  # rows


def rows_of(n, record=RECORD, seed=0):
    ids = {*EDGE_IDS[:n], *np.random.default_rng(seed).integers(-(2**63), 2**63, n).tolist()}
    ids = np.array(sorted(list(ids)[:n], key=mix64), np.int64)
    records = np.zeros(len(ids), record)
    if record.itemsize:
        records.view(np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, records.nbytes, np.uint8)
    return ids, records


def read(file, first=0, last=LAST_HASH):
    chunks = list(file.chunks(first, last))
    if not chunks:
        return np.zeros(0, np.int64), np.zeros(0, file.record)
    return np.concatenate([c[0] for c in chunks]), np.concatenate([c[1] for c in chunks])


NO_BYTES, SMALL, LARGE = np.dtype([]), np.dtype([("count", "<u4")]), np.dtype([("row", "<u2", (40_000,))])
SIZES = [(n, RECORD) for n in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7)]


@pytest.mark.parametrize(("n", "record"), [*SIZES, (100, NO_BYTES), (100, SMALL), (100, LARGE)])
def test_rows_come_back_bit_by_bit(n, record, tmp_path):
    """Also records without bytes (tombstones), and records beyond a block's size, which has 16 rows then."""
    ids, records = rows_of(n, record)
    size = write(tmp_path / "f", LABEL, ids, records)
    assert (tmp_path / "f").stat().st_size == size
    file = ShardFile(tmp_path / "f", LABEL)
    got_ids, got = read(file)
    assert file.rows == n and file.record == record
    np.testing.assert_array_equal(got_ids, ids)
    assert got.tobytes() == records.tobytes() and file.bytes_read == size


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 65536, 1 << 25])
def test_any_range_of_hashes_is_what_a_search_through_all_rows_finds(chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("tf_fusedrec.files.shard_file._CHUNK_BYTES", chunk_bytes)
    ids, records = rows_of(7 * BLOCK + 3)
    write(tmp_path / "f", LABEL, ids, records)
    hashes = [mix64(int(i)) for i in ids]
    at_rows = [hashes[0], hashes[BLOCK], hashes[BLOCK] - 1, hashes[2 * BLOCK - 1], hashes[3 * BLOCK + 5], hashes[-1]]
    bounds = sorted({0, LAST_HASH, *at_rows, *(bound for r in range(5) for bound in hash_range(r, 5))})
    for first in bounds:
        for last in bounds:
            got_ids, got = read(ShardFile(tmp_path / "f", LABEL), first, last)
            wanted = [n for n, h in enumerate(hashes) if first <= h <= last]
            np.testing.assert_array_equal(got_ids, ids[wanted])
            assert got.tobytes() == records[wanted].tobytes()


@pytest.mark.slow
def test_rows_are_written_in_hash_order_whatever_order_they_come_in(tmp_path):
    ids, records = rows_of(520 * BLOCK + 3)  # more rows than one gather takes
    write(tmp_path / "ordered", LABEL, ids, records)
    order = np.random.default_rng(0).permutation(len(ids))
    assert write(tmp_path / "any", LABEL, ids[order], records[order]) == (tmp_path / "any").stat().st_size
    assert (tmp_path / "any").read_bytes() == (tmp_path / "ordered").read_bytes()


def test_repeated_ids_are_refused(tmp_path):
    ids, records = rows_of(10)
    bad = np.where(np.arange(10) == 7, ids[2], ids)
    words = rf"ids of table 'item', section 'rows' repeat {ids[2]}, but must be distinct"
    with pytest.raises(ValueError, match=words):
        write(tmp_path / "f", LABEL, bad, records)
    assert not (tmp_path / "f").exists()


@pytest.fixture
def file(tmp_path):
    ids, records = rows_of(3 * BLOCK)
    write(tmp_path / "item.rows-1.shard", LABEL, ids, records)
    return tmp_path / "item.rows-1.shard"


def refused(path, words, label=LABEL):
    with pytest.raises(ValueError, match=words) as refusal:
        read(ShardFile(path, label))
    assert str(path) in str(refusal.value) and "Restore it, or load another checkpoint." in str(refusal.value)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(file):
    opened = ShardFile(file, LABEL)
    file.write_bytes(file.read_bytes()[:-70_000])
    with pytest.raises(ValueError, match="is truncated"):
        list(opened.chunks(0, LAST_HASH))


def test_every_cut_every_byte_more_and_every_flipped_bit_is_found(file):
    """Flips one bit in each part of the file, and in 200 random places."""
    whole = file.read_bytes()
    for keep in (0, 7, 23, 24, 100, 1000, -9, -1):
        file.write_bytes(whole[:keep])
        refused(file, "is truncated: [0-9]+ bytes")
    file.write_bytes(whole + b"x")
    refused(file, "has too much: [0-9]+ bytes, want [0-9]+")
    file.write_bytes(b"PAR1" * 1000)
    refused(file, "is foreign: it does not begin with FUSEDREC, as files of a checkpoint do")
    head = 24 + int.from_bytes(whole[8:16], "little")
    places = [0, 7, 8, 15, 16, 23, 24, head - 1, head, len(whole) - 1, len(whole) - 9, len(whole) - 8 - 16]
    places += np.random.default_rng(0).integers(0, len(whole), 200).tolist()
    for n, place in enumerate(places):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << n % 8)]) + whole[place + 1 :])
        refused(file, "is damaged|is foreign: it does not begin|is truncated")


def test_the_damaged_block_is_named_and_blocks_before_it_are_good(file):
    whole = bytearray(file.read_bytes())
    head = 24 + int.from_bytes(whole[8:16], "little")
    whole[head + 8 * (BLOCK + 3)] ^= 1  # an id of block 1
    file.write_bytes(whole)
    refused(file, rf"is damaged: block 1 \(rows {BLOCK} to {2 * BLOCK} of {3 * BLOCK}\) differs from its checksum")
    ids, _ = rows_of(3 * BLOCK)
    first_block = read(ShardFile(file, LABEL), 0, mix64(int(ids[BLOCK - 1])))[0]
    np.testing.assert_array_equal(first_block, ids[:BLOCK])


def test_a_foreign_file_says_whose_it_is(file):
    other = Label("save-2-cd", "user", "candidates", 0, 4)
    for field in Label._fields:
        value, wanted = getattr(LABEL, field), getattr(other, field)
        words = f"is foreign: it has {field} {value!r}, but the manifest wants {field} {wanted!r} here"
        refused(file, words, LABEL._replace(**{field: wanted}))


def test_a_disk_that_cannot_read_names_the_file(file, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tf_fusedrec.files.disk.os.preadv", broken)
    refused(file, "cannot be read: Input/output error")


def test_systems_that_write_and_read_less_than_was_asked_are_asked_again(tmp_path, monkeypatch):
    ids, records = rows_of(3 * BLOCK)
    write_some, read_some = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda file, data: write_some(file, data[:999]))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read_some(file, [part[:777] for part in into], at))
    size = write(tmp_path / "f", LABEL, ids, records)
    assert (tmp_path / "f").stat().st_size == size
    got_ids, got = read(ShardFile(tmp_path / "f", LABEL))
    np.testing.assert_array_equal(got_ids, ids)
    assert got.tobytes() == records.tobytes()
