"""Rows that several micro-batches (pieces) of a batch share: which row and which gradient travels with which piece.

A row leaves its owner with the first piece that holds its id. Its gradient, a sum over pieces, leaves the asking rank
with the last piece that holds the id. exchange/routing.py calls these ops in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library
from tf_fusedrec.ops.rank_partition import RankedIds
from tf_fusedrec.ops.segment_unique import UniqueIds


class WindowIds(NamedTuple):
    """Distinct ids of all M pieces of a batch, numbered by first occurrence, one piece after another."""

    new: list[tuple[tf.Tensor, tf.Tensor]]  # ids of each piece that no piece before holds <int64>[n], splits [S+1]
    numbers: list[tf.Tensor]  # <int32>[u] of each piece, number of each of its distinct ids
    last: tf.Tensor  # <int32>[U], last piece that holds the id


class WindowRoute(NamedTuple):
    """The rows that the pieces of the asking rank read, and the gradients that leave with each piece."""

    rows: list[tf.Tensor]  # <int32>[u], row of each distinct id of a piece among the rows of all pieces up to it
    marks: tf.Tensor  # <int64>[Q], message with the last piece of each id, blocks [count | words] by owner
    marks_splits: tf.Tensor  # <int32>[R], entries of each block
    term_index: list[tf.Tensor]  # <int32>[k], ids whose gradients are summed, by place in all pieces
    term_splits: list[tf.Tensor]  # <int64>[e+1], the sum g is of term_index[term_splits[g]:term_splits[g+1]]
    gradient_splits: list[tf.Tensor]  # <int32>[R], sums that leave with a piece for each owner


class WindowGradients(NamedTuple):
    """The gradients that come to the owner with each piece."""

    trained: list[tuple[tf.Tensor, tf.Tensor]]  # message <int64>[e + R * S] of their ids, its splits <int32>[R]
    rows: list[tf.Tensor]  # <int32>[e], place of each id among the ids of all messages


def window_unique(pieces: Sequence[UniqueIds]) -> WindowIds:
    """Finds the ids of each piece that no piece before holds, and the last piece that holds each id.

    Args:
      pieces: M results of segment_unique for the same tables.

    Returns:
      WindowIds. New ids keep the order of their piece.

    Raises:
      InvalidArgumentError: splits that do not bound the ids of their piece, or bound other numbers of segments.

    Example, S = 1:
      ids 7 5 | 5 9    ->  new ids 7 5 | 9    numbers 0 1 | 1 2    last 0 1 1
    """
    ids, splits = [piece.ids for piece in pieces], [piece.splits for piece in pieces]
    new_ids, new_splits, numbers, last = library.fusedrec_window_unique(ids=ids, id_splits=splits)
    return WindowIds(list(zip(new_ids, new_splits)), numbers, last)


def window_route(ids: WindowIds, ranked: Sequence[RankedIds], *, num_segments: int) -> WindowRoute:
    """Plans a window on the rank that asks.

    Args:
      ids: The result of window_unique.
      ranked: rank_partition of the new ids of each piece.
      num_segments: S.

    Raises:
      InvalidArgumentError: arguments that do not belong to the same ids; the message names the first wrong entry.
    """
    return WindowRoute(
        *library.fusedrec_window_route(
            messages=[one.message for one in ranked],
            splits=[one.send_splits for one in ranked],
            restore=[one.restore for one in ranked],
            numbers=ids.numbers,
            last=ids.last,
            num_segments=num_segments,
        )
    )


def window_gradients(
    messages: Sequence[tf.Tensor],
    splits: Sequence[tf.Tensor],
    marks: tf.Tensor,
    marks_splits: tf.Tensor,
    *,
    num_segments: int,
) -> WindowGradients:
    """Plans a window on the rank that owns rows.

    Args:
      messages: M messages <int64>[V + R * S] of new ids, blocks [counts[S] | ids] by source.
      splits: M times <int32>[R], entries of each block.
      marks: <int64>[Q], the received marks.
      marks_splits: <int32>[R], entries of each block of marks.
      num_segments: S.

    Raises:
      InvalidArgumentError: headers or marks that do not agree with their blocks. The message names the source rank.
    """
    trained, trained_splits, rows = library.fusedrec_window_gradients(
        messages=list(messages),
        splits=list(splits),
        marks=marks,
        marks_splits=marks_splits,
        num_segments=num_segments,
    )
    return WindowGradients(list(zip(trained, trained_splits)), rows)


tf.no_gradient("Fusedrec>WindowUnique")
tf.no_gradient("Fusedrec>WindowRoute")
tf.no_gradient("Fusedrec>WindowGradients")
