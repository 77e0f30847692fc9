"""The rule gradient_sync: every replica of a shard gets the ids of all groups, and the sums of their gradients.

    ids        distinct ids of each group ─▶ [all-to-all] ─▶ distinct ids of a range ─▶ [gather] ─▶ ids of all groups
    gradients  sums over each group       ─▶ [all-to-all] ─▶ sums over all groups    ─▶ [gather] ─▶ sums of all ids

A shard's range of hashes is cut into one range for each of its G replicas, which removes duplicates and sums there: a
reduce-scatter by range of ids and an all-gather (TurboGR, section 4.2.1). With u distinct ids in each group and U in
all, a rank sends (G - 1) / G (u + U) rows. One copy for each replica would be (G - 1) u rows.

The ids of other groups are for the update alone: they insert, count and evict in the table, so that its state is that
of one group. No rank reads or sends their rows. What grows with G are these ids and the handles of their rows.

An id of a window (window.py) takes part with the last micro-batch that holds it on each rank of its group. Ranks may
differ in it, so such an id travels among replicas more than once, at most once per micro-batch.

The collectives of a training step, beside dense gradients, for one group of tables and one lookup:

    <name>.ids                    of the own group   all lookups share it
    <name>.replicas.ids           of the replicas    all lookups share it; needs the routed ids alone
    <name>.replicas.ranges        of the replicas    all lookups share it; needs the routed ids alone
    <name>.rows                   of the own group   does not wait for the two above
    <name>.gradients              of the own group
    <name>.replicas.gradients     of the replicas
    <name>.replicas.sums          of the replicas
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives, messages
from tf_fusedrec.exchange.all_to_all import OutgoingIds, Route, narrowed, own_message, partition
from tf_fusedrec.exchange.topology import RankLayout


class SharedIds(NamedTuple):
    """The ids of all groups of one lookup in this rank's shard, and the way of their gradients."""

    index: tf.Tensor  # <int32>[V], number of the v-th id of Route.trained among the u sums that this rank sends
    num_sent: tf.Tensor  # <int64>[], u, distinct ids of the own group
    sent_splits: tf.Tensor  # <int32>[G], of these, ids in the range of each replica
    inverse: tf.Tensor  # <int32>[W], number of the w-th id from the replicas among the ids of this rank's range
    num_in_range: tf.Tensor  # <int64>[], distinct ids of that range
    message: tf.Tensor  # <int64>[U + G * S], ids of all groups, each once: blocks [counts[S] | ids] by range
    message_splits: tf.Tensor  # <int32>[G], entries of each block


def bytes_sent(shared: SharedIds, layout: RankLayout, segments: int, row_bytes: int) -> tf.Tensor:
    """<int64>[]: the bytes that this rank sends to other replicas for one lookup: ids, headers and sums of gradients.

    Args:
      shared: The shared ids of the lookup.
      layout: The position of this process among the ranks.
      segments: S.
      row_bytes: Bytes of a sum of gradients on the network.
    """
    others = layout.replicas.size - 1
    to_ranges = tf.cast(tf.reduce_sum(shared.sent_splits) - shared.sent_splits[layout.replicas.index], tf.int64)
    return (to_ranges + others * shared.num_in_range) * (8 + row_bytes) + 2 * others * 8 * segments


class _Distinct(NamedTuple):
    """Distinct ids of a message."""

    unique: ops.UniqueIds
    inverse: tf.Tensor  # <int32>[n], number of the n-th received id among them


def share_ids(outgoing: Sequence[OutgoingIds], routes: Sequence[Route], layout: RankLayout) -> list[SharedIds]:
    """Tells the ids of all groups to all replicas of this shard, in two collectives for all lookups.

    Args:
      outgoing: The arguments of all_to_all.route_ids.
      routes: Its results.
      layout: The position of this process among the ranks.

    Returns:
      The shared ids of each lookup.
    """
    name, segments = outgoing[0].name, [len(one.segment_names) for one in outgoing]
    distinct = [_distinct(*route.trained, count) for route, count in zip(routes, segments)]
    ranked = [_by_range(of_group.unique, one, layout) for of_group, one in zip(distinct, outgoing)]
    sent = messages.join([(one.message, one.send_splits) for one in ranked])
    arrived = collectives.all_to_all(*sent, name=f"{name}.replicas.ids", ranks=layout.replicas)
    of_range = [_distinct(*part, count) for part, count in zip(messages.split(*arrived, segments), segments)]
    own = tf.concat([own_message(one.unique.ids, one.unique.splits)[0] for one in of_range], axis=0)
    gathered = messages.all_to_each(own, name=f"{name}.replicas.ranges", ranks=layout.replicas)
    return [
        SharedIds(
            index=tf.gather(by_range.restore, of_group.inverse),
            num_sent=tf.size(by_range.restore, out_type=tf.int64),
            sent_splits=by_range.id_splits,
            inverse=in_range.inverse,
            num_in_range=tf.size(in_range.unique.ids, out_type=tf.int64),
            message=message,
            message_splits=splits,
        )
        for of_group, by_range, in_range, (message, splits) in zip(
            distinct, ranked, of_range, messages.split(*gathered, segments)
        )
    ]


def sum_over_groups(
    shared: SharedIds, received: tf.Tensor, *, name: str, layout: RankLayout, wire: tf.DType | None
) -> tf.Tensor:
    """Sums the gradients of all groups. Collective among the replicas of a shard.

    Args:
      shared: The shared ids of the lookup.
      received: [V, D], gradients from the ranks of the own group, see all_to_all.return_gradients.
      name: Prefix of the collectives' names, the same on all ranks.
      layout: The position of this process among the ranks.
      wire: Type that longer numbers travel as, both times; None for their own.

    Returns:
      [U, D], in the order of the ids in shared.message. The same bits on all replicas.
    """
    of_group = narrowed(ops.recover_grad(received, shared.index, shared.num_sent, pad=True), wire)
    to_range = f"{name}.replicas.gradients"
    arrived, _ = collectives.all_to_all(of_group, shared.sent_splits, name=to_range, ranks=layout.replicas)
    total = ops.recover_grad(tf.cast(arrived, received.dtype), shared.inverse, shared.num_in_range)
    gathered, _ = messages.all_to_each(narrowed(total, wire), name=f"{name}.replicas.sums", ranks=layout.replicas)
    return tf.cast(gathered, received.dtype)


def _distinct(message: tf.Tensor, splits: tf.Tensor, segments: int) -> _Distinct:
    received = ops.unpack_message(message, splits, num_segments=segments)
    unique = ops.segment_unique(received.ids, received.segment_splits)
    return _Distinct(unique, tf.gather(unique.inverse, received.position))


def _by_range(unique: ops.UniqueIds, outgoing: OutgoingIds, layout: RankLayout) -> ops.RankedIds:
    """The ids by the replica that sums their gradients.

    A partition among all ranks cuts each shard into G ranges. The blocks of other shards hold headers and no ids.
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
