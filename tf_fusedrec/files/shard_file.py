"""A shard file: the rows of one section of one table from one rank, in hash order, with an index.

    magic      8 bytes, "FUSEDREC"
    length     <u8, bytes of the header
    checksum   <u8, xxh3_64 of the header
    header     JSON: the label of the rows (Label), their number, rows per block, dtype of a record
    ids        <i8[rows], by ascending Mix64(id) (hash_order.py)
    records    packed record[rows]
    index      one entry per block of rows: <u8 hash of its first id, <u8 xxh3_64 of its ids and its records
    checksum   <u8, xxh3_64 of the index

A block is about 64 KB and has at least 16 rows. A reader of a range of hashes reads the index and two contiguous ranges
of bytes, with at most two blocks too many. It returns verified blocks only. Ids and records are stored apart, so both
are read without a copy into the arrays that a table restores.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tf_fusedrec.files import disk, manifest
from tf_fusedrec.files.hash_order import mix64

_MAGIC = b"FUSEDREC"
_BLOCK_BYTES = 1 << 16
_MIN_BLOCK_ROWS = 16
_CHUNK_BYTES = 1 << 25  # bytes read at once
_START = np.dtype([("magic", "S8"), ("length", "<u8"), ("checksum", "<u8")])
_INDEX = np.dtype([("first_hash", "<u8"), ("checksum", "<u8")])


class Label(NamedTuple):
    """Origin of the rows in a file."""

    save: str  # unique name of the save
    table: str
    section: str
    rank: int
    ranks: int


def _bytes(array: np.ndarray) -> np.ndarray:
    """<uint8> view of an array. Records without bytes (tombstones) give an empty one."""
    return array.view(np.uint8) if array.dtype.itemsize else np.zeros([0], np.uint8)


def _block_checksums(ids: np.ndarray, records: np.ndarray, block: int) -> Iterator[int]:
    id_bytes, record_bytes = _bytes(ids).data, _bytes(records).data
    record = records.dtype.itemsize
    for begin in range(0, len(ids), block):
        end = begin + block
        checksum = xxhash.xxh3_64(id_bytes[8 * begin : 8 * end])
        checksum.update(record_bytes[record * begin : record * end])
        yield checksum.intdigest()


def _checksum(data: Any) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def write(path: pathlib.Path, label: Label, ids: np.ndarray, records: np.ndarray) -> int:
    """Writes and syncs ids <int64>[n], distinct and in any order, and their packed records. Returns the bytes."""
    hashes = mix64(ids)
    order = np.argsort(hashes)
    hashes, ids = hashes[order], np.ascontiguousarray(ids[order], "<i8")
    repeated = ids[1:][hashes[1:] == hashes[:-1]]
    if repeated.size:
        raise ValueError(
            f"ids of table {label.table!r}, section {label.section!r} repeat {repeated[0]}, but must be distinct: the "
            "table's snapshot is wrong. Report this as a bug."
        )
    block = max(_MIN_BLOCK_ROWS, _BLOCK_BYTES // (8 + records.dtype.itemsize))
    index = np.empty([-(-len(ids) // block)], _INDEX)
    index["first_hash"] = hashes[::block]
    record = records.dtype.descr if records.dtype.names else []
    header = json.dumps({**label._asdict(), "rows": len(ids), "block": block, "record": record}).encode()
    head = _MAGIC + len(header).to_bytes(8, "little") + _checksum(header) + header
    checksums: list[int] = []
    # NumPy moves a record of named fields field by field, and one without names at once, three times as fast.
    nameless = records.view(np.dtype((np.void, records.dtype.itemsize))) if records.dtype.itemsize else records
    with disk.new_file(path) as file:
        disk.write(file, head)
        disk.write(file, _bytes(ids))
        # A few blocks at a time, because a second copy of all records may not fit in memory.
        step = block * max(_CHUNK_BYTES // _BLOCK_BYTES, 1)
        for begin in range(0, len(ids), step):
            part = nameless[order[begin : begin + step]]
            checksums += _block_checksums(ids[begin : begin + step], part, block)
            disk.write(file, _bytes(part))
        index["checksum"] = checksums
        disk.write(file, _bytes(index))
        disk.write(file, _checksum(_bytes(index)))
    return len(head) + ids.nbytes + records.nbytes + index.nbytes + 8


class ShardFile:
    """Reads a file of `write`. The constructor reads and checks header and index; `chunks` reads rows.

    `label` is the expected origin of the rows. `bytes_read` counts the bytes read from the disk so far.
    """

    def __init__(self, path: pathlib.Path, label: Label):
        self.path, self.label = path, label
        self.bytes_read = 0
        with self._open() as file:
            size = os.fstat(file).st_size
            header = self._header(file, size)
            self.rows, self._block = header["rows"], header["block"]
            self.record = np.dtype([(name, dtype, tuple(*shape)) for name, dtype, *shape in header["record"]])
            self._records_at = self._ids_at + 8 * self.rows
            index_at = self._records_at + self.record.itemsize * self.rows
            blocks = -(-self.rows // self._block)
            want = index_at + _INDEX.itemsize * blocks + 8
            if size != want:
                raise self._refusal(f"{'is truncated' if size < want else 'has too much'}: {size} bytes, want {want}")
            self._index = self._read(file, np.empty([blocks], _INDEX), index_at)
            if self._read(file, np.empty([8], np.uint8), want - 8).tobytes() != _checksum(_bytes(self._index)):
                raise self._refusal("is damaged: its index differs from its checksum")
            firsts = self._index["first_hash"]
            if (firsts[1:] <= firsts[:-1]).any():
                raise self._refusal("is forged or damaged: the hashes of its index do not ascend")
        differing = [name for name in Label._fields if header[name] != getattr(label, name)]
        if differing:
            has, want_here = (
                ", ".join(f"{name} {fields[name]!r}" for name in differing) for fields in (header, label._asdict())
            )
            raise self._refusal(f"is foreign: it has {has}, but the manifest wants {want_here} here")

    def _header(self, file: int, size: int) -> dict[str, Any]:
        if size < _START.itemsize:
            raise self._refusal(f"is truncated: {size} bytes, want at least {_START.itemsize}")
        start = self._read(file, np.empty([1], _START), 0)[0]
        if start["magic"] != _MAGIC:
            raise self._refusal(f"is foreign: it does not begin with {_MAGIC.decode()}, as files of a checkpoint do")
        self._ids_at = _START.itemsize + int(start["length"])
        if self._ids_at > size:
            raise self._refusal(f"is truncated: {size} bytes, but its header ends at {self._ids_at}")
        header = self._read(file, np.empty([int(start["length"])], np.uint8), _START.itemsize).tobytes()
        if _checksum(header) != int(start["checksum"]).to_bytes(8, "little"):
            raise self._refusal("is damaged: its header differs from its checksum")
        try:
            fields = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise self._refusal(f"is forged or damaged: its header is not JSON, {error}") from error
        manifest.check_header(self.path, fields)
        return fields

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields ids <int64>[n] and records [n] of the rows with first <= Mix64(id) <= last, in hash order.

        Raises ValueError if the file is damaged or has become shorter. No row of a damaged block is yielded.
        """
        firsts = self._index["first_hash"]
        begin = max(int(np.searchsorted(firsts, np.uint64(first), side="right")) - 1, 0)
        end = int(np.searchsorted(firsts, np.uint64(last), side="right"))
        step = max(_CHUNK_BYTES // (self._block * (8 + self.record.itemsize)), 1)
        with self._open() as file:
            for at in range(begin, end, step):
                ids, records, hashes = self._verified(file, at, min(at + step, end))
                if begin < at and at + step < end:  # A chunk in the middle has neither bound of the range.
                    yield ids, records
                    continue
                from_row = int(np.searchsorted(hashes, np.uint64(first), side="left"))
                to_row = int(np.searchsorted(hashes, np.uint64(last), side="right"))
                yield ids[from_row:to_row], records[from_row:to_row]

    def _verified(self, file: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads and verifies the ids, records and hashes of blocks [begin, end)."""
        row, rows = begin * self._block, min(end * self._block, self.rows) - begin * self._block
        ids = self._read(file, np.empty([rows], "<i8"), self._ids_at + 8 * row)
        records = np.empty([rows], self.record)
        if self.record.itemsize:
            self._read(file, records, self._records_at + self.record.itemsize * row)
        for b, checksum in enumerate(_block_checksums(ids, records, self._block), begin):
            if checksum != self._index["checksum"][b]:
                block_rows = f"rows {b * self._block} to {min((b + 1) * self._block, self.rows)} of {self.rows}"
                raise self._refusal(f"is damaged: block {b} ({block_rows}) differs from its checksum")
        hashes = mix64(ids)
        next_hash = self._index["first_hash"][end : end + 1]
        ascending = (hashes[1:] > hashes[:-1]).all() and (hashes[-1:] < next_hash).all()
        if not ascending or (hashes[:: self._block] != self._index["first_hash"][begin:end]).any():
            raise self._refusal(f"is forged or damaged: ids of blocks {begin} to {end - 1} are not in hash order")
        return ids, records, hashes

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        with disk.refusing(self.path):
            file = os.open(self.path, os.O_RDONLY)
            try:
                yield file
            finally:
                os.close(file)

    def _read(self, file: int, into: np.ndarray, offset: int) -> np.ndarray:
        count = disk.read(file, into, offset)
        self.bytes_read += count
        if count < into.nbytes:
            raise self._refusal(f"is truncated: {count} bytes at {offset}, want {into.nbytes}")
        return into

    def _refusal(self, fault: str) -> ValueError:
        return disk.refusal(self.path, fault)
