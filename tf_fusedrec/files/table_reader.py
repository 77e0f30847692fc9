"""Reads one rank's rows from the files of a checkpoint written by any number of ranks. Uses no collectives.

A table of owner "hash_range" reads contiguous bytes, from the files whose hash ranges overlap this rank's range. A
table of owner "tfra" owns ids spread over all hashes (id modulo ranks), so it reads all files and keeps its own rows.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from tf_fusedrec.files.disk import refusal
from tf_fusedrec.files.hash_order import LAST_HASH, OWNERS, hash_range, mix64, tfra_owner
from tf_fusedrec.files.manifest import TOMBSTONES, latest, shard_name
from tf_fusedrec.files.shard_file import Label, ShardFile

Chunk = tuple[np.ndarray, np.ndarray]  # ids <int64>[n] and records [n]


class SectionReader:
    """Reads one rank's rows of one section: the rows of the full save with the later changes applied.

    Args:
      whole: Files of the last save of the whole section.
      changes: Files of rows changed since.
      removed: Files of tombstones since.
      first, last: Smallest and largest hash to read.
      mine: Function from ids <int64>[n] to a mask <bool>[n] of ids to keep; None keeps all.
      owner: Rule that assigns ids to the ranks that wrote the files, "hash_range" or "tfra".
      id_bits: Bound of the target table: ids must lie in [0, 2^id_bits); 64 admits every int64.
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
        """Yields verified, distinct ids with their records: about 32 MB at a time, and all changes at the end."""
        changes = list(self._read(self._changes))
        replaced = [ids for ids, _ in itertools.chain(changes, self._read(self._removed))]
        replaced_hashes = np.sort(mix64(np.concatenate(replaced))) if replaced else np.zeros([0], np.uint64)
        for ids, records in self._read(self._whole):
            if len(replaced_hashes):
                keep = ~_contains(replaced_hashes, mix64(ids))
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
        # Hashes ascend, so a check of both ends is enough for ranges of them.
        checked = ids[[0, -1]] if self._owner == "hash_range" and len(ids) else ids
        foreign = checked[OWNERS[self._owner](checked, ranks) != rank]
        if foreign.size:
            raise refusal(file.path, f"is forged or damaged: id {foreign[0]} does not belong to rank {rank} of {ranks}")
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


class TableReader:
    """Reads one rank's rows of one table. The constructor opens the files and checks headers and indices.

    Args:
      directory: Folder of the checkpoint.
      name: Name of the table.
      described: Entry of the table in the manifest.
      table: Backend that takes the rows; None reads all rows of all sections.
      rank, ranks: Number of the reading rank, and of all reading ranks.
      saved_name: Name of the table in the checkpoint; None: `name`.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        name: str,
        described: Mapping[str, Any],
        table: Any,
        rank: int,
        ranks: int,
        saved_name: str | None = None,
    ):
        self.name, self.described, self.table = name, described, table
        self._saved_name = saved_name or name
        self._directory = directory
        self._first, self._last = 0, LAST_HASH
        self._mine: Callable[[np.ndarray], np.ndarray] | None = None
        if table is not None and table.owner == "tfra":
            self._mine = lambda ids: tfra_owner(ids, ranks) == rank
        elif table is not None:
            self._first, self._last = hash_range(rank, ranks)
        saved = {section for part in described["parts"] for section in part["sections"]} - {TOMBSTONES}
        wanted = saved if table is None else saved & set(table.sections_of(name))
        self.sections = {section: self._section(section) for section in sorted(wanted)}

    @property
    def bytes_read(self) -> int:
        """Bytes read from the disk so far."""
        return sum(file.bytes_read for share in self.sections.values() for file in share.files)

    def _section(self, section: str) -> SectionReader:
        parts = [part for part in self.described["parts"] if section in part["sections"]]
        begin = max(p for p, part in enumerate(parts) if part["sections"][section])  # the last whole part
        whole, changes = self._open(parts[begin : begin + 1], section), self._open(parts[begin + 1 :], section)
        removed = self._open(parts[begin + 1 :], TOMBSTONES)
        now = None if self.table is None else self.table.record_dtype(section)
        for file in [*whole, *changes]:
            if now is not None and file.record != now:
                raise ValueError(
                    f"{file.path} holds records {file.record.descr}, but the table wants {now.descr}. Load it with the "
                    "version that wrote it."
                )
            self._check_record(file, section, whole[0].record)
        bits = getattr(self.table, "id_bits", 64)
        owner = self.described["owner"]
        return SectionReader(whole, changes, removed, self._first, self._last, self._mine, owner, bits)

    def _check_record(self, file: ShardFile, section: str, first: np.dtype) -> None:
        """Refuses records that contradict the spec. Without a target table only the spec tells their form."""
        spec = self.described["spec"]
        shapes = {field: file.record[field].shape for field in file.record.names or ()}
        suits = section != "rows" or (shapes.get("row") == (spec["dim"],) and set(spec["slots"]) <= set(shapes))
        if file.record != first or not suits:
            raise refusal(
                file.path,
                f"is forged or damaged: its records {file.record.descr} do not match the manifest's spec {spec}",
            )

    def _open(self, parts: Sequence[Mapping[str, Any]], section: str) -> list[ShardFile]:
        """Opens the files of `parts` that can hold hashes of this rank's range."""
        files = []
        for part in parts:
            ranks = part["ranks"]
            writers = range(self._first * ranks >> 64, (self._last * ranks >> 64) + 1)
            for rank in writers if self.described["owner"] == "hash_range" else range(ranks):
                path = self._directory / part["save"] / shard_name(self._saved_name, section, rank)
                files.append(ShardFile(path, Label(part["save"], self._saved_name, section, rank, ranks)))
        return files


