"""Ids travel to their owners, rows come back, gradients go out again. Knows no table.

A lookup of a group costs two all-to-alls, of rows and of gradients. The ids of many lookups share one (messages.py).
The ops that make send buffers pad them to bucketed sizes; splits give the real sizes (custom_ops/common/bucket.h says
why).

All-to-alls run inside a group of ranks (topology.py). Where groups share gradients, the owner of an id removes the
duplicates from the ids of its group and sends the distinct ids to the owners in the other groups; later it sends the
sums of their gradients. These are two more all-to-alls, among the replicas of a shard. So all replicas see the same ids
and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives, messages
from tf_fusedrec.exchange.messages import Message
from tf_fusedrec.exchange.topology import Place

# Arranges unique ids <int64>[U] with splits <int64>[S+1] for R owners, as ops.rank_partition does.
Partition = Callable[[tf.Tensor, tf.Tensor, int], ops.RankedIds]


class SharedIds(NamedTuple):
    """The ids of this rank's own group among the ids of all groups."""

    inverse: tf.Tensor  # <int32>[V], number of the v-th received id among the group's distinct ids
    num_unique: tf.Tensor  # <int64>[], the group's distinct ids
    begin: tf.Tensor  # <int32>[], where the group's distinct ids begin among the ids that the table is asked for


class Route(NamedTuple):
    """How the ids of one lookup travelled: all that bring_rows and return_gradients need."""

    name: str  # prefix of the collectives' names, the same on all ranks
    index: tf.Tensor  # <int32>[N], row of the n-th id among the rows that come back: restore[inverse], composed
    num_unique: tf.Tensor  # <int64>[], U
    id_splits: tf.Tensor  # <int32>[R], ids that this rank sent to each owner
    # Sources of the message are the R ranks of the group or, where groups share gradients, the groups.
    message: tf.Tensor  # <int64>[V + R * S], ids for the table, blocks [counts[S] | ids] by source
    message_splits: tf.Tensor  # <int32>[R], entries of each block
    received_splits: tf.Tensor  # <int32>[R], ids received from each rank of the group
    shared: SharedIds | None  # None: the table is asked for the group's ids alone


class OutgoingIds(NamedTuple):
    """Distinct ids of one lookup of a group of tables, before they travel."""

    unique: ops.UniqueIds  # by segment
    name: str  # prefix of its collectives' names, the same on all ranks
    owner: str | Partition  # this field and the next two are arguments of ops.rank_partition, or it replaces the op
    id_bits: int
    segment_names: Sequence[str]


def route_ids(outgoing: Sequence[OutgoingIds], place: Place, *, training: bool) -> list[Route]:
    """Sends the unique ids of all lookups to their owners in one all-to-all.

    Args:
      outgoing: The ids of each lookup, in the same order on all ranks.
      place: The position of this process among the ranks.
      training: Whether gradients may follow.

    Returns:
      The route of each lookup.
    """
    partitioned = [_partition(one, place.group.size) for one in outgoing]
    segments = [len(one.segment_names) for one in outgoing]
    of_group = _send(partitioned, segments, outgoing[0].name, place)
    to_table = of_group
    shared: list[SharedIds | None] = [None] * len(outgoing)
    if training and place.shares_gradients:
        to_table, shared = _share_with_replicas(of_group, segments, outgoing[0].name, place)
    return [
        Route(
            name=one.name,
            index=tf.gather(ranked.restore, one.unique.inverse),
            num_unique=tf.size(ranked.restore, out_type=tf.int64),
            id_splits=ranked.id_splits,
            message=message,
            message_splits=splits,
            received_splits=received - len(one.segment_names),
            shared=own,
        )
        for one, ranked, (_, received), (message, splits), own in zip(outgoing, partitioned, of_group, to_table, shared)
    ]


def _partition(outgoing: OutgoingIds, ranks: int) -> ops.RankedIds:
    ids, splits = outgoing.unique.ids, outgoing.unique.splits
    if callable(outgoing.owner):
        return outgoing.owner(ids, splits, ranks)
    names = outgoing.segment_names
    return ops.rank_partition(
        ids, splits, num_ranks=ranks, owner=outgoing.owner, id_bits=outgoing.id_bits, segment_names=names
    )


