"""What a rank reads: its range of hashes out of files that any number of ranks wrote. No collectives in here.

A table of owner "hash_range" reads contiguous bytes of the files whose writers' ranges meet its own. One of owner
"tfra" owns ids that are spread over all hashes (id modulo ranks): it reads all files and keeps its rows.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec.checkpoint.ahead import ahead
from tf_fusedrec.checkpoint.disk import refusal
from tf_fusedrec.checkpoint.manifest import shard_name
from tf_fusedrec.checkpoint.saving import latest
from tf_fusedrec.checkpoint.schema import TOMBSTONES
from tf_fusedrec.checkpoint.shard_file import Label, ShardFile
from tf_fusedrec.tables.hash_order import LAST_HASH, hash_range, hash_range_owner, mix64
from tf_fusedrec.tables.tfra import owner_of

Chunk = tuple[np.ndarray, np.ndarray]  # ids <int64>[n] and records [n]


class SectionShare:
    """The rows of one section that one rank reads: those of the full save, with what has changed since.

    Args:
      whole, changes, removed: files of the last save of all rows, of later rows, of tombstones.
      first, last: hashes that are read.
      mine: says which of ids <int64>[n] are kept; None keeps all.
      owner: by which rule the files' ids belong to the ranks that wrote them.
      id_bits: ids must lie in [0, 2^id_bits) for the table that they are for; 64 admits every int64.
    """

    def __init__(
        self,
        whole: list[ShardFile],
        changes: list[ShardFile],
        removed: list[ShardFile],
        first: int,
        last: int,
        mine: Callable[[np.ndarray], np.ndarray] | None,
        owner: str,
        id_bits: int,
    ):
        self._whole, self._changes, self._removed = whole, changes, removed
        self._first, self._last, self._mine = first, last, mine
        self._owner, self._id_bits = owner, id_bits

    @property
    def files(self) -> list[ShardFile]:
        return [*self._whole, *self._changes, *self._removed]

    @property
    def record(self) -> np.dtype:
        return self._whole[0].record

    def chunks(self) -> Iterator[Chunk]:
        """Yields distinct ids with their records, verified; some 32 MB at a time, changes at once."""
        changes = list(self._read(self._changes))
        gone = [ids for ids, _ in itertools.chain(changes, self._read(self._removed))]
        newer = np.sort(mix64(np.concatenate(gone))) if gone else np.zeros([0], np.uint64)
        for ids, records in self._read(self._whole):
            if len(newer):
                keep = ~_contains(newer, mix64(ids))
                ids, records = ids[keep], records[keep]
            yield ids, records
        yield from changes

    def _read(self, files: Sequence[ShardFile]) -> Iterator[Chunk]:
        for file in files:
            for ids, records in file.chunks(self._first, self._last):
                self._check_ids(file, ids)
                if self._mine is None:
                    yield ids, records
                else:
                    keep = self._mine(ids)
                    yield ids[keep], records[keep]

    def _check_ids(self, file: ShardFile, ids: np.ndarray) -> None:
        rank, ranks = file.label.rank, file.label.ranks
        ends = ids[[0, -1]] if len(ids) else ids  # of ascending hashes
        if self._owner == "hash_range":
            strange = ends[hash_range_owner(ends, ranks) != rank]
        else:
            strange = ids[owner_of(ids, ranks) != rank]
        if strange.size:
            raise refusal(file.path, f"is forged or damaged: id {strange[0]} is not of rank {rank} of {ranks}")
        if self._id_bits < 64:
            beyond = ids[(ids < 0) | (ids >> min(self._id_bits, 63) > 0)]
            if beyond.size:
                raise ValueError(
                    f"ids of table {file.label.table!r} must lie in [0, 2^{self._id_bits}) with key_encoding='bits', "
                    f"got {beyond[0]} in {file.path}. Use key_encoding='hash'."
                )


def _contains(sorted_hashes: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    at = np.minimum(np.searchsorted(sorted_hashes, hashes), len(sorted_hashes) - 1)
    return sorted_hashes[at] == hashes


class TableShare:
    """What one rank reads of one table: its sections, opened, with their headers and indices checked.

    Args:
      directory: of the checkpoint.
      name: of the table.
      described: the manifest's entry of the table.
      table: the backend that the rows are for; None reads all rows of all sections.
      rank, ranks: who reads.
    """

    def __init__(
        self, directory: pathlib.Path, name: str, described: Mapping[str, Any], table: Any, rank: int, ranks: int
    ):
        self.name, self.described, self.table = name, described, table
        self._directory = directory
        self._first, self._last = 0, LAST_HASH
        self._mine: Callable[[np.ndarray], np.ndarray] | None = None
        if table is not None and table.owner == "tfra":
            self._mine = lambda ids: owner_of(ids, ranks) == rank
        elif table is not None:
            self._first, self._last = hash_range(rank, ranks)
        saved = {section for part in described["parts"] for section in part["sections"]} - {TOMBSTONES}
        wanted = saved if table is None else saved & set(table.sections)
        self.sections = {section: self._section(section) for section in sorted(wanted)}

    @property
    def bytes_read(self) -> int:
        """Bytes read from the disk, so far."""
        return sum(file.bytes_read for share in self.sections.values() for file in share.files)

    def _section(self, section: str) -> SectionShare:
        parts = [part for part in self.described["parts"] if section in part["sections"]]
        begin = max(p for p, part in enumerate(parts) if part["sections"][section])  # the last that holds all
        whole, changes = self._open(parts[begin : begin + 1], section), self._open(parts[begin + 1 :], section)
        removed = self._open(parts[begin + 1 :], TOMBSTONES)
        now = None if self.table is None else self.table.record_dtype(section)
        for file in [*whole, *changes]:
            if now is not None and file.record != now:
                raise ValueError(f"{file.path} holds records {file.record.descr}, but the table's are {now.descr} now.")
            self._check_record(file, section, whole[0].record)
        bits = getattr(self.table, "id_bits", 64)
        owner = self.described["owner"]
        return SectionShare(whole, changes, removed, self._first, self._last, self._mine, owner, bits)

    def _check_record(self, file: ShardFile, section: str, first: np.dtype) -> None:
        """A table that nobody has built says by its spec alone what its records are."""
        spec = self.described["spec"]
        shapes = {field: file.record[field].shape for field in file.record.names or ()}
        suits = section != "rows" or (shapes.get("row") == (spec["dim"],) and set(spec["slots"]) <= set(shapes))
        if file.record != first or not suits:
            raise refusal(
                file.path,
                f"is forged or damaged: its records {file.record.descr} are not those of the manifest's spec {spec}",
            )

    def _open(self, parts: Sequence[Mapping[str, Any]], section: str) -> list[ShardFile]:
        """The files of `parts` that can hold hashes of this share."""
        files = []
        for part in parts:
            ranks = part["ranks"]
            writers = range(self._first * ranks >> 64, (self._last * ranks >> 64) + 1)
            for rank in writers if self.described["owner"] == "hash_range" else range(ranks):
                path = self._directory / part["save"] / shard_name(self.name, section, rank)
                files.append(ShardFile(path, Label(part["save"], self.name, section, rank, ranks)))
        return files


def check_tables(described: Mapping[str, Any], tables: Sequence[Any], directory: pathlib.Path, partial: bool) -> None:
    """Raises ValueError unless a checkpoint has every table, or `partial`, and those that it has with the same spec."""
    for table in tables:
        for name in table.names:
            if name not in described:
                if partial:
                    continue
                raise ValueError(
                    f"Checkpoint {directory} holds no table {name!r}. It holds {sorted(described)}. To begin with an "
                    "empty table, load with partial=True."
                )
            now, saved = json.loads(json.dumps(table.spec(name))), described[name]["spec"]
            if now != saved:
                raise ValueError(
                    f"Table {name!r} of checkpoint {directory} has another spec. Saved: {saved}. Now: {now}. Use the "
                    "saved one, or take over the rows alone with tf_fusedrec.checkpoint.warm_start."
                )


def open_tables(
    directory: pathlib.Path, described: Mapping[str, Any], tables: Sequence[Any], rank: int, ranks: int, partial: bool
) -> list[TableShare]:
    """Opens what one rank reads of every table; checks all that can be known without reading rows."""
    check_tables(described, tables, directory, partial)
    return [
        TableShare(directory, name, described[name], table, rank, ranks)
        for table in tables for name in table.names if name in described
    ]  # fmt: skip


def holds_rows(tables: Sequence[Any]) -> bool:
    """Whether any of the tables holds a row on this rank."""
    return any(table.size(name) > 0 for table in tables for name in table.names)


def staged(shares: Sequence[TableShare]) -> dict[tuple[str, str], list[Chunk]]:
    """All rows of `shares`, verified, in memory: by table and section."""
    return {(share.name, section): list(s.chunks()) for share in shares for section, s in share.sections.items()}


def restore(
    shares: Sequence[TableShare], tables: Sequence[Any], rows: Mapping[tuple[str, str], list[Chunk]] | None = None
) -> None:
    """Replaces all that the tables hold by `rows`, which are `staged(shares)`, or by what is read now."""
    for table in tables:
        table.clear()
    for share in shares:
        for section, source in share.sections.items():
            for ids, records in ahead(source.chunks()) if rows is None else rows[share.name, section]:
                share.table.restore(share.name, section, ids, records)
    for table in tables:
        of_table = [share.described for share in shares if share.table is table]
        if of_table:
            # Tables of one group count together. Where they come from groups that had counted differently, the largest
            # counts: rows seem older than they are, and no row is of the future.
            table.clock = latest(described["clock"] for described in of_table)
            counted = [described["iterations"] for described in of_table if described["iterations"] is not None]
            if counted:
                table.optimizer.iterations.assign(max(counted))
            rates = [described["learning_rate"] for described in of_table if described.get("learning_rate")]
            if rates:
                table.optimizer.restore_rates(rates)
