"""Reads one rank's rows from the files of a checkpoint written by any number of ranks. Uses no collectives.

A rank of owner "hash_range" reads contiguous bytes, from the files whose hash ranges overlap its range. A rank of owner
"tfra" owns ids of all hashes (id modulo ranks), so it reads all files and keeps its ids.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tf_fusedrec.files.disk import refusal
from tf_fusedrec.files.hash_order import LAST_HASH, OWNERS, hash_range, mix64
from tf_fusedrec.files.manifest import TOMBSTONES, shard_name
from tf_fusedrec.files.shard_file import Label, ShardFile

T = TypeVar("T")
Chunk = tuple[np.ndarray, np.ndarray]  # ids <int64>[n] and records [n]


class SectionFiles(NamedTuple):
    """The files of one section that can hold rows of this rank."""

    complete: list[ShardFile]  # of the last save of the complete section
    changes: list[ShardFile]  # rows changed since
    removed: list[ShardFile]  # ids removed since


class TableReader:
    """Reads one rank's rows of one table. The constructor opens the files and checks headers and indices.

    Args:
      name, described: Name of the table in the checkpoint, and its entry in the manifest.
      rank, ranks, owner: The reading rank, all reading ranks, and the rule that assigns ids to them.
      records: dtype of a record by section, to read these sections only; None reads all sections as they are.
      id_bits: Ids must be in [0, 2^id_bits); 64 admits every int64.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        name: str,
        described: Mapping[str, Any],
        rank: int = 0,
        ranks: int = 1,
        *,
        owner: str = "hash_range",
        records: Mapping[str, np.dtype] | None = None,
        id_bits: int = 64,
    ):
        self.described = described
        self._directory, self._name, self._id_bits = folder, name, id_bits
        self._rank, self._ranks = rank, ranks
        self._by_range = owner == "hash_range"
        self._first, self._last = hash_range(rank, ranks) if self._by_range else (0, LAST_HASH)
        saved = {section for part in described["parts"] for section in part["sections"]} - {TOMBSTONES}
        self.sections = {
            section: self._open_section(section, None if records is None else records[section])
            for section in sorted(saved if records is None else saved & set(records))
        }

    @property
    def bytes_read(self) -> int:
        """Bytes read from the disk so far."""
        return sum(file.bytes_read for files in self.sections.values() for part in files for file in part)

    def record_dtype(self, section: str) -> np.dtype:
        return self.sections[section].complete[0].record

    def chunks(self, section: str = "rows") -> Iterator[Chunk]:
        """Yields verified, distinct ids with their records: about 32 MB at a time, and all changes at the end."""
        files = self.sections[section]
        changes = list(self._read(files.changes))
        replaced = [ids for ids, _ in [*changes, *self._read(files.removed)]]
        hashes = np.sort(mix64(np.concatenate(replaced))) if replaced else np.zeros([0], np.uint64)
        for ids, records in self._read(files.complete):
            if len(hashes):
                read = mix64(ids)
                kept = hashes[np.minimum(np.searchsorted(hashes, read), len(hashes) - 1)] != read
                ids, records = ids[kept], records[kept]
            yield ids, records
        yield from changes

    def _read(self, files: Sequence[ShardFile]) -> Iterator[Chunk]:
        for file in files:
            for ids, records in file.chunks(self._first, self._last):
                self._check_ids(file, ids)
                if self._by_range:
                    yield ids, records
                else:
                    kept = OWNERS["tfra"](ids, self._ranks) == self._rank
                    yield ids[kept], records[kept]

    def _check_ids(self, file: ShardFile, ids: np.ndarray) -> None:
        rank, ranks, owner = file.label.rank, file.label.ranks, self.described["owner"]
        # Hashes ascend, so both ends of a range suffice.
        checked = ids[[0, -1]] if owner == "hash_range" and len(ids) else ids
        foreign = checked[OWNERS[owner](checked, ranks) != rank]
        if foreign.size:
            raise refusal(file.path, f"is forged or damaged: id {foreign[0]} does not belong to rank {rank} of {ranks}")
        if self._id_bits < 64:
            beyond = ids[(ids < 0) | (ids >> min(self._id_bits, 63) > 0)]
            if beyond.size:
                raise ValueError(
                    f"ids of table {self._name!r} must lie in [0, 2^{self._id_bits}) with key_encoding='bits', got "
                    f"{beyond[0]} in {file.path}. Use key_encoding='hash'."
                )

    def _open_section(self, section: str, record: np.dtype | None) -> SectionFiles:
        parts = [part for part in self.described["parts"] if section in part["sections"]]
        last = max(p for p, part in enumerate(parts) if part["sections"][section])  # the last complete part
        files = SectionFiles(
            self._open(parts[last : last + 1], section),
            self._open(parts[last + 1 :], section),
            self._open(parts[last + 1 :], TOMBSTONES),
        )
        spec = self.described["spec"]
        for file in [*files.complete, *files.changes]:
            if record is not None and file.record != record:
                raise ValueError(
                    f"{file.path} holds records {file.record.descr}, but the table wants {record.descr}. Load it with "
                    "the version that wrote it."
                )
            shapes = {field: file.record[field].shape for field in file.record.names or ()}
            suits = section != "rows" or (shapes.get("row") == (spec["dim"],) and set(spec["slots"]) <= set(shapes))
            if file.record != files.complete[0].record or not suits:
                raise refusal(
                    file.path,
                    f"is forged or damaged: its records {file.record.descr} do not match the manifest's spec {spec}",
                )
        return files

    def _open(self, parts: Sequence[Mapping[str, Any]], section: str) -> list[ShardFile]:
        """Opens the files of `parts` that can hold hashes of this rank's range."""
        files = []
        for part in parts:
            ranks = part["ranks"]
            overlapping = range(self._first * ranks >> 64, (self._last * ranks >> 64) + 1)
            for rank in overlapping if self.described["owner"] == "hash_range" else range(ranks):
                path = self._directory / part["save"] / shard_name(self._name, section, rank)
                files.append(ShardFile(path, Label(part["save"], self._name, section, rank, ranks)))
        return files


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """Yields `items` in order. A thread makes the next item while the caller uses one, so two are in memory."""
    end: Any = object()
    with ThreadPoolExecutor(max_workers=1) as thread:
        next_item = thread.submit(next, items, end)
        while (item := next_item.result()) is not end:
            next_item = thread.submit(next, items, end)
            yield item
