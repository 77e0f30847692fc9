"""The plan of an epoch: the positions of every rank in every step, and the rest of the epoch after any step.

Two scopes of balance:

  "rank"    The epoch's positions are cut into one stream per rank, with equal numbers of rows. Each stream is cut into
            batches close to the target (Algorithm 1). The ranks' batches differ in rows, but hardly in weight.
  "global"  A single stream is cut into global batches close to ranks * target. Their rows are assigned to ranks,
            longest first. Every rank reads the lengths of all rows and computes the same assignment.

In both scopes every rank knows the batches of all ranks, so all agree on the number of steps without communication. A
rank without rows left has empty batches.

The rest of an epoch is a list of intervals of positions per stream, and a checkpoint keeps nothing else. With the same
number of streams, every stream continues and gives the same batches. Otherwise the rest is divided again, so no row is
lost or repeated. A position determines shard, row and shuffle state (reading.py).

closest_cuts: token-aware dynamic batches, MTGRBoost Algorithm 1 ("Dynamic Sequence Batching", section 5.1) and
TurboGR's token-aware batch scaling (section 4.1.3). A batch is the prefix of a queue of rows with the weight closest to
the target. A weight is a row's number of tokens, or their cost (Cost). The paper's listing never yields the last rows,
stops if the whole queue is closest to the target, and takes k = 0 before a row longer than twice the target. Here:
  - The queue is cut while its weight reaches the target. The rest, which is below the target, is the last batch.
  - A batch has at least one row. A row above the target is a separate batch, or ends a batch if that is closer.
  - If two prefixes are equally close, the shorter one is taken, because it needs less memory.
The queue after a cut is cut like a new queue. Resuming relies on that.

longest_first: global token reallocation, TurboGR section 4.1.3. Each row of all ranks' batches goes, heaviest first, to
the rank with the least weight so far. Rows stay whole.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from tf_fusedrec.data.reading import Interval
from tf_fusedrec.data.rows import Ragged

_COST_UNITS = 1000  # units per token; weights are integers, so that sums are exact and equal on all ranks


@dataclasses.dataclass(frozen=True)
class StochasticLength:
    """Trains on random parts of long rows, drawn again in every epoch, so that a row costs O(N^alpha) in attention.

    Let n = N^(alpha / 2). A row of L > n values becomes n of them, in their order, with probability 1 - N^alpha / L^2.
    Other rows stay whole. Evaluations and servers see whole rows.

    Source: Zhai et al., Actions Speak Louder than Words (ICML 2024), Stochastic Length. The values are drawn uniformly.

    Args:
      column: List column of the history. Columns that are aligned with it keep the same values.
      alpha: 1 < alpha <= 2. 2 leaves rows of up to N values whole.
      max_length: N >= 1, length of the longest row.

    Raises:
      ValueError: An argument is out of its range.
    """

    column: str
    alpha: float
    max_length: int

    def __post_init__(self) -> None:
        if not 1 < self.alpha <= 2:
            raise ValueError(f"StochasticLength.alpha must be > 1 and <= 2, got {self.alpha!r}.")
        if self.max_length < 1:
            raise ValueError(f"StochasticLength.max_length must be >= 1, got {self.max_length!r}.")

    def places(self, rows: Ragged, random: np.random.Generator) -> np.ndarray:
        """Draws the values that stay. Returns their places in rows.values, ascending <int64>[K]."""
        lengths, count = rows.lengths(), int(self.max_length ** (self.alpha / 2))
        stays = self.max_length**self.alpha / np.maximum(lengths, 1).astype(np.float64) ** 2
        cut = (lengths > count) & (random.random(len(lengths)) >= stays)
        row = np.repeat(np.arange(len(lengths)), lengths)
        order = np.lexsort([random.random(len(row)), row])  # the values of a row, shuffled
        drawn = np.arange(len(row)) - rows.row_splits[row] < count
        return np.sort(order[drawn | ~cut[row]])


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of a row of L tokens: linear * L + quadratic * L^2, in any unit. Attention is quadratic.

    Example: Cost(655_360, 256) is the cost of blocks of width 256 with 4 attention heads of 64. A token takes 2 * 4 *
    256 * 256 + 2 * 256 * 256 multiplications in the projections, and 2 * 256 for each of its L / 2 visible pairs.

    Examples:
      >>> fr.data.Cost(655_360, 256).of(np.array([1, 100])).tolist()
      [655616.0, 68096000.0]
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and self.linear + self.quadratic > 0):
            raise ValueError(f"Cost needs linear and quadratic >= 0 and one of them > 0, got {self}.")

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Cost <float64>[n] of rows with these numbers of tokens <int64>[n]."""
        lengths = tokens.astype(np.float64)
        return self.linear * lengths + self.quadratic * lengths * lengths

    def weights(self, tokens: np.ndarray, target_tokens_per_rank: int) -> tuple[np.ndarray, int]:
        """Weights <int64>[n] of all rows, from their tokens <int64>[n], and the target in the same unit.

        The unit is a token if the cost is proportional to tokens, else a thousandth of the average cost of a token. A
        target of n tokens becomes the average cost of n tokens over these rows.
        """
        total = int(tokens.sum())
        if not self.quadratic or not total:
            return tokens, target_tokens_per_rank
        cost = self.of(tokens)
        return np.rint(cost * (_COST_UNITS * total / cost.sum())).astype(np.int64), _COST_UNITS * target_tokens_per_rank


