"""Stages 4 and 7 of 8: ids travel to their owners, rows come back, gradients go out again. Knows no table.

Two all2alls per lookup of a group, of rows and of gradients, and one for the ids of many lookups (messages.py). Send
buffers are padded to bucketed sizes by the ops that make them, the splits say what is real (custom_ops/common/bucket.h
says why).

They run inside a group of ranks (topology.py). Where groups share gradients, the owner of an id takes the duplicates
out of what its group sent, tells the owners in the other groups which ids those are and, later, the sums of their
gradients: two all2alls more, among the replicas of a shard. So all replicas see the same ids and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives, messages
from tf_fusedrec.exchange.messages import Message
from tf_fusedrec.exchange.topology import Place


class Shared(NamedTuple):
    """Where the ids of this rank's own group are among those of all groups."""

    inverse: tf.Tensor  # <int32>[V], number of the v-th id received among the group's distinct ids
    num_unique: tf.Tensor  # <int64>[], of those
    begin: tf.Tensor  # <int32>[], where the group's distinct ids begin among what the table is asked


class Route(NamedTuple):
    """How the ids of one batch of one group travelled: enough to bring rows and to return gradients."""

    name: str  # of the collectives; the same on all ranks
    index: tf.Tensor  # <int32>[N], row of the n-th id among the rows that come back: restore[inverse], composed
    num_unique: tf.Tensor  # <int64>[], U
    id_splits: tf.Tensor  # <int32>[R], ids that this rank sent to each owner
    # What the table is asked: <int64>[V + R * S] blocks [counts[S] | ids] by source, and entries of each <int32>[R].
    # Sources are the R ranks of the group or, where groups share gradients, the groups.
    message: tf.Tensor
    message_splits: tf.Tensor
    received_splits: tf.Tensor  # <int32>[R], ids received from each rank of the group
    shared: Shared | None  # None: the table is asked for the group's ids alone


class Leaving(NamedTuple):
    """Distinct ids of one lookup of a group of tables, before they travel."""

    unique: ops.UniqueIds  # by segment
    name: str  # of its collectives, the same on all ranks
    owner: str  # this and the rest: see ops.rank_partition
    id_bits: int
    segment_names: Sequence[str]


def route_ids(leaving: Sequence[Leaving], place: Place, *, training: bool) -> list[Route]:
    """Sends unique ids to their owners, those of all lookups in one all2all.

    Args:
      leaving: of each lookup; another order on another rank mixes them up.
      place: of this process among the ranks.
      training: whether gradients may follow.

    Returns:
      Route of each.
    """
    partitioned = [
        ops.rank_partition(
            one.unique.ids,
            one.unique.splits,
            num_ranks=place.group.size,
            owner=one.owner,
            id_bits=one.id_bits,
            segment_names=one.segment_names,
        )
        for one in leaving
    ]
    segments = [len(one.segment_names) for one in leaving]
    of_group = _send(partitioned, segments, leaving[0].name, place)
    asked = of_group
    shared: list[Shared | None] = [None] * len(leaving)
    if training and place.shares_gradients:
        asked, shared = _tell_replicas(of_group, segments, leaving[0].name, place)
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
        for one, ranked, (_, received), (message, splits), own in zip(leaving, partitioned, of_group, asked, shared)
    ]


def _send(partitioned: Sequence[ops.RankedIds], segments: Sequence[int], name: str, place: Place) -> list[Message]:
    if place.group.size == 1:
        return [(ranked.message[: ranked.send_splits[0]], ranked.send_splits) for ranked in partitioned]
    sent = messages.joined([(ranked.message, ranked.send_splits) for ranked in partitioned])
    arrived = collectives.all_to_all(*sent, name=f"{name}.ids", ranks=place.group)
    return messages.parted(*arrived, segments)


def _tell_replicas(
    of_group: Sequence[Message], segments: Sequence[int], name: str, place: Place
) -> tuple[list[Message], list[Shared | None]]:
    """Messages of all groups to this shard, without the duplicates inside each group; see Route and Shared."""
    received = [ops.unpack_message(*message, num_segments=count) for message, count in zip(of_group, segments)]
    unique = [ops.segment_unique(one.ids, one.segment_splits) for one in received]
    own = tf.concat([own_message(one.ids, one.splits)[0] for one in unique], axis=0)
    gathered = messages.all_to_each(own, name=f"{name}.replicas.ids", ranks=place.replicas)
    asked = messages.parted(*gathered, segments)
    shared: list[Shared | None] = []
    for one, mine, count, (_, splits) in zip(received, unique, segments, asked):
        begin = tf.reduce_sum(splits[: place.replicas.index] - count)
        inverse = tf.gather(mine.inverse, one.position)
        shared.append(Shared(inverse, tf.size(mine.ids, out_type=tf.int64), begin))
    return asked, shared


def own_message(ids: tf.Tensor, segment_splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What a single process would receive of itself, duplicates and all: it is its own owner.

    Args:
      ids: <int64>[N], grouped by segment.
      segment_splits: <int64>[S+1].

    Returns:
      message <int64>[S + N] and its splits <int32>[1], as in Route.
    """
    message = tf.concat([segment_splits[1:] - segment_splits[:-1], ids], axis=0)
    return message, tf.reshape(tf.size(message), [1])


def _narrowed(tensor: tf.Tensor, wire: tf.DType | None) -> tf.Tensor:
    """What travels in the place of rows or gradients: rounded to the nearest, where that makes it shorter."""
    if wire is None or tensor.dtype.size <= wire.size:
        return tensor
    return tf.saturate_cast(tensor, wire)  # not infinite beyond float16's largest number


def bring_rows(route: Route, rows: tf.Tensor, place: Place, wire: tf.DType | None) -> tf.Tensor:
    """Sends rows from their owner to the ranks that asked.

    Args:
      route: of the ids.
      rows: [P, D], the table's answer to route.message; rows behind the last id are padding.
      place: of this process among the ranks.
      wire: type that longer numbers travel as; None for their own.

    Returns:
      [U, D] in the order that route.index refers to.
    """
    if route.shared is not None:
        rows = ops.recover(rows, route.shared.begin + route.shared.inverse, pad=True)
    sent = _narrowed(rows, wire if place.group.size > 1 else None)
    received, _ = collectives.all_to_all(sent, route.received_splits, name=f"{route.name}.rows", ranks=place.group)
    return tf.cast(received, rows.dtype)


def return_gradients(route: Route, grads: tf.Tensor, place: Place, wire: tf.DType | None) -> tf.Tensor:
    """Sends gradients of rows to their owner: the mirror of bring_rows.

    Args:
      route: of the ids.
      grads: [>= U, D] in the order of bring_rows' result; rows behind U are padding.
      place: of this process among the ranks.
      wire: as for bring_rows; sums over a group that go to its replicas are rounded alike.

    Returns:
      [ids of route.message, D] in that order.
    """
    sent = _narrowed(grads, wire if place.group.size > 1 else None)
    received, _ = collectives.all_to_all(sent, route.id_splits, name=f"{route.name}.gradients", ranks=place.group)
    received = tf.cast(received, grads.dtype)
    if route.shared is None:
        return received
    summed = _narrowed(ops.recover_grad(received, route.shared.inverse, route.shared.num_unique), wire)
    gathered, _ = messages.all_to_each(summed, name=f"{route.name}.replicas.gradients", ranks=place.replicas)
    return tf.cast(gathered, grads.dtype)
