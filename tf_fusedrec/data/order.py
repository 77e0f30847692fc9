"""The order of an epoch: a permutation of all rows, equal on all ranks and for any number of ranks.

  1. The row groups of all files form one sequence: by file name, or with a seed in the epoch's random order.
  2. The sequence is cut into blocks of block_rows rows, also inside a row group. With a seed each block is shuffled.

A position (0 .. rows - 1) identifies a row of the epoch. It is a pure function of (seed, epoch, sizes of the row
groups). "Rows 4,000 to 9,000 of epoch 3" therefore fully describes the state of a reader: shard, row and shuffle. Rows
of one block stay together, so data larger than a block are not fully shuffled.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


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
