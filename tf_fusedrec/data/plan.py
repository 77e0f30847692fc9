"""The plan of an epoch: the positions of every rank in every step, and the rest of the epoch after any step.

Two scopes of balance:

  "rank"    The epoch's positions are cut into one stream per rank, with equal numbers of rows. Each stream is cut into
            batches close to the target (Algorithm 1). The ranks' batches differ in rows, but hardly in weight.
  "global"  A single stream is cut into global batches close to ranks * target. Their rows are assigned to ranks,
            longest first. Every rank reads the lengths of all rows and computes the same assignment without any
            communication.

In both scopes every rank knows the batches of all ranks, so all agree on the number of steps. A rank without further
rows has empty batches.

The rest of an epoch is a list of intervals of positions per stream, and a checkpoint keeps nothing else. With the same
number of streams, every stream continues and gives the same batches. Otherwise the rest is divided anew, so no row is
lost or repeated. A position determines shard, row and shuffle state (order.py). Rows read ahead but not trained belong
to the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_fusedrec.data import batching
from tf_fusedrec.data.reading import Interval

SCOPES = ("rank", "global")
Streams = list[list[Interval]]


def share(streams: Streams, parts: int) -> Streams:
    """Divides the positions into `parts` streams, equal up to one row. `parts` streams stay unchanged."""
    if len(streams) == parts:
        return streams
    intervals = sorted(interval for stream in streams for interval in stream)
    total = sum(end - begin for begin, end in intervals)
    bounds = [total * part // parts for part in range(parts + 1)]
    return [_between(intervals, begin, end) for begin, end in zip(bounds, bounds[1:])]


class EpochPlan:
    """Batches of the rest of an epoch, for all ranks.

    Args:
      weights: <int64>[rows of the epoch], weight of each position; 0 for a skipped row.
      target: Target weight of a batch of one rank.
      streams: Remaining intervals of all ranks, ascending in every stream.
      ranks: Number of ranks.
      scope: One of SCOPES.
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
        """Number of steps in which at least one rank has a row."""
        return max(len(ends) for ends in self._ends)

    def intervals(self, rank: int) -> list[Interval]:
        """Intervals that contain all positions of a rank."""
        return self.streams[0 if self._scope == "global" else rank]

    def batch(self, rank: int, step: int) -> np.ndarray:
        """Positions <int64>[n] of a rank in a step, ascending; empty after the rank's last step."""
        stream = 0 if self._scope == "global" else rank
        begin, end = self._bounds(stream, step)
        parts = _between(self.streams[stream], begin, end)
        positions = np.concatenate([np.empty(0, np.int64), *(np.arange(b, e) for b, e in parts)])
        if self._weights is not None:
            positions = positions[batching.longest_first(self._weights[begin:end], self._ranks) == rank]
        return positions if self._kept is None else positions[self._kept[positions]]

    def left_after(self, steps: int) -> Streams:
        """The rest of every stream after `steps` steps."""
        left = []
        for number, stream in enumerate(self.streams):
            begin, _ = self._bounds(number, steps)
            left.append(_between(stream, begin, sum(e - b for b, e in stream)))
        return left

    def _bounds(self, stream: int, step: int) -> tuple[int, int]:
        """First and end row of a step, counted in its stream."""
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
