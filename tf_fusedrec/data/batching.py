"""Token-balanced batches: MTGRBoost Algorithm 1 ("Dynamic Sequence Batching", section 5.1), on NumPy lengths.

Rows wait in a queue; a batch is the prefix of the queue whose token count is closest to the target, found by a binary
search in the cumulative sums. All ranks so get batches of nearly equal tokens and different numbers of rows.
The paper's listing yields only when k < len(Q), so it never hands out the rows left at the end, stops for ever when
the whole queue is closest to the target, and takes k = 0 in front of a row longer than twice the target. Here:
  - the queue is filled until it holds the target, or the input ends; then it is cut until it holds less;
  - when the input has ended, what is left (less than the target) is the last batch;
  - a batch has at least one row: a row above the target is a batch of its own, or ends one if that is closer;
  - of two prefixes equally close the shorter is taken, which is the one that needs less memory.
Batches therefore depend on the rows and their order, and not on the chunks in which they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tf_fusedrec.data.columns import Column
from tf_fusedrec.data.rows import RowQueue, Rows


def check_length_columns(length_columns: Sequence[str], columns: Sequence[Column]) -> None:
    """Refuses a name in length_columns that is not a list column being read."""
    ragged = [column.name for column in columns if column.ragged]
    for name in length_columns:
        if name not in ragged:
            raise ValueError(
                f"length_columns names {name!r}, which is not a list column of this data set; those are {ragged}. "
                "Name the list columns whose values become tokens."
            )
    if not length_columns:
        raise ValueError(f"length_columns must name at least one list column of {ragged}, got none.")


def row_tokens(rows: Rows, length_columns: Sequence[str], extra_tokens: int) -> np.ndarray:
    """<int64>[B] tokens of each row: the lengths of its length columns and extra_tokens, together at least one.

    At least one, because rows without tokens would fill the queue for ever without reaching the target.
    """
    tokens = np.full(rows.num_rows, extra_tokens, np.int64)
    for name in length_columns:
        tokens += rows.ragged(name).lengths()
    return np.maximum(tokens, 1)


def batch_sizes(length_chunks: Iterable[np.ndarray], target_tokens: int) -> Iterator[int]:
    """Algorithm 1 on lengths alone: yields the number of rows of each batch.

    Args:
      length_chunks: chunks <int64>[n] of tokens per row, each >= 1. A chunk is asked for only when the rows at hand
        hold fewer tokens than the target.
      target_tokens: tokens wanted in a batch, >= 1.

    Example: lengths 3 3 5 | 4 1 9 | 2 with target 6 give 2, 1, 2, 1, 1 rows (6, 5, 5, 9 and 2 tokens).
    """
    if target_tokens < 1:
        raise ValueError(f"target_tokens must be >= 1, got {target_tokens}. It counts the tokens of one batch.")
    waiting = np.empty(0, np.int64)
    for chunk in length_chunks:
        waiting = np.concatenate([waiting, chunk])
        sizes = _cut(np.cumsum(waiting), target_tokens)
        yield from sizes
        waiting = waiting[sum(sizes) :]
    if len(waiting):
        yield len(waiting)  # less than the target is left, so all of it is closest


def _cut(cumulative: np.ndarray, target: int) -> list[int]:
    """Rows of each batch that can be cut from a queue with these cumulative sums [n] while it holds the target."""
    sizes: list[int] = []
    first, taken = 0, 0  # rows and tokens already cut
    while first < len(cumulative) and cumulative[-1] - taken >= target:
        # Row `above` is the first whose end reaches the target; the prefix before it ends below the target.
        above = int(np.searchsorted(cumulative, taken + target))
        end = above + 1
        if above > first:
            too_much = cumulative[above] - taken - target
            too_little = target - (cumulative[above - 1] - taken)
            if too_little <= too_much:
                end = above
        sizes.append(end - first)
        first, taken = end, int(cumulative[end - 1])
    return sizes


def token_balanced_batches(
    chunks: Iterable[Rows], length_columns: Sequence[str], extra_tokens: int, target_tokens: int
) -> Iterator[Rows]:
    """Regroups chunks of rows into batches of Algorithm 1; rows keep their order."""
    queue = RowQueue()

    def lengths() -> Iterator[np.ndarray]:
        for rows in chunks:
            queue.append(rows)
            yield row_tokens(rows, length_columns, extra_tokens)

    for size in batch_sizes(lengths(), target_tokens):
        yield queue.pop(size)
