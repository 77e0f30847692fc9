"""Reads the rows of an epoch by position. Threads decode row groups ahead of training.

    positions of each batch ─▶ blocks of the order ─▶ row groups ─▶ (threads) Arrow ─▶ Rows ─▶ one gather ─▶ batch

Memory has two blocks and threads + 1 row groups, for any size of the data set. The caller decodes a row group larger
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
from tf_fusedrec.data.rows import GOOD, Block, RowQueue, Rows, rows_from_arrow, skipped_rows

READ_ROWS = 512  # rows decoded at once, a few megabytes for rows of some hundred tokens

Interval = tuple[int, int]  # begin and end of positions
T = TypeVar("T")


class RowGroup(NamedTuple):
    """Place and size of a row group."""

    file: str  # path below the folder
    number: int  # in the file
    num_rows: int


class GroupReader:
    """Decodes row groups of one folder. Several threads may call it."""

    def __init__(
        self, folder: filesystems.Folder, groups: Sequence[RowGroup], columns: Sequence[Column], bad: BadInput
    ) -> None:
        self._folder, self._groups, self._columns, self._bad = folder, groups, columns, bad

    def read(self, group: int, first: int, last: int, *, at_once: bool = False) -> Iterator[Rows]:
        """Yields the rows first .. last of a row group in chunks, with the column GOOD if `bad` skips.

        at_once=True decodes the whole row group first, which takes 0.9 times as long as in chunks. Bad input raises
        ValueError, which names the file and the row group, unless `bad` skips it.
        """
        file, number, _ = self._groups[group]
        where = f"{self._folder.name}/{file}, row group {number}"
        done = first
        try:
            with filesystems.readable(where), self._folder.open(file) as parquet:
                for part, first_row in self._parts(parquet, number, first, last, at_once):
                    rows = rows_from_arrow(
                        part, self._columns, where, self._bad, first_row, filesystems.partition_values(file)
                    )
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

    def _parts(
        self, parquet: pq.ParquetFile, number: int, first: int, last: int, at_once: bool
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yields the rows first .. last of a row group, and the number of the first row of each part."""
        names = [c.name for c in self._columns if parquet.schema_arrow.get_field_index(c.name) >= 0]
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
                yield batch.slice(low - begin, high - low), low
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
    """Reads rows of one epoch by position, each once, block after block. `intervals` contain all positions."""

    def __init__(
        self,
        reader: GroupReader,
        groups: Sequence[RowGroup],
        order: EpochOrder,
        intervals: Sequence[Interval],
        threads: int,
    ) -> None:
        self._order = order
        size = order.block_rows
        blocks = sorted({n for begin, end in intervals if begin < end for n in range(begin // size, -(-end // size))})
        spans = (span for number in blocks for span in order.spans(*order.block(number)))
        self._chunks = read_groups(reader, groups, _joined(spans), size, threads)
        self._blocks = iter(blocks)
        self._queue = RowQueue()
        self._number = -1  # number of the current block
        self._block: Block | None = None
        self._good: np.ndarray | None = None  # <bool>[rows of the block], with skipped rows
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
            parts.append(self._block.take(rows if self._good is None else rows[self._good[rows]]))
        return parts

    def close(self) -> None:
        """Stops the threads."""
        self._chunks.close()  # type: ignore[attr-defined]

    def _next_block(self) -> None:
        self._number = next(self._blocks)
        begin, end = self._order.block(self._number)
        while self._queue.num_rows < end - begin:
            self._queue.append(next(self._chunks))
        self._block = self._queue.pop(end - begin)
        self._good = self._block.columns.pop(GOOD, None)  # type: ignore[assignment]
        self._shuffled = self._order.shuffled(self._number)


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


class EpochOrder:
    """Positions of one epoch. group_rows: <int64>[row groups], in file order. seed: None keeps file order."""

    def __init__(self, group_rows: np.ndarray, seed: int | None, epoch: int, block_rows: int) -> None:
        self._seed, self._epoch, self.block_rows = seed, epoch, block_rows
        self._groups = np.arange(len(group_rows))
        if seed is not None:
            self._groups = np.random.default_rng([seed, epoch]).permutation(self._groups)
        self._ends = np.cumsum(group_rows[self._groups])  # end of each group in the sequence
        self._begins = self._ends - group_rows[self._groups]
        self._first_rows = (np.cumsum(group_rows) - group_rows)[self._groups]  # first row of each group in file order
        self.num_rows = int(group_rows.sum())

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
        for number in range(-(-self.num_rows // self.block_rows)):
            begin, end = self.block(number)
            rows[begin:end] = sequence[begin:end][self.shuffled(number)]
        return rows