def _send(partitioned: Sequence[ops.RankedIds], segments: Sequence[int], name: str, place: Place) -> list[Message]:
    if place.group.size == 1:
        return [(ranked.message[: ranked.send_splits[0]], ranked.send_splits) for ranked in partitioned]
    sent = messages.join([(ranked.message, ranked.send_splits) for ranked in partitioned])
    arrived = collectives.all_to_all(*sent, name=f"{name}.ids", ranks=place.group)
    return messages.split(*arrived, segments)


def _share_with_replicas(
    of_group: Sequence[Message], segments: Sequence[int], name: str, place: Place
) -> tuple[list[Message], list[SharedIds | None]]:
    """Messages of all groups to this shard, without duplicates inside a group, and this group's ids among them."""
    received = [ops.unpack_message(*message, num_segments=count) for message, count in zip(of_group, segments)]
    unique = [ops.segment_unique(one.ids, one.segment_splits) for one in received]
    own = tf.concat([own_message(one.ids, one.splits)[0] for one in unique], axis=0)
    gathered = messages.all_to_each(own, name=f"{name}.replicas.ids", ranks=place.replicas)
    of_all_groups = messages.split(*gathered, segments)
    shared: list[SharedIds | None] = []
    for one, mine, count, (_, splits) in zip(received, unique, segments, of_all_groups):
        begin = tf.reduce_sum(splits[: place.replicas.index] - count)
        inverse = tf.gather(mine.inverse, one.position)
        shared.append(SharedIds(inverse, tf.size(mine.ids, out_type=tf.int64), begin))
    return of_all_groups, shared


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


def _narrowed(tensor: tf.Tensor, wire: tf.DType | None) -> tf.Tensor:
    """Rows or gradients in the type they travel as: rounded to the nearest where that is shorter."""
    if wire is None or tensor.dtype.size <= wire.size:
        return tensor
    return tf.saturate_cast(tensor, wire)  # not infinite beyond float16's largest number


def bring_rows(route: Route, rows: tf.Tensor, place: Place, wire: tf.DType | None) -> tf.Tensor:
    """Sends rows from their owner to the ranks that asked. Collective.

    Args:
      route: The route of the ids.
      rows: [P, D], the table's answer to route.message; rows behind the last id are padding.
      place: The position of this process among the ranks.
      wire: Type that longer numbers travel as; None for their own.

    Returns:
      [U, D] in the order that route.index refers to.
    """
    if route.shared is not None:
        rows = ops.recover(rows, route.shared.begin + route.shared.inverse, pad=True)
    sent = _narrowed(rows, wire if place.group.size > 1 else None)
    received, _ = collectives.all_to_all(sent, route.received_splits, name=f"{route.name}.rows", ranks=place.group)
    return tf.cast(received, rows.dtype)


def return_gradients(route: Route, grads: tf.Tensor, place: Place, wire: tf.DType | None) -> tf.Tensor:
    """Sends gradients of rows to their owner: the mirror of bring_rows. Collective.

    Args:
      route: The route of the ids.
      grads: [>= U, D] in the order of bring_rows' result; rows behind U are padding.
      place: The position of this process among the ranks.
      wire: As in bring_rows. Sums over a group that go to its replicas are rounded alike.

    Returns:
      [V, D], in the order of the ids in route.message.
    """
    sent = _narrowed(grads, wire if place.group.size > 1 else None)
    received, _ = collectives.all_to_all(sent, route.id_splits, name=f"{route.name}.gradients", ranks=place.group)
    received = tf.cast(received, grads.dtype)
    if route.shared is None:
        return received
    summed = _narrowed(ops.recover_grad(received, route.shared.inverse, route.shared.num_unique), wire)
    gathered, _ = messages.all_to_each(summed, name=f"{route.name}.replicas.gradients", ranks=place.replicas)
    return tf.cast(gathered, grads.dtype)
