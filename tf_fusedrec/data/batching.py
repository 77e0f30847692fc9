"""Which rows make a batch: two rules, on NumPy weights alone. A weight is a row's tokens, or what they cost (Cost).

closest_cuts: token-aware dynamic batches, MTGRBoost Algorithm 1 ("Dynamic Sequence Batching", section 5.1) and
TurboGR's token-aware batch scaling (section 4.1.3). Rows wait in a queue; a batch is the prefix of the queue whose
weight is closest to the target, found by a binary search in the cumulative sums. The paper's listing yields only when
k < len(Q), so it never hands out the rows left at the end, stops for ever when the whole queue is closest to the
target, and takes k = 0 in front of a row longer than twice the target. Here:
  - the queue is cut while it holds the target; what is left at the end (less than the target) is the last batch;
  - a batch has at least one row: a row above the target is a batch of its own, or ends one if that is closer;
  - of two prefixes equally close the shorter is taken, which is the one that needs less memory.
The rest of a queue behind a cut is cut as if it were a queue of its own. Resuming stands on that.

longest_first: global token reallocation, TurboGR section 4.1.3. The rows of all ranks' batches together are dealt out
again, the heaviest first, each to the rank that has least. Rows stay whole.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

_COST_UNITS = 1000  # of a token: weights are integers, so that sums are exact and all ranks agree


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a row of L tokens costs: linear * L + quadratic * L^2, in any unit. Attention is quadratic.

    Example: blocks of width 256 with attention of 4 heads of 64: a token costs 2 * 4 * 256 * 256 + 2 * 256 * 256
    multiplications in the projections, and 256 for each of its L / 2 visible pairs, twice: Cost(655_360, 256).
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and self.linear + self.quadratic > 0):
            raise ValueError(f"Cost needs linear and quadratic >= 0, one of them > 0, got {self}.")

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """<float64>[n] cost of rows with these tokens <int64>[n]."""
        lengths = tokens.astype(np.float64)
        return self.linear * lengths + self.quadratic * lengths * lengths

    def weights(self, tokens: np.ndarray, target_tokens: int) -> tuple[np.ndarray, int]:
        """Rows and target in one unit: tokens where cost is proportional to them, else thousandths of a token's share.

        A target of n tokens becomes what n tokens cost on average over these rows.

        Args:
          tokens: <int64>[n] of all rows.
          target_tokens: of one batch.

        Returns:
          <int64>[n] weights, and the target.
        """
        total = int(tokens.sum())
        if not self.quadratic or not total:
            return tokens, target_tokens
        cost = self.of(tokens)
        return np.rint(cost * (_COST_UNITS * total / cost.sum())).astype(np.int64), _COST_UNITS * target_tokens


def closest_cuts(weights: np.ndarray, target: int) -> np.ndarray:
    """Algorithm 1 on a whole queue.

    Args:
      weights: <int64>[n], each >= 0.
      target: weight wanted in a batch, >= 1.

    Returns:
      <int64>[batches] the end of each batch in the queue, rising to n; none for no rows.

    Example: weights 3 3 5 4 1 9 2 with target 6 give batches of 2, 1, 2, 1, 1 rows (6, 5, 5, 9 and 2): ends 2 3 5 6 7.
    """
    cumulative = np.cumsum(weights)
    ends: list[int] = []
    first, taken = 0, 0  # rows and weight already cut
    while first < len(cumulative) and cumulative[-1] - taken >= target:
        # Row `above` is the first whose end reaches the target; the prefix before it ends below the target.
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
        ends.append(len(cumulative))  # less than the target is left, so all of it is closest
    return np.array(ends, np.int64)


def longest_first(weights: np.ndarray, ranks: int) -> np.ndarray:
    """<int64>[n] the rank of each row: heaviest rows first, each to the rank with the least weight so far.

    A pure function, so ranks that know the same weights <int64>[n] need not talk. Ties go to the lower row and rank.

    Example: weights 5 9 2 4 3 over 2 ranks: 9 to rank 0; 5, 4 to rank 1; 3 to rank 1 or 0 by their sums 9 and 9: 0; 2
    to 1: ranks 1 0 1 1 0, sums 12 and 11.
    """
    owner = np.empty(len(weights), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    heavy = np.argsort(-weights, kind="stable")
    for row, weight in zip(heavy.tolist(), weights[heavy].tolist()):
        load, rank = loads[0]
        owner[row] = rank
        heapq.heapreplace(loads, (load + weight, rank))
    return owner
