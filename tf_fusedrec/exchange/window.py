"""Several lookups of one batch that share rows: an id travels once, its row once, and its gradient once.

    ids        of all pieces in one all-to-all   new ids of each piece, and marks: the last piece of each id
    rows       with piece i                      of the ids that no piece before holds
    gradients  with piece i                      of the ids that no later piece holds, summed over pieces in their order

The pieces are the micro-batches of a batch, whose tables do not change in between (schedules/frozen_window.py). A piece
reads rows that came with it and with the pieces before. custom_ops/window_rows/window_rows.h has the orders of rows and
gradients, on which all ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange.messages import Message


class Piece(NamedTuple):
    """One piece of a window: what it reads and sends beside its new ids."""

    window: str  # name of the window, the same for all of its pieces
    number: int  # i
    pieces: int  # M
    index: tf.Tensor  # <int32>[N], number of the n-th id among the u distinct ids of the piece
    term_index: tf.Tensor  # <int32>[k], ids whose gradients are summed, by place in all pieces
    term_splits: tf.Tensor  # <int64>[e+1], bounds of each sum inside term_index
    gradient_splits: tf.Tensor  # <int32>[R], sums that leave with the piece for each owner
    trained: Message  # ids whose gradients come to this rank with the piece
    rows: tf.Tensor  # <int32>[E], place of these ids among the ids that the window asks this rank for
    marks_splits: tf.Tensor | None  # <int32>[R], entries of the marks for each owner; None but for the first piece


class Departure(NamedTuple):
    """The ids of a window before they travel."""

    inverse: list[tf.Tensor]  # <int32>[N] of each piece
    ranked: list[ops.RankedIds]  # the new ids of each piece
    route: ops.WindowRoute

    @property
    def messages(self) -> list[Message]:
        """The messages of the pieces, and the marks."""
        return [*((one.message, one.send_splits) for one in self.ranked), (self.route.marks, self.route.marks_splits)]

    def arrive(self, window: str, arrived: Sequence[Message], segments: int) -> list[Piece]:
        """Returns the pieces, from the messages that came to this rank.

        Args:
          window: Name of the window.
          arrived: The received messages, in the order of `messages`.
          segments: S.
        """
        *messages, (marks, marks_splits) = arrived
        new, splits = [entries for entries, _ in messages], [of_ranks for _, of_ranks in messages]
        come = ops.window_gradients(new, splits, marks, marks_splits, num_segments=segments)
        pieces = len(self.ranked)
        return [
            Piece(
                window, i, pieces, index, term_index, term_splits, gradient_splits, trained, rows,
                self.route.marks_splits if i == 0 else None,
            )
            for i, (index, term_index, term_splits, gradient_splits, trained, rows) in enumerate(
                zip(
                    self.inverse, self.route.term_index, self.route.term_splits, self.route.gradient_splits,
                    come.trained, come.rows,
                )
            )
        ]  # fmt: skip


def sums_to_send(piece: Piece, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The gradients that leave with a piece, each summed over pieces in their order.

    Args:
      piece: The piece.
      gradients: [u, D] of the distinct ids of each piece up to this one.

    Returns:
      [>= e, D], in the order of the owner's Piece.trained. Rows behind e are padding.
    """
    ones = tf.ones_like(piece.term_splits[1:], tf.float32)
    return ops.pooled_recover_parts(gradients, piece.term_index, piece.term_splits, ones, pad=True)
