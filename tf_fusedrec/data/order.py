"""The order of an epoch: a permutation of all rows that is the same on every rank, whatever their number.

  1. The row groups of all files stand in one line: by file name, or with a seed in the epoch's random order.
  2. The line is cut into blocks of block_rows rows, also inside a row group; with a seed the rows of a block are mixed.

A position (0 .. rows - 1) names a row of the epoch. It is a pure function of (seed, epoch, sizes of the row groups), so
that "rows 4,000 to 9,000 of epoch 3" says all that there is to know of where a reader stands: shard, row and the
state of the shuffle. Order of shards and a buffer: rows of one block come together, so this is no full permutation of
data larger than a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class EpochOrder:
    """Positions of one epoch.

    Args:
      group_rows: <int64>[G] rows of each row group, in file order.
      seed: None keeps file order.
      epoch: number of the epoch.
      block_rows: rows that are mixed with each other; held in memory by who reads them.
    """

    def __init__(self, group_rows: np.ndarray, seed: int | None, epoch: int, block_rows: int) -> None:
        self._seed, self._epoch, self.block_rows = seed, epoch, block_rows
        self._groups = np.arange(len(group_rows))
        if seed is not None:
            self._groups = np.random.default_rng([seed, epoch]).permutation(self._groups)
        self._ends = np.cumsum(group_rows[self._groups])  # of each group in the line
        self._begins = self._ends - group_rows[self._groups]
        self._first_rows = (np.cumsum(group_rows) - group_rows)[self._groups]  # in file order
        self.num_rows = int(group_rows.sum())

    @property
    def num_blocks(self) -> int:
        return -(-self.num_rows // self.block_rows)

    def block(self, number: int) -> tuple[int, int]:
        """First and end position of a block."""
        return number * self.block_rows, min((number + 1) * self.block_rows, self.num_rows)

    def mixed(self, number: int) -> np.ndarray:
        """<int64>[n] the place in the line, counted from the block's begin, of each position of a block."""
        begin, end = self.block(number)
        if self._seed is None:
            return np.arange(end - begin)
        # Three words here and two for the groups: the streams differ.
        return np.random.default_rng([self._seed, self._epoch, number]).permutation(end - begin)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(row group, first row in it, end row in it) of the line's rows begin .. end, in the line's order."""
        at = int(np.searchsorted(self._ends, begin, side="right"))
        while at < len(self._ends) and self._begins[at] < end:
            start = int(self._begins[at])
            first, last = max(start, begin), min(int(self._ends[at]), end)
            if first < last:
                yield int(self._groups[at]), first - start, last - start
            at += 1

    def file_rows(self) -> np.ndarray:
        """<int64>[num_rows] of each position: the number of its row, counted through all files in file order."""
        line = np.repeat(self._first_rows - self._begins, self._ends - self._begins)
        line += np.arange(self.num_rows)
        if self._seed is None:
            return line
        rows = np.empty_like(line)
        for number in range(self.num_blocks):
            begin, end = self.block(number)
            rows[begin:end] = line[begin:end][self.mixed(number)]
        return rows
