"""Rows of an epoch by their positions, read ahead in threads: row groups are decoded while others are trained.

    positions of each batch ─▶ blocks of the order ─▶ row groups ─▶ (threads) Arrow ─▶ Rows ─▶ one gather ─▶ batch

Memory is that of two blocks and of threads + 1 row groups, whatever the size of the data set. Row groups larger than a
block are decoded in pieces of READ_ROWS rows instead, one after another; only the read-ahead of tf.data hides them.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tf_fusedrec.data import files
from tf_fusedrec.data.arrow_rows import GOOD, left_out, rows_from_arrow
from tf_fusedrec.data.bad_input import BadInput
from tf_fusedrec.data.columns import Column
from tf_fusedrec.data.order import EpochOrder
from tf_fusedrec.data.rows import Block, RowQueue, Rows, concat

READ_ROWS = 512  # rows decoded at once; a few megabytes for rows of some hundred tokens

Interval = tuple[int, int]  # begin and end of positions
T = TypeVar("T")


class RowGroup(NamedTuple):
    """Where a row group is."""

    file: str  # path below the folder
    number: int  # in the file
    num_rows: int


class GroupReader:
    """Decodes row groups of one folder; may be called from several threads.

    Args:
      folder: where the files are.
      groups: what may be read.
      columns: what of them.
      bad: meets rows that cannot be used, and row groups that cannot be read.
    """

    def __init__(
        self, folder: files.Folder, groups: Sequence[RowGroup], columns: Sequence[Column], bad: BadInput
    ) -> None:
        self._folder, self._groups, self._columns, self._bad = folder, groups, columns, bad

    def read(self, group: int, first: int, last: int, *, at_once: bool = False) -> Iterator[Rows]:
        """Rows first .. last of a row group, in chunks; with GOOD where `bad` skips.

        Args:
          group, first, last: which.
          at_once: decodes the whole row group first, which takes 0.9 times as long as doing so in pieces.

        Raises:
          ValueError: what `bad` meets, unless it skips; with the name of the file and the row group.
        """
        file, number, _ = self._groups[group]
        where = f"{self._folder.name}/{file}, row group {number}"
        done = first
        try:
            with files.readable(where), self._folder.open(file) as parquet:
                for rows in self._chunks(parquet, file, number, where, first, last, at_once):
                    done += rows.num_rows
                    yield rows
        except ValueError as error:
            if not self._bad.skips:
                raise
            self._bad.meet(where, str(error).removeprefix(f"{where}: "), range(done, last))
            yield left_out(self._columns, last - done)

    def _chunks(
        self, parquet: pq.ParquetFile, file: str, number: int, where: str, first: int, last: int, at_once: bool
    ) -> Iterator[Rows]:
        partitions = files.partition_values(file)
        stored = parquet.schema_arrow
        names = [column.name for column in self._columns if stored.get_field_index(column.name) >= 0]
        batches: Iterable[pa.RecordBatch]
        if at_once:
            batches = parquet.read_row_group(number, columns=names, use_threads=False).to_batches()
        else:
            batches = parquet.iter_batches(READ_ROWS, row_groups=[number], columns=names, use_threads=False)
        begin = 0
        for batch in batches:
            end = begin + batch.num_rows
            low, high = max(begin, first), min(end, last)
            if low < high:
                part = batch.slice(low - begin, high - low)
                yield rows_from_arrow(
                    part, self._columns, where, self._bad, first_row=low, partitions=partitions
                )  # fmt: skip
            begin = end
            if begin >= last:
                break


def read_ahead(jobs: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """Results of the jobs in their order; up to `threads` of them run while the caller works on a result."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        waiting: collections.deque[concurrent.futures.Future[T]] = collections.deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def read_groups(
    reader: GroupReader, groups: Sequence[RowGroup], spans: Iterable[tuple[int, int, int]], small: int, threads: int
) -> Iterator[Rows]:
    """The rows of spans (row group, first, end) in their order; groups of at most `small` rows ahead, in threads."""

    def job(span: tuple[int, int, int]) -> Callable[[], Iterable[Rows]]:
        if groups[span[0]].num_rows <= small:
            return lambda: list(reader.read(*span, at_once=True))
        return lambda: reader.read(*span)  # decoded when the caller gets there

    for rows in read_ahead((job(span) for span in spans), threads):
        yield from rows


class PositionReader:
    """Rows of one epoch by position; positions may be asked for once, block after block.

    Args:
      reader: decodes the row groups.
      groups: of the folder.
      order: of the epoch.
      intervals: rising positions that hold all that will be asked for; blocks outside of them are not read.
      threads: that decode ahead.
    """

    def __init__(
        self,
        reader: GroupReader,
        groups: Sequence[RowGroup],
        order: EpochOrder,
        intervals: Sequence[Interval],
        threads: int,
    ) -> None:
        self._order = order
        numbers = np.unique(np.concatenate([np.empty(0, np.int64), *(_blocks(order, *part) for part in intervals)]))
        spans = (span for number in numbers.tolist() for span in order.pieces(*order.block(number)))
        self._chunks = read_groups(reader, groups, _joined(spans), order.block_rows, threads)
        self._numbers = iter(numbers.tolist())
        self._queue, self._queued = RowQueue(), 0
        self._number = -1  # of the block that is held
        self._block: Block | None = None
        self._mixed = np.empty(0, np.int64)

    def take(self, positions: np.ndarray) -> list[Rows]:
        """The rows at `positions` <int64>[n], rising, without those left out; one part for each block they lie in."""
        parts = []
        cuts = np.flatnonzero(np.diff(positions // self._order.block_rows)) + 1
        for part in np.split(positions, cuts) if len(positions) else []:
            number = int(part[0]) // self._order.block_rows
            while self._number < number:
                self._next_block()
            rows = self._mixed[part - self._order.block(number)[0]]
            assert self._block is not None
            good = self._block.columns.get(GOOD)
            if good is not None:
                assert isinstance(good, np.ndarray)
                rows = rows[good[rows]]
            parts.append(self._block.take(rows))
        return parts

    def close(self) -> None:
        """Ends the threads."""
        self._chunks.close()  # type: ignore[attr-defined]

    def _next_block(self) -> None:
        self._number = next(self._numbers)
        begin, end = self._order.block(self._number)
        while self._queued < end - begin:
            rows = next(self._chunks)
            self._queue.append(rows)
            self._queued += rows.num_rows
        self._block = self._queue.pop(end - begin)
        self._queued -= end - begin
        self._mixed = self._order.mixed(self._number)


def _blocks(order: EpochOrder, begin: int, end: int) -> np.ndarray:
    """Numbers of the blocks that positions begin .. end lie in."""
    return np.arange(begin // order.block_rows, -(-end // order.block_rows) if begin < end else 0)


def _joined(spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Joins what two blocks want of one row group, so that it is decoded once."""
    last: tuple[int, int, int] | None = None
    for group, first, end in spans:
        if last is not None and last[0] == group and last[2] == first:
            last = (group, last[1], end)
            continue
        if last is not None:
            yield last
        last = (group, first, end)
    if last is not None:
        yield last


def without_marks(rows: Rows) -> Rows:
    """Rows as the model gets them."""
    return Rows({name: column for name, column in rows.columns.items() if name != GOOD}, rows.num_rows)


def joined_rows(parts: Sequence[Rows], nothing: Rows) -> Rows:
    """One batch of its parts; `nothing` where there are none."""
    return without_marks(concat(list(parts))) if parts else nothing
