"""The plan of an epoch: which positions every rank has in every step, and what is left of the epoch after any of them.

Two scopes of balance:

  "rank"    the epoch's positions are cut into one stream per rank, of equal rows; each stream is cut into batches close
            to the target (Algorithm 1). All ranks have nearly the target in every step, in different numbers of rows.
  "global"  one stream for all: cut into global batches close to ranks * target, whose rows are dealt out longest first.
            Every rank reads the lengths of all rows and finds the same assignment: there is no communication.

Either way all ranks know all ranks' batches, so they agree on the number of steps; who has run out has empty batches.

What is left of an epoch is a list of intervals of positions per stream. It is what a checkpoint keeps: with as many
streams as before, every stream goes on where it was, and so gives the same batches; otherwise what is left is shared
anew, and so no row is lost or repeated. As a position says shard, row and shuffle state (order.py), and rows that were
read but not yet trained are simply left, there is nothing else to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_fusedrec.data import batching
from tf_fusedrec.data.reading import Interval

SCOPES = ("rank", "global")
Streams = list[list[Interval]]


def share(streams: Streams, parts: int) -> Streams:
    """The same positions in `parts` streams of equal rows (they differ by one at most); as they are if so many."""
    if len(streams) == parts:
        return streams
    intervals = sorted(interval for stream in streams for interval in stream)
    total = sum(end - begin for begin, end in intervals)
    bounds = [total * part // parts for part in range(parts + 1)]
    return [_between(intervals, begin, end) for begin, end in zip(bounds, bounds[1:])]


class EpochPlan:
    """Batches of what is left of an epoch, for all ranks.

    Args:
      weights: <int64>[rows of the epoch] of each position; 0 for a row that is left out.
      target: weight wanted in a batch of one rank.
      streams: what is left, rising in every stream; of all ranks.
      ranks: number of ranks.
      scope: one of SCOPES.
    """

    def __init__(self, weights: np.ndarray, target: int, streams: Streams, ranks: int, scope: str) -> None:
        self._ranks, self._scope = ranks, scope
        self.streams = share(streams, 1 if scope == "global" else ranks)
        queues = [np.concatenate([weights[:0], *(weights[b:e] for b, e in stream)]) for stream in self.streams]
        self._ends = [batching.closest_cuts(queue, target * ranks if scope == "global" else target) for queue in queues]
        self._weights = queues[0] if scope == "global" else None  # of the global batches
        self._kept = None if weights.all() else weights > 0

    @property
    def steps(self) -> int:
        """Steps in which some rank has a row."""
        return max(len(ends) for ends in self._ends)

    def intervals(self, rank: int) -> list[Interval]:
        """Positions that hold all that a rank has."""
        return self.streams[0 if self._scope == "global" else rank]

    def batch(self, rank: int, step: int) -> np.ndarray:
        """<int64>[n] the positions that a rank has in a step, rising; none behind its last one."""
        stream = 0 if self._scope == "global" else rank
        begin, end = self._bounds(stream, step)
        parts = _between(self.streams[stream], begin, end)
        positions = np.concatenate([np.empty(0, np.int64), *(np.arange(b, e) for b, e in parts)])
        if self._weights is not None:
            positions = positions[batching.longest_first(self._weights[begin:end], self._ranks) == rank]
        return positions if self._kept is None else positions[self._kept[positions]]

    def left_after(self, steps: int) -> Streams:
        """What is left of every stream after so many steps."""
        left = []
        for number, stream in enumerate(self.streams):
            begin, _ = self._bounds(number, steps)
            left.append(_between(stream, begin, sum(e - b for b, e in stream)))
        return left

    def _bounds(self, stream: int, step: int) -> tuple[int, int]:
        """First and end row, counted in its stream, of a step."""
        ends = self._ends[stream]
        last = int(ends[-1]) if len(ends) else 0
        begin = 0 if not step else int(ends[step - 1]) if step <= len(ends) else last
        return begin, int(ends[step]) if step < len(ends) else last


def whole(num_rows: int) -> Streams:
    """All positions of an epoch."""
    return [[(0, num_rows)]]


def _between(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """The part of intervals from their begin-th to their end-th position."""
    parts = []
    at = 0
    for first, last in intervals:
        low, high = max(begin - at, 0), min(end - at, last - first)
        if low < high:
            parts.append((first + low, first + high))
        at += last - first
    return parts
