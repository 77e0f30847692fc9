"""Ids travel to their owners, rows come back, gradients go out again. Knows no table.

A lookup of a group costs two all-to-alls, of rows and of gradients. The ids of many lookups share one (messages.py).
The ops that make send buffers pad them to bucketed sizes; splits give the real sizes (custom_ops/common/bucket.h says
why).

All-to-alls run inside a group of ranks (topology.py). gradient_sync.py has the exchange among groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives, messages
from tf_fusedrec.exchange.messages import Message
from tf_fusedrec.exchange.topology import RankLayout

# Arranges unique ids <int64>[U] with splits <int64>[S+1] for R owners, as ops.rank_partition does.
Partition = Callable[[tf.Tensor, tf.Tensor, int], ops.RankedIds]


class Route(NamedTuple):
    """How the ids of one lookup travelled: all that bring_rows and return_gradients need."""

    name: str  # prefix of the collectives' names, the same on all ranks
    index: tf.Tensor  # <int32>[N], row of the n-th id among the rows that come back: restore[inverse], composed
    num_unique: tf.Tensor  # <int64>[], U
    id_splits: tf.Tensor  # <int32>[R], ids that this rank sent to each owner
    message: tf.Tensor  # <int64>[V + R * S], ids that the group asks this rank for, blocks [counts[S] | ids] by rank
    message_splits: tf.Tensor  # <int32>[R], entries of each block
    received_splits: tf.Tensor  # <int32>[R], ids received from each rank of the group


class OutgoingIds(NamedTuple):
    """Distinct ids of one lookup of a group of tables, before they travel."""

    unique: ops.UniqueIds  # by segment
    name: str  # prefix of its collectives' names, the same on all ranks
    owner: str | Partition  # this field and the next two are arguments of ops.rank_partition, or it replaces the op
    id_bits: int
    segment_names: Sequence[str]


def route_ids(outgoing: Sequence[OutgoingIds], layout: RankLayout) -> list[Route]:
    """Sends the unique ids of all lookups to their owners in one all-to-all.

    Args:
      outgoing: The ids of each lookup, in the same order on all ranks.
      layout: The position of this process among the ranks.

    Returns:
      The route of each lookup.
    """
    partitioned = [partition(one, layout.group.size) for one in outgoing]
    arrived = _send(partitioned, [len(one.segment_names) for one in outgoing], outgoing[0].name, layout)
    return [
        Route(
            name=one.name,
            index=tf.gather(ranked.restore, one.unique.inverse),
            num_unique=tf.size(ranked.restore, out_type=tf.int64),
            id_splits=ranked.id_splits,
            message=message,
            message_splits=splits,
            received_splits=splits - len(one.segment_names),
        )
        for one, ranked, (message, splits) in zip(outgoing, partitioned, arrived)
    ]


def partition(outgoing: OutgoingIds, ranks: int) -> ops.RankedIds:
    """Arranges the unique ids of one lookup by their owners among `ranks` ranks."""
    ids, splits = outgoing.unique.ids, outgoing.unique.splits
    if callable(outgoing.owner):
        return outgoing.owner(ids, splits, ranks)
    names = outgoing.segment_names
    return ops.rank_partition(
        ids, splits, num_ranks=ranks, owner=outgoing.owner, id_bits=outgoing.id_bits, segment_names=names
    )


def _send(
    partitioned: Sequence[ops.RankedIds], segments: Sequence[int], name: str, layout: RankLayout
) -> list[Message]:
    if layout.group.size == 1:
        return [(ranked.message[: ranked.send_splits[0]], ranked.send_splits) for ranked in partitioned]
    sent = messages.join([(ranked.message, ranked.send_splits) for ranked in partitioned])
    arrived = collectives.all_to_all(*sent, name=f"{name}.ids", ranks=layout.group)
    return messages.split(*arrived, segments)


def own_message(ids: tf.Tensor, segment_splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The message that a single process would receive from itself, duplicates included.

    Args:
      ids: <int64>[N], grouped by segment.
      segment_splits: <int64>[S+1].

    Returns:
      The message <int64>[S + N] and its splits <int32>[1], as in Route.
    """
    message = tf.concat([segment_splits[1:] - segment_splits[:-1], ids], axis=0)
    return message, tf.reshape(tf.size(message), [1])


def narrowed(tensor: tf.Tensor, wire: tf.DType | None) -> tf.Tensor:
    """Rows or gradients in the type they travel as: rounded to the nearest where that is shorter."""
    if wire is None or tensor.dtype.size <= wire.size:
        return tensor
    return tf.saturate_cast(tensor, wire)  # not infinite beyond float16's largest number


def bring_rows(route: Route, rows: tf.Tensor, layout: RankLayout, wire: tf.DType | None) -> tf.Tensor:
    """Sends rows from their owner to the ranks that asked. Collective.

    Args:
      route: The route of the ids.
      rows: [P, D], the table's answer to route.message; rows behind the last id are padding.
      layout: The position of this process among the ranks.
      wire: Type that longer numbers travel as; None for their own.

    Returns:
      [U, D] in the order that route.index refers to.
    """
    sent = narrowed(rows, wire if layout.group.size > 1 else None)
    received, _ = collectives.all_to_all(sent, route.received_splits, name=f"{route.name}.rows", ranks=layout.group)
    return tf.cast(received, rows.dtype)


def return_gradients(route: Route, grads: tf.Tensor, layout: RankLayout, wire: tf.DType | None) -> tf.Tensor:
    """Sends gradients of rows to their owner: the mirror of bring_rows. Collective.

    Args:
      route: The route of the ids.
      grads: [>= U, D] in the order of bring_rows' result; rows behind U are padding.
      layout: The position of this process among the ranks.
      wire: As in bring_rows.

    Returns:
      [V, D], in the order of the ids in route.message.
    """
    sent = narrowed(grads, wire if layout.group.size > 1 else None)
    received, _ = collectives.all_to_all(sent, route.id_splits, name=f"{route.name}.gradients", ranks=layout.group)
    return tf.cast(received, grads.dtype)


def bytes_sent(route: Route, layout: RankLayout, segments: int, row_bytes: int) -> tf.Tensor:
    """<int64>[]: the bytes that this rank sends to others of its group for one lookup: ids, headers, rows, gradients.

    Args:
      route: The route of the ids.
      layout: The position of this process among the ranks.
      segments: S, tables in a message.
      row_bytes: Bytes of a row, or of its gradient, on the network.
    """
    sent, received = (tf.cast(splits, tf.int64) for splits in (route.id_splits, route.received_splits))
    me, others = layout.group.index, layout.group.size - 1
    ids_out, ids_in = tf.reduce_sum(sent) - sent[me], tf.reduce_sum(received) - received[me]
    return 8 * (ids_out + others * segments) + (ids_in + ids_out) * row_bytes
