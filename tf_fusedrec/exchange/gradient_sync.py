"""The rule gradient_sync: every replica of a shard gets the ids of all groups, and the sums of their gradients.

Two groups exchange their distinct ids and their sums, and each replica adds both. More groups share the work:

    ids        distinct ids of each group ─▶ [all-to-all] ─▶ distinct ids of a range ─▶ [gather] ─▶ ids of all groups
    gradients  sums over each group       ─▶ [all-to-all] ─▶ sums over all groups    ─▶ [gather] ─▶ sums of all ids

A shard's range of hashes is cut into one range for each of its C replicas. The replica removes duplicates and sums in
its range: a reduce-scatter by range of ids and an all-gather (TurboGR, section 4.2.1).

A shard gets u distinct ids from each group and U from all, u <= U <= C u. A rank sends (C - 1) / C (u + U) rows by
ranges and (C - 1) u rows as copies. With two groups, copies are never more: u <= (u + U) / 2. With more groups, ranges
are fewer where U < (C - 1) u, and at most 1 / C more.

The ids of other groups are for the update alone. They insert, count and evict in the table, so its state equals the
state of one group. No rank reads or sends their rows. Only these ids and the handles of their rows grow with C.

An id of a window (routing.py) takes part with the last micro-batch that holds it on each rank of its group. Ranks may
differ in it, so such an id travels among replicas more than once, at most once per micro-batch.

The collectives of a training step, beside dense gradients, for one group of tables and one lookup:

    <name>.ids                    of the own group   all lookups share it
    <name>.replicas.ids           of the replicas    all lookups share it; needs the routed ids alone
    <name>.replicas.ranges        of the replicas    all lookups share it; more than two groups
    <name>.rows                   of the own group   does not wait for the two above
    <name>.gradients              of the own group
    <name>.replicas.gradients     of the replicas
    <name>.replicas.sums          of the replicas    more than two groups
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives, routing
from tf_fusedrec.exchange.routing import Message, OutgoingIds, Route, narrowed, own_message, partition
from tf_fusedrec.exchange.topology import RankLayout


class SharedIds(NamedTuple):
    """The ids of all groups of one lookup in this rank's shard, and the way of their gradients.

    This rank sums the gradients of its range of ids, or of all ids with two groups.
    """

    index: tf.Tensor  # <int32>[V], number of the v-th id of Route.trained among the u sums that this rank sends
    num_sent: tf.Tensor  # <int64>[], u, distinct ids of the own group
    sent_splits: tf.Tensor  # <int32>[C], of these, ids that each replica sums
    inverse: tf.Tensor  # <int32>[W], number of the w-th id from the replicas among the ids that this rank sums
    num_summed: tf.Tensor  # <int64>[], distinct ids that this rank sums
    message: tf.Tensor  # <int64>[U + B * S], ids of all groups, each once: B blocks [counts[S] | ids]
    message_splits: tf.Tensor  # <int32>[B], entries of each block


def by_ranges(replicas: int) -> bool:
    """Returns whether each of C replicas sums a range of the ids, and sends the sums to the others."""
    return replicas > 2


def bytes_sent(shared: SharedIds, layout: RankLayout, segments: int, row_bytes: int) -> tf.Tensor:
    """<int64>[]: the bytes that this rank sends to other replicas for one lookup: ids, headers and sums of gradients.

    Args:
      shared: The shared ids of the lookup.
      layout: The position of this process among the ranks.
      segments: S.
      row_bytes: Bytes of a sum of gradients on the network.
    """
    replicas = layout.replicas
    rows = tf.cast(tf.reduce_sum(shared.sent_splits) - shared.sent_splits[replicas.index], tf.int64)
    exchanges = 1
    if by_ranges(replicas.size):
        rows += (replicas.size - 1) * shared.num_summed
        exchanges = 2
    return rows * (8 + row_bytes) + exchanges * (replicas.size - 1) * 8 * segments


class _Distinct(NamedTuple):
    """Distinct ids of a message."""

    unique: ops.UniqueIds
    inverse: tf.Tensor  # <int32>[n], number of the n-th received id among them


def share_ids(outgoing: Sequence[OutgoingIds], routes: Sequence[Route], layout: RankLayout) -> list[SharedIds]:
    """Tells the ids of all groups to all replicas of this shard. All lookups share a collective.

    Args:
      outgoing: The arguments of all_to_all.route_ids.
      routes: Its results.
      layout: The position of this process among the ranks.

    Returns:
      The shared ids of each lookup.
    """
    name, segments = outgoing[0].name, [len(one.segment_names) for one in outgoing]
    distinct = [_distinct(*route.trained, count) for route, count in zip(routes, segments)]
    if not by_ranges(layout.replicas.size):
        arrived = _to_each_replica(distinct, f"{name}.replicas.ids", layout)
        of_all = [_distinct(*part, count) for part, count in zip(routing.split_messages(*arrived, segments), segments)]
        return [_summed_by_all(*pair, layout.replicas.size) for pair in zip(distinct, of_all)]
    ranked = [_by_range(of_group.unique, one, layout) for of_group, one in zip(distinct, outgoing)]
    sent = routing.join_messages([(one.message, one.send_splits) for one in ranked])
    arrived = collectives.all_to_all(*sent, name=f"{name}.replicas.ids", ranks=layout.replicas)
    of_range = [_distinct(*part, count) for part, count in zip(routing.split_messages(*arrived, segments), segments)]
    gathered = _to_each_replica(of_range, f"{name}.replicas.ranges", layout)
    return [
        SharedIds(
            index=tf.gather(by_range.restore, of_group.inverse),
            num_sent=tf.size(by_range.restore, out_type=tf.int64),
            sent_splits=by_range.id_splits,
            inverse=in_range.inverse,
            num_summed=tf.size(in_range.unique.ids, out_type=tf.int64),
            message=message,
            message_splits=splits,
        )
        for of_group, by_range, in_range, (message, splits) in zip(
            distinct, ranked, of_range, routing.split_messages(*gathered, segments)
        )
    ]


def _to_each_replica(distinct: Sequence[_Distinct], name: str, layout: RankLayout) -> Message:
    own = tf.concat([own_message(one.unique.ids, one.unique.splits)[0] for one in distinct], axis=0)
    return routing.all_to_each(own, name=name, ranks=layout.replicas)


def _summed_by_all(of_group: _Distinct, of_all: _Distinct, replicas: int) -> SharedIds:
    message, splits = own_message(of_all.unique.ids, of_all.unique.splits)
    sent = tf.size(of_group.unique.ids)
    return SharedIds(
        index=of_group.inverse,
        num_sent=tf.cast(sent, tf.int64),
        sent_splits=tf.fill([replicas], sent),
        inverse=of_all.inverse,
        num_summed=tf.size(of_all.unique.ids, out_type=tf.int64),
        message=message,
        message_splits=splits,
    )


def sum_over_groups(
    shared: SharedIds, received: tf.Tensor, *, name: str, layout: RankLayout, wire: tf.DType | None
) -> tf.Tensor:
    """Sums the gradients of all groups. Collective among the replicas of a shard.

    Args:
      shared: The shared ids of the lookup.
      received: [V, D], gradients from the ranks of the own group, see all_to_all.return_gradients.
      name: Prefix of the collectives' names, the same on all ranks.
      layout: The position of this process among the ranks.
      wire: Type that longer numbers travel as, each time; None for their own.

    Returns:
      [U, D], in the order of the ids in shared.message. The same bits on all replicas.
    """
    to_sum, ranged = f"{name}.replicas.gradients", by_ranges(layout.replicas.size)
    of_group = narrowed(ops.recover_grad(received, shared.index, shared.num_sent, pad=ranged), wire)
    if not ranged:
        arrived, _ = routing.all_to_each(of_group, name=to_sum, ranks=layout.replicas)
        return ops.recover_grad(tf.cast(arrived, received.dtype), shared.inverse, shared.num_summed)
    arrived, _ = collectives.all_to_all(of_group, shared.sent_splits, name=to_sum, ranks=layout.replicas)
    total = ops.recover_grad(tf.cast(arrived, received.dtype), shared.inverse, shared.num_summed)
    gathered, _ = routing.all_to_each(narrowed(total, wire), name=f"{name}.replicas.sums", ranks=layout.replicas)
    return tf.cast(gathered, received.dtype)


def _distinct(message: tf.Tensor, splits: tf.Tensor, segments: int) -> _Distinct:
    received = ops.unpack_message(message, splits, num_segments=segments)
    unique = ops.segment_unique(received.ids, received.segment_splits)
    return _Distinct(unique, tf.gather(unique.inverse, received.position))


def _by_range(unique: ops.UniqueIds, outgoing: OutgoingIds, layout: RankLayout) -> ops.RankedIds:
    """The ids by the replica that sums their gradients.

    A partition among all ranks cuts each shard into C ranges. The blocks of other shards hold headers and no ids.
    """
    replicas, segments = layout.replicas.size, len(outgoing.segment_names)
    first = layout.group.index * replicas
    ranked = partition(outgoing._replace(unique=unique), layout.group.size * replicas)
    mine = slice(first, first + replicas)
    return ranked._replace(
        message=ranked.message[first * segments :],
        send_splits=ranked.send_splits[mine],
        id_splits=ranked.id_splits[mine],
    )
