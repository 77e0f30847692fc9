"""Several lookups of one step as one lookup of their table, whose answer is parted again.

A training lookup is a tick of the table's clock: it counts every id once, ages every row by one, and decides which rows
come and which leave. A step that looks up in parts (micro-batches, features of several output dtypes) must count and
decide like a step that looks up all at once. So a table sees the parts as sources of one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import messages
from tf_fusedrec.exchange.messages import Message


def joined(parts: Sequence[Message]) -> Message:
    """One message of all sources of all parts, in their order.

    Args:
      parts: <int64>[V_i + R_i * S] blocks [counts[S] | ids] of R_i sources, and entries of each block <int32>[R_i].

    Returns:
      The same, of V ids from R sources, their sums.
    """
    if len(parts) == 1:
        return parts[0]
    joined_messages, joined_splits = (tf.concat(of_all, axis=0) for of_all in zip(*parts))
    return joined_messages, joined_splits


def parted(found: Any, parts: Sequence[Message], segments: int) -> list[Any]:
    """The table's answer to each of the parts that were `joined`.

    Args:
      found: the table's answer: rows [P, D], and for training `inverse` <int32>[V] and `handles` of all parts.
      parts: as `joined` had them.
      segments: S, tables in a message.

    Returns:
      Of each part an answer like `found`: rows [bucketed V_i, D], numbers behind V_i are any; inverse <int32>[V_i];
      the handles of all parts. Where columns fill whole cache lines, rows share the memory of `found`.
    """
    if len(parts) == 1:
        return [found]
    counts = [tf.size(message) - segments * tf.size(splits) for message, splits in parts]
    trained = {} if not hasattr(found, "inverse") else {"inverse": tf.split(found.inverse, tf.stack(counts))}
    answers: list[Any] = []
    begin = tf.constant(0)
    for i, count in enumerate(counts):
        # One after another: exchanges begin in the order of the parts.
        with tf.control_dependencies([answers[-1].rows] if answers else []):
            rows = _send_buffer(found.rows, begin, messages.bucketed(count))
        answers.append(found._replace(rows=rows, **{field: of_parts[i] for field, of_parts in trained.items()}))
        begin += count
    return answers


def _send_buffer(rows: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`size` rows from `begin` on: those of other parts, or zeros, stand where nothing is sent."""
    window = rows[begin : begin + size]
    padded = tf.pad(window, [[0, size - tf.shape(window)[0]], [0, 0]])  # no copy where there is nothing to add
    return tf.ensure_shape(padded, [None, rows.shape[1]])