def check_tables(
    described: Mapping[str, Any],
    tables: Sequence[Any],
    directory: pathlib.Path,
    partial: bool,
    names: Mapping[str, str],
) -> None:
    """Raises ValueError if a table has another spec in the checkpoint, or is missing there without `partial`."""
    for table in tables:
        for name in table.names:
            saved_name = names.get(name, name)
            called = f"Table {name!r}" if saved_name == name else f"Table {name!r} (saved as {saved_name!r})"
            if saved_name not in described:
                if partial and name not in names:
                    continue
                raise ValueError(
                    f"Checkpoint {directory} holds no table {saved_name!r}. It holds {sorted(described)}. To start "
                    "with an empty table, load with partial=True; to load a table of another name, with "
                    f"names={{{name!r}: <its name there>}}."
                )
            now, saved = json.loads(json.dumps(table.spec(name))), described[saved_name]["spec"]
            if now != saved:
                raise ValueError(
                    f"{called} of checkpoint {directory} has another spec. Saved: {saved}. Now: {now}. Use the "
                    "saved spec, or load the rows alone with tf_fusedrec.checkpoint.warm_start."
                )


def open_tables(
    directory: pathlib.Path,
    described: Mapping[str, Any],
    tables: Sequence[Any],
    rank: int,
    ranks: int,
    partial: bool,
    names: Mapping[str, str] | None = None,
) -> list[TableReader]:
    """Opens one rank's readers of all tables. Makes every check that needs no rows.

    Args:
      names: Names in the checkpoint of tables with another name now, by this name.
    """
    names = names or {}
    check_tables(described, tables, directory, partial, names)
    saved_names = {name: names.get(name, name) for table in tables for name in table.names}
    return [
        TableReader(directory, name, described[saved_names[name]], table, rank, ranks, saved_names[name])
        for table in tables for name in table.names if saved_names[name] in described
    ]  # fmt: skip


def holds_rows(tables: Sequence[Any]) -> bool:
    """Returns whether any of the tables holds a row on this rank."""
    return any(table.size(name) > 0 for table in tables for name in table.names)


def read_all(readers: Sequence[TableReader]) -> dict[tuple[str, str], list[Chunk]]:
    """Reads and verifies all rows of `readers` into memory, by table and section."""
    return {
        (reader.name, name): list(section.chunks()) for reader in readers for name, section in reader.sections.items()
    }


def restore(
    readers: Sequence[TableReader], tables: Sequence[Any], rows: Mapping[tuple[str, str], list[Chunk]] | None = None
) -> None:
    """Replaces the contents of the tables by `rows`, the result of `read_all(readers)`, or by rows read now."""
    for table in tables:
        table.clear()
    for reader in readers:
        for name, section in reader.sections.items():
            for ids, records in prefetched(section.chunks()) if rows is None else rows[reader.name, name]:
                reader.table.restore(reader.name, name, ids, records)
    for table in tables:
        of_table = [reader.described for reader in readers if reader.table is table]
        if of_table:
            # Tables of one group share a clock, but may come from groups with different clocks. The largest is taken:
            # rows may seem older than they are, but no row lies in the future.
            table.clock = latest(described["clock"] for described in of_table)
            iterations = [described["iterations"] for described in of_table if described["iterations"] is not None]
            if iterations:
                table.optimizer.iterations.assign(max(iterations))
            rates = [described["learning_rate"] for described in of_table if described.get("learning_rate")]
            if rates:
                table.optimizer.restore_rates(rates)


T = TypeVar("T")


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """Yields `items` in order. A thread makes the next item meanwhile, so two items are in memory."""
    end: Any = object()
    with ThreadPoolExecutor(max_workers=1) as thread:
        next_item = thread.submit(next, items, end)
        while (item := next_item.result()) is not end:
            next_item = thread.submit(next, items, end)
            yield item