def closest_cuts(weights: np.ndarray, target: int) -> np.ndarray:
    """Algorithm 1 on a whole queue of weights <int64>[n], each >= 0, for target >= 1.

    Returns the end <int64>[batches] of each batch in the queue, ascending to n; empty for no rows.

    Example: weights 3 3 5 4 1 9 2 with target 6 give the ends 2 3 5 6 7, that is batches of weight 6, 5, 5, 9 and 2.
    """
    cumulative = np.cumsum(weights)
    ends: list[int] = []
    first, taken = 0, 0  # rows and weight already cut
    while first < len(cumulative) and cumulative[-1] - taken >= target:
        # Row `above` is the first with an end that reaches the target. The prefix before it ends below the target.
        above = int(np.searchsorted(cumulative, taken + target))
        first_end = above + 1
        if above > first:
            too_much = cumulative[above] - taken - target
            too_little = target - (cumulative[above - 1] - taken)
            if too_little <= too_much:
                first_end = above
        ends.append(first_end)
        first, taken = first_end, int(cumulative[first_end - 1])
    if first < len(cumulative):
        ends.append(len(cumulative))  # The rest is below the target, so all of it is closest.
    return np.array(ends, np.int64)


def longest_first(weights: np.ndarray, ranks: int) -> np.ndarray:
    """Rank <int64>[n] of each row of weights <int64>[n]. Ties go to the lower row and the lower rank.

    Example: weights 5 9 2 4 3 over 2 ranks give the ranks 1 0 1 1 0, with sums 12 and 11. The row of weight 9 goes to
    rank 0, the rows of 5 and 4 to rank 1. Then both sums are 9, so 3 goes to rank 0 and 2 to rank 1.
    """
    owner = np.empty(len(weights), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    heavy = np.argsort(-weights, kind="stable")
    for row, weight in zip(heavy.tolist(), weights[heavy].tolist()):
        load, rank = loads[0]
        owner[row] = rank
        heapq.heapreplace(loads, (load + weight, rank))
    return owner


SCOPES = ("rank", "global")
Streams = list[list[Interval]]


class EpochPlan:
    """Batches of the rest of an epoch, for all ranks.

    Args:
      weights: <int64>[rows of the epoch], weight of each position; 0 for a skipped row.
      target: Target weight of a batch of one rank.
      streams: Remaining intervals, ascending in every stream. Another number of streams is divided equally.
    """

    def __init__(self, weights: np.ndarray, target: int, streams: Streams, ranks: int, scope: str) -> None:
        self._ranks, self._scope = ranks, scope
        parts = 1 if scope == "global" else ranks
        if len(streams) != parts:
            intervals = sorted(interval for stream in streams for interval in stream)
            total = sum(end - begin for begin, end in intervals)
            streams = [_between(intervals, total * n // parts, total * (n + 1) // parts) for n in range(parts)]
        self.streams = streams
        queues = [np.concatenate([weights[:0], *(weights[b:e] for b, e in stream)]) for stream in self.streams]
        self._ends = [closest_cuts(queue, target * ranks if scope == "global" else target) for queue in queues]
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
            positions = positions[longest_first(self._weights[begin:end], self._ranks) == rank]
        return positions if self._kept is None else positions[self._kept[positions]]

    def left_after(self, steps: int) -> Streams:
        """The rest of every stream after `steps` steps."""
        return [
            _between(stream, self._bounds(number, steps)[0], sum(e - b for b, e in stream))
            for number, stream in enumerate(self.streams)
        ]

    def _bounds(self, stream: int, step: int) -> tuple[int, int]:
        """First and end row of a step, counted in its stream."""
        ends = self._ends[stream]
        last = int(ends[-1]) if len(ends) else 0
        begin = 0 if not step else int(ends[step - 1]) if step <= len(ends) else last
        return begin, int(ends[step]) if step < len(ends) else last


def all_positions(num_rows: int) -> Streams:
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
