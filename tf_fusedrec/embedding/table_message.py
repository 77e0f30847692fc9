"""Several lookups of one step as one lookup of their table, and the table's answer split again.

A training lookup is one tick of the table's clock. It counts every id once, ages every row by one, and decides which
rows come and which leave. A step that looks up in parts (micro-batches, features of several output dtypes) must count
and decide like a step with one lookup. So the table sees the parts as sources of one message.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import routing
from tf_fusedrec.exchange.routing import Message, Piece
from tf_fusedrec.tables import Answer, InferenceRows


def join_sources(parts: Sequence[Message]) -> Message:
    """One message of all sources of all parts, in their order.

    Args:
      parts: <int64>[V_i + R_i * S], blocks [counts[S] | ids] of R_i sources, and entries of each block <int32>[R_i].

    Returns:
      A message of V ids from R sources: the sums of all V_i and R_i.
    """
    if len(parts) == 1:
        return parts[0]
    joined_messages, joined_splits = (tf.concat(of_all, axis=0) for of_all in zip(*parts))
    return joined_messages, joined_splits


def split_answer(
    answer: Answer, parts: Sequence[Message], segments: int, trained: Sequence[Message] | None = None
) -> list[Answer]:
    """The table's answer to each of the parts that `join_sources` joined.

    Args:
      answer: The table's answer to all parts.
      parts: The arguments of `join_sources`.
      segments: S, tables in a message.
      trained: For each part, the ids of `inverse`. None: the ids whose rows are answered.

    Returns:
      An answer for each part: rows [bucketed V_i, D], where rows behind V_i are any numbers. Training adds inverse
      <int32>[V_i], or of `trained`, and the handles of all parts. Where columns fill whole cache lines, rows share the
      answer's memory.
    """
    if len(parts) == 1:
        return [answer]
    counts = _num_ids(parts, segments)
    of_inverse = tf.stack(counts if trained is None else _num_ids(trained, segments))
    inverses = tf.split(answer.inverse, of_inverse) if isinstance(answer, ops.TableRows) else []
    rows: list[tf.Tensor] = []
    begin = tf.constant(0)
    for count in counts:
        rows.append(_send_buffer(answer.rows, begin, routing.bucketed(count)))
        begin += count
    if isinstance(answer, ops.TableRows):
        return [answer._replace(rows=part, inverse=inverse) for part, inverse in zip(rows, inverses)]
    return [InferenceRows(part) for part in rows]


def _num_ids(parts: Sequence[Message], segments: int) -> list[tf.Tensor]:
    return [tf.size(message) - segments * tf.size(splits) for message, splits in parts]


def _send_buffer(rows: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`size` rows from `begin` on. Padding is rows of other parts, or zeros at the end."""
    window = rows[begin : begin + size]
    padded = tf.pad(window, [[0, size - tf.shape(window)[0]], [0, 0]])  # no copy where nothing is added
    return tf.ensure_shape(padded, [None, rows.shape[1]])


def of_trained_ids(answers: Sequence[Answer], pieces: Sequence[Piece | None]) -> list[Answer]:
    """The answers of one step, with the `inverse` of the ids whose gradients come to this rank.

    Args:
      answers: The result of `split_answer`.
      pieces: The piece of a window that each answer is for, in the order of pieces; None: gradients come as ids came.
    """
    inverses: dict[str, list[tf.Tensor]] = {}
    for piece, answer in zip(pieces, answers):
        if piece is not None and isinstance(answer, ops.TableRows):
            inverses.setdefault(piece.window, []).append(answer.inverse)
    joined = {window: tf.concat(parts, axis=0) for window, parts in inverses.items()}
    return [
        answer._replace(inverse=tf.gather(joined[piece.window], piece.rows))
        if piece is not None and isinstance(answer, ops.TableRows)
        else answer
        for piece, answer in zip(pieces, answers)
    ]
