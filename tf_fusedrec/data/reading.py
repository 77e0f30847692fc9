"""Reads the rows of an epoch by position. Threads decode row groups ahead of training.

    positions of each batch ─▶ blocks of the order ─▶ row groups ─▶ (threads) Arrow ─▶ Rows ─▶ one gather ─▶ batch

Memory holds two blocks and threads + 1 row groups, for any size of the data set. The caller decodes a row group larger
than a block, in chunks of READ_ROWS rows. Only the prefetching of tf.data hides that time.

The order of an epoch (EpochOrder) is a permutation of all rows, equal on all ranks and for any number of ranks:

  1. The row groups of all files form one sequence: by file name, or with a seed in the epoch's random order.
  2. The sequence is cut into blocks of block_rows rows, also inside a row group. With a seed each block is shuffled.

A position (0 .. rows - 1) identifies a row of the epoch. It is a pure function of (seed, epoch, sizes of the row
groups). "Rows 4,000 to 9,000 of epoch 3" therefore fully describes the state of a reader: shard, row and shuffle. Rows
of one block stay together, so data larger than a block are not fully shuffled.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tf_fusedrec.data import filesystems
from tf_fusedrec.data.columns import BadInput, Column
from tf_fusedrec.data.rows import GOOD, Block, RowQueue, Rows, concat, rows_from_arrow, skipped_rows

READ_ROWS = 512  # rows decoded at once, a few megabytes for rows of some hundred tokens

Interval = tuple[int, int]  # begin and end of positions
T = TypeVar("T")


class RowGroup(NamedTuple):
    """Place and size of a row group."""

    file: str  # path below the folder
    number: int  # in the file
    num_rows: int


class GroupReader:
    """Decodes row groups of one folder. Several threads may call it.

    Args:
      folder: Folder of the files.
      groups: All row groups of the folder.
      columns: Columns to read.
      bad: Handler of bad rows and unreadable row groups.
    """

    def __init__(
        self, folder: filesystems.Folder, groups: Sequence[RowGroup], columns: Sequence[Column], bad: BadInput
    ) -> None:
        self._folder, self._groups, self._columns, self._bad = folder, groups, columns, bad

    def read(self, group: int, first: int, last: int, *, at_once: bool = False) -> Iterator[Rows]:
        """Yields the rows first .. last of a row group in chunks, with the column GOOD if `bad` skips.

        Args:
          group: Number of the row group in `groups`.
          first, last: First and end row.
          at_once: True to decode the whole row group first, which takes 0.9 times as long as in chunks.

        Raises:
          ValueError: bad input, unless `bad` skips it. The error names the file and the row group.
        """
        file, number, _ = self._groups[group]
        where = f"{self._folder.name}/{file}, row group {number}"
        done = first
        try:
            with filesystems.readable(where), self._folder.open(file) as parquet:
                for rows in self._chunks(parquet, file, number, where, first, last, at_once):
                    done += rows.num_rows
                    yield rows
            if done < last:  # a forged footer; without this check later rows would be taken for the missing ones
                raise ValueError(
                    f"{where}: it ends after row {done}, and the file's footer says that it has {last} or more. Write "
                    "the file again."
                )
        except ValueError as error:
            if not self._bad.skips:
                raise
            self._bad.handle(where, str(error).removeprefix(f"{where}: "), range(done, last))
            yield skipped_rows(self._columns, last - done)

    def _chunks(
        self, parquet: pq.ParquetFile, file: str, number: int, where: str, first: int, last: int, at_once: bool
    ) -> Iterator[Rows]:
        partitions = filesystems.partition_values(file)
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
    """Yields the results of the jobs in order. Up to `threads` jobs run while the caller uses a result."""
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
    """Yields the rows of spans (row group, first, end) in order. Threads decode groups of <= `small` rows ahead."""

    def job(span: tuple[int, int, int]) -> Callable[[], Iterable[Rows]]:
        if groups[span[0]].num_rows <= small:
            return lambda: list(reader.read(*span, at_once=True))
        return lambda: reader.read(*span)  # A lazy iterator: the caller's thread decodes.

    for rows in read_ahead((job(span) for span in spans), threads):
        yield from rows


class PositionReader:
    """Reads rows of one epoch by position. Each position may be requested once, block after block.

    Args:
      reader: Decoder of the row groups.
      groups: All row groups of the folder.
      order: Order of the epoch.
      intervals: Ascending intervals that contain all requested positions; blocks outside them are not read.
      threads: Number of threads that decode ahead.
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
        spans = (span for number in numbers.tolist() for span in order.spans(*order.block(number)))
        self._chunks = read_groups(reader, groups, _joined(spans), order.block_rows, threads)
        self._numbers = iter(numbers.tolist())
        self._queue, self._queued = RowQueue(), 0
        self._number = -1  # number of the current block
        self._block: Block | None = None
        self._shuffled = np.empty(0, np.int64)

    def take(self, positions: np.ndarray) -> list[Rows]:
        """The rows at `positions` <int64>[n], ascending, without skipped rows, in one part per block."""
        parts = []
        cuts = np.flatnonzero(np.diff(positions // self._order.block_rows)) + 1
        for part in np.split(positions, cuts) if len(positions) else []:
            number = int(part[0]) // self._order.block_rows
            while self._number < number:
                self._next_block()
            rows = self._shuffled[part - self._order.block(number)[0]]
            assert self._block is not None
            good = self._block.columns.get(GOOD)
            if good is not None:
                assert isinstance(good, np.ndarray)
                rows = rows[good[rows]]
            parts.append(self._block.take(rows))
        return parts

    def close(self) -> None:
        """Stops the threads."""
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
        self._shuffled = self._order.shuffled(self._number)


def _blocks(order: EpochOrder, begin: int, end: int) -> np.ndarray:
    """Numbers of the blocks with the positions begin .. end."""
    return np.arange(begin // order.block_rows, -(-end // order.block_rows) if begin < end else 0)


def _joined(spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Joins adjacent spans of one row group, so that the group is decoded once for two blocks."""
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


def without_good(rows: Rows) -> Rows:
    """Drops the column GOOD, which the model does not get."""
    return Rows({name: column for name, column in rows.columns.items() if name != GOOD}, rows.num_rows)


def joined_rows(parts: Sequence[Rows], nothing: Rows) -> Rows:
    """Joins the parts of a batch; returns `nothing` if there are no parts."""
    return without_good(concat(list(parts))) if parts else nothing


class EpochOrder:
    """Positions of one epoch.

    Args:
      group_rows: <int64>[row groups], rows of each, in file order.
      seed: Seed of the shuffle; None keeps file order.
      epoch: Number of the epoch.
      block_rows: Rows per block, which a reader holds in memory.
    """

    def __init__(self, group_rows: np.ndarray, seed: int | None, epoch: int, block_rows: int) -> None:
        self._seed, self._epoch, self.block_rows = seed, epoch, block_rows
        self._groups = np.arange(len(group_rows))
        if seed is not None:
            self._groups = np.random.default_rng([seed, epoch]).permutation(self._groups)
        self._ends = np.cumsum(group_rows[self._groups])  # end of each group in the sequence
        self._begins = self._ends - group_rows[self._groups]
        self._first_rows = (np.cumsum(group_rows) - group_rows)[self._groups]  # first row of each group in file order
        self.num_rows = int(group_rows.sum())

    @property
    def num_blocks(self) -> int:
        return -(-self.num_rows // self.block_rows)

    def block(self, number: int) -> tuple[int, int]:
        """First and end position of a block."""
        return number * self.block_rows, min((number + 1) * self.block_rows, self.num_rows)

    def shuffled(self, number: int) -> np.ndarray:
        """Place <int64>[n] in the sequence of each position of a block, counted from the block's begin."""
        begin, end = self.block(number)
        if self._seed is None:
            return np.arange(end - begin)
        # Three seed words here and two for the groups give independent random streams.
        return np.random.default_rng([self._seed, self._epoch, number]).permutation(end - begin)

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields (row group, its first row, its end row) that cover the rows begin .. end of the sequence, in order."""
        at = int(np.searchsorted(self._ends, begin, side="right"))
        while at < len(self._ends) and self._begins[at] < end:
            start = int(self._begins[at])
            first, last = max(start, begin), min(int(self._ends[at]), end)
            if first < last:
                yield int(self._groups[at]), first - start, last - start
            at += 1

    def file_rows(self) -> np.ndarray:
        """Row number <int64>[num_rows] of each position, counted through all files in file order."""
        sequence = np.repeat(self._first_rows - self._begins, self._ends - self._begins)
        sequence += np.arange(self.num_rows)
        if self._seed is None:
            return sequence
        rows = np.empty_like(sequence)
        for number in range(self.num_blocks):
            begin, end = self.block(number)
            rows[begin:end] = sequence[begin:end][self.shuffled(number)]
        return rows
