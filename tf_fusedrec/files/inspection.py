"""Reads the tables of a checkpoint with NumPy only, one part of a table at a time.

A part is a range of hashes, as a rank of many would read it. So parts of two checkpoints have the same ids.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec.files import disk
from tf_fusedrec.files.hash_order import mix64
from tf_fusedrec.files.manifest import unpack_clock
from tf_fusedrec.files.table_reader import TableReader

PART_BYTES = 1 << 26  # of the ids and records that are in memory at once, about
_HASHES = 1 << 64  # As many ranks own one hash each.


class Row(NamedTuple):
    """One row. Tables of TFRA count no lookups."""

    id: int
    lookups: int | None
    age: int | None  # steps since the last lookup
    norm: float


class TableSummary(NamedTuple):
    """Statistics of all rows of a table. Lookups and ages are None for tables of TFRA."""

    rows: int
    dim: int
    dtype: str
    rule: str  # of the optimizer
    bytes: int  # of ids, rows, slots and counters
    step: int  # training lookups of the table until the save
    norm_mean: float
    norm_max: float
    lookups_median: int | None = None
    lookups_max: int | None = None
    age_median: int | None = None
    age_max: int | None = None
    unseen_steps: int | None = None  # half of the steps
    unseen_share: float | None = None  # share of rows whose age is larger than unseen_steps
    histogram: tuple[tuple[int, int, int], ...] = ()  # smallest and largest number of lookups, rows
    hottest: tuple[Row, ...] = ()  # most lookups first
    coldest: tuple[Row, ...] = ()  # oldest last lookup first, then fewest lookups


class Change(NamedTuple):
    """What differs between a table of two checkpoints."""

    rows: tuple[int, int]  # before, after
    added: int
    removed: int
    changed: int
    moved_mean: float  # L2 distance between the old and the new row, over the changed rows
    moved_max: float
    most_moved: tuple[tuple[int, float], ...]  # id and distance


class SavedTable:
    """One table of a checkpoint. The constructor opens its files and checks headers and indices.

    Every method verifies what it reads, and raises a ValueError that names a damaged file.
    """

    def __init__(self, folder: pathlib.Path, name: str, described: Mapping[str, Any]):
        self.name = name
        self._read = functools.partial(TableReader, folder, name, described)
        spec = described["spec"]
        self.dim, self.dtype = spec["dim"], spec["storage"]
        self.rule = str(spec["optimizer"].get("rule", "unknown"))
        _, self.step = unpack_clock(described["clock"])
        reader = self._read()
        files = reader.sections["rows"]
        self.row_bytes = 8 + reader.record_dtype("rows").itemsize
        stored = sum(file.rows for file in (*files.complete, *files.changes))
        self.parts = max(-(-stored * self.row_bytes // PART_BYTES), 1)

    def chunks(self, part: int = 0, parts: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields distinct ids <int64>[n] and records [n] of part `part` of `parts`."""
        return self._read(part, parts).chunks()

    def summary(self, most: int = 10) -> TableSummary:
        """Reads all rows once. `most` bounds the hottest and the coldest rows."""
        lookups, ages = Tally(), Tally()
        hottest = coldest = _Rows(*(np.zeros(0, dtype) for dtype in _Rows.dtypes()))
        rows, norm_sum, norm_max = 0, 0.0, 0.0
        for ids, records in self._all():
            norms = np.linalg.norm(_numbers(records), axis=1)
            rows, norm_sum = rows + len(ids), norm_sum + float(norms.sum(dtype=np.float64))
            norm_max = max(norm_max, float(norms.max(initial=0.0)))
            if "count" not in records.dtype.names:
                continue
            age = self.step - records["last"].astype(np.int64)
            count = records["count"].astype(np.int64)
            lookups.add(count)
            ages.add(age)
            here = _Rows(ids, count, age, norms)
            hottest = hottest.joined(here).first(most, lambda r: (r.ids, -r.lookups))
            coldest = coldest.joined(here).first(most, lambda r: (r.ids, r.lookups, -r.ages))
        base = TableSummary(
            rows, self.dim, self.dtype, self.rule, rows * self.row_bytes, self.step, norm_sum / max(rows, 1), norm_max
        )
        if not lookups.total:
            return base
        unseen = self.step // 2
        return base._replace(
            lookups_median=lookups.median(), lookups_max=lookups.largest(),
            age_median=ages.median(), age_max=ages.largest(),
            unseen_steps=unseen, unseen_share=ages.share_above(unseen),
            histogram=lookups.histogram(), hottest=hottest.rows(), coldest=coldest.rows(),
        )  # fmt: skip

    def find(self, row_id: int) -> tuple[Row, np.ndarray] | None:
        """The row of an id and its numbers <float32>[D], or None. Reads only the blocks that can have the id."""
        place = int(mix64(np.array([row_id]))[0])
        for _, records in self.chunks(place, _HASHES):
            if len(records):
                counted = "count" in records.dtype.names
                numbers = _numbers(records)[0]
                age = self.step - int(records["last"][0]) if counted else None
                lookups = int(records["count"][0]) if counted else None
                return Row(row_id, lookups, age, float(np.linalg.norm(numbers))), numbers
        return None

    def nearest(self, row: np.ndarray, most: int = 10) -> list[tuple[int, float]]:
        """Ids whose rows have the largest cosine with `row` <float>[D], with the cosines, the largest first."""
        best_ids, best = np.zeros(0, np.int64), np.zeros(0, np.float32)
        unit = row / max(np.linalg.norm(row), np.finfo(np.float32).tiny)
        for ids, records in self._all():
            rows = _numbers(records)
            cosines = rows @ unit / np.maximum(np.linalg.norm(rows, axis=1), np.finfo(np.float32).tiny)
            best_ids, best = np.concatenate([best_ids, ids]), np.concatenate([best, cosines])
            order = np.lexsort((best_ids, -best))[:most]
            best_ids, best = best_ids[order], best[order]
        return list(zip(best_ids.tolist(), best.tolist()))

    def change_since(self, before: SavedTable, most: int = 10) -> Change:
        """Compares all rows with those of another checkpoint.

        Raises:
          ValueError: the rows have another dim.
        """
        if self.dim != before.dim:
            raise ValueError(
                f"table {self.name!r} has dim {before.dim} before and {self.dim} after, so its rows cannot be "
                "compared. Name two checkpoints of one model."
            )
        counts = np.zeros(5, np.int64)  # rows before and after, added, removed, changed
        total, largest = 0.0, 0.0
        moved_ids, moved = np.zeros(0, np.int64), np.zeros(0)
        parts = max(self.parts, before.parts)
        for part in range(parts):
            (old_ids, old), (ids, new) = (_whole(table.chunks(part, parts)) for table in (before, self))
            both, at_old, at_new = np.intersect1d(old_ids, ids, assume_unique=True, return_indices=True)
            distance = np.linalg.norm(new[at_new] - old[at_old], axis=1).astype(np.float64)
            differs = (new[at_new] != old[at_old]).any(axis=1)
            counts += [len(old_ids), len(ids), len(ids) - len(both), len(old_ids) - len(both), differs.sum()]
            total, largest = total + float(distance.sum()), max(largest, float(distance.max(initial=0.0)))
            moved_ids = np.concatenate([moved_ids, both[differs]])
            moved = np.concatenate([moved, distance[differs]])
            order = np.lexsort((moved_ids, -moved))[:most]
            moved_ids, moved = moved_ids[order], moved[order]
        was, now, added, removed, changed = counts.tolist()
        pairs = tuple(zip(moved_ids.tolist(), moved.tolist()))
        return Change((was, now), added, removed, changed, total / max(changed, 1), largest, pairs)

    def _all(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for part in range(self.parts):
            yield from self.chunks(part, self.parts)


def open_tables(folder: pathlib.Path, described: Mapping[str, Any]) -> dict[str, SavedTable]:
    """Returns the tables of a save by name, `described` being its manifest. All but the rows is verified.

    Raises:
      ValueError: A file is missing, damaged or foreign. The message names it.
    """
    for name, (size, checksum) in described["dense"].items():
        disk.check_file(folder / described["save"] / name, size, checksum)
    return {name: SavedTable(folder, name, table) for name, table in sorted(described["tables"].items())}


class Tally:
    """Counts equal integers. Lookups and ages have few distinct values, so medians are exact and memory is small."""

    def __init__(self) -> None:
        self._values, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)

    @property
    def total(self) -> int:
        return int(self._counts.sum())

    def add(self, values: np.ndarray) -> None:
        values, counts = np.unique(values, return_counts=True)
        self._values, place = np.unique(np.concatenate([self._values, values]), return_inverse=True)
        joined = np.zeros(len(self._values), np.int64)
        np.add.at(joined, place, np.concatenate([self._counts, counts]))
        self._counts = joined

    def median(self) -> int:
        """The lower median."""
        return int(self._values[np.searchsorted(np.cumsum(self._counts), (self.total + 1) // 2)])

    def largest(self) -> int:
        return int(self._values[-1])

    def share_above(self, limit: int) -> float:
        return float(self._counts[self._values > limit].sum() / max(self.total, 1))

    def histogram(self) -> tuple[tuple[int, int, int], ...]:
        """Values by powers of two: (smallest, largest, number) of 0, 1, 2 to 3, 4 to 7 ..., without empty ends."""
        bins = np.frexp(self._values.clip(0).astype(np.float64))[1]  # 0 -> 0, 1 -> 1, 2 to 3 -> 2 ...
        rows = np.bincount(bins, self._counts).astype(np.int64).tolist()
        bounds = [(0, 0), *((1 << b, (2 << b) - 1) for b in range(len(rows) - 1))]
        first = next(b for b, count in enumerate(rows) if count)
        return tuple((*bound, count) for bound, count in zip(bounds[first:], rows[first:]))


class _Rows(NamedTuple):
    """Candidates for the hottest or coldest rows, arrays of equal length."""

    ids: np.ndarray
    lookups: np.ndarray
    ages: np.ndarray
    norms: np.ndarray

    @staticmethod
    def dtypes() -> tuple[type, ...]:
        return np.int64, np.int64, np.int64, np.float32

    def joined(self, more: _Rows) -> _Rows:
        return _Rows(*(np.concatenate(pair) for pair in zip(self, more)))

    def first(self, most: int, keys: Any) -> _Rows:
        order = np.lexsort(keys(self))[:most]
        return _Rows(*(array[order] for array in self))

    def rows(self) -> tuple[Row, ...]:
        return tuple(Row(*fields) for fields in zip(*(array.tolist() for array in self)))


def _numbers(records: np.ndarray) -> np.ndarray:
    """The rows <float32>[n, D] of records. A field <u2 has the bits of bfloat16, the upper half of a float32."""
    rows = records["row"]
    return (rows.astype("<u4") << 16).view("<f4") if rows.dtype == "<u2" else rows.astype(np.float32)


def _whole(chunks: Iterator[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    parts: Sequence[tuple[np.ndarray, np.ndarray]] = [(ids, _numbers(records)) for ids, records in chunks]
    ids, rows = (np.concatenate(arrays) for arrays in zip(*parts))
    return ids, rows
