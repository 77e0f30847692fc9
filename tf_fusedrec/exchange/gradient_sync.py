"""The rule gradient_sync: every replica of a shard gets the ids of all groups, and the sums of their gradients.

Two groups exchange their distinct ids and their sums, and each replica adds both. More groups share the work:

    ids        distinct ids of each group ─▶ [all-to-all] ─▶ distinct ids of a range ─▶ [gather] ─▶ ids of all groups
    gradients  sums over each group       ─▶ [all-to-all] ─▶ sums over all groups    ─▶ [gather] ─▶ sums of all ids

A shard's range of hashes is cut into one range for each of its C replicas. The replica removes duplicates and sums in
its range: a reduce-scatter by range of ids and an all-gather (TurboGR, section 4.2.1).

A shard gets u distinct ids from each group and U from all, u <= U <= C u. A rank sends (C - 1) / C (u + U) rows by
ranges and (C - 1) u rows as copies. With two groups, copies are never more: u <= (u + U) / 2. With more groups, ranges
are fewer where U < (C - 1) u, and at most 1 / C more.

The ids of other groups are only for the update. They insert, count and evict in the table, so its state equals the
state of one group. No rank reads or sends their rows. Only these ids and the handles of their rows grow with C.

An id of a window (routing.py) takes part with the last micro-batch that has it on each rank of its group. Ranks may
differ in it, so such an id travels among replicas more than once, at most once per micro-batch.

The collectives of a training step, beside dense gradients, for one group of tables and one lookup:

    <name>.ids                    of the own group   all lookups share it
    <name>.replicas.ids           of the replicas    all lookups share it; needs only the routed ids
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
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.routing import (
    Message,
    Outgoing,
    Route,
    SharedIds,
    all_to_each,
    by_ranges,
    join_messages,
    narrowed,
    own_message,
    split_messages,
)
from tf_fusedrec.exchange.topology import RankLayout


class _Distinct(NamedTuple):
    """Distinct ids of a message."""

    unique: ops.UniqueIds
    inverse: tf.Tensor  # <int32>[n], number of the n-th received id among them


def share_ids(outgoing: Sequence[Outgoing], routes: Sequence[Route], layout: RankLayout) -> list[Route]:
    """Sends the ids of all groups to all replicas of this shard. All lookups share a collective.

    Args:
      outgoing, routes: The argument of routing.send_ids and its result.

    Returns:
      The routes, each with the shared ids, and the ids of all groups, each once, as `trained`.
    """
    name, segments = outgoing[0].name, [ids.num_segments for ids in outgoing]
    group_ids = [_distinct(route.trained, count) for route, count in zip(routes, segments)]
    if by_ranges(layout.replicas.size):
        ranked = [_by_range(ids.unique, sent, layout) for ids, sent in zip(group_ids, outgoing)]
        sent = join_messages([(ids.message, ids.send_splits) for ids in ranked])
        arrived = collectives.all_to_all(*sent, name=f"{name}.replicas.ids", ranks=layout.replicas)
        summed = [_distinct(message, count) for message, count in zip(split_messages(*arrived, segments), segments)]
        trained = split_messages(*_to_each_replica(summed, f"{name}.replicas.ranges", layout), segments)
        numbers = [tf.gather(by_range.restore, ids.inverse) for by_range, ids in zip(ranked, group_ids)]
        splits = [by_range.id_splits for by_range in ranked]
    else:
        gathered = split_messages(*_to_each_replica(group_ids, f"{name}.replicas.ids", layout), segments)
        summed = [_distinct(message, count) for message, count in zip(gathered, segments)]
        trained = [own_message(ids.unique.ids, ids.unique.splits) for ids in summed]
        numbers = [ids.inverse for ids in group_ids]
        splits = [tf.fill([layout.replicas.size], tf.size(ids.unique.ids)) for ids in group_ids]
    return [
        route._replace(
            trained=trained[i],
            shared=SharedIds(
                index=numbers[i],
                num_sent=tf.size(group_ids[i].unique.ids, tf.int64),
                sent_splits=splits[i],
                inverse=summed[i].inverse,
                num_summed=tf.size(summed[i].unique.ids, out_type=tf.int64),
            ),
        )
        for i, route in enumerate(routes)
    ]


def _to_each_replica(distinct: Sequence[_Distinct], name: str, layout: RankLayout) -> Message:
    local_ids = tf.concat([own_message(ids.unique.ids, ids.unique.splits)[0] for ids in distinct], axis=0)
    return all_to_each(local_ids, name=name, ranks=layout.replicas)


def sum_over_groups(
    shared: SharedIds, received: tf.Tensor, *, name: str, layout: RankLayout, wire: tf.DType | None
) -> tf.Tensor:
    """Sums the gradients of all groups. Collective among the replicas of a shard.

    Args:
      received: [V, D], the result of routing.exchange.
      name: Prefix of the collectives' names, the same on all ranks.
      wire: Type of longer numbers in each exchange; None for their own.

    Returns:
      [U, D], in the order of Route.trained. The same bits on all replicas.
    """
    exchange, ranged = f"{name}.replicas.gradients", by_ranges(layout.replicas.size)
    group_sums = narrowed(ops.recover_grad(received, shared.index, shared.num_sent, pad=ranged), wire)
    if not ranged:
        arrived, _ = all_to_each(group_sums, name=exchange, ranks=layout.replicas)
        return ops.recover_grad(tf.cast(arrived, received.dtype), shared.inverse, shared.num_summed)
    arrived, _ = collectives.all_to_all(group_sums, shared.sent_splits, name=exchange, ranks=layout.replicas)
    total = ops.recover_grad(tf.cast(arrived, received.dtype), shared.inverse, shared.num_summed)
    gathered, _ = all_to_each(narrowed(total, wire), name=f"{name}.replicas.sums", ranks=layout.replicas)
    return tf.cast(gathered, received.dtype)


def _distinct(message: Message, segments: int) -> _Distinct:
    received = ops.unpack_message(*message, num_segments=segments)
    unique = ops.segment_unique(received.ids, received.segment_splits)
    return _Distinct(unique, tf.gather(unique.inverse, received.position))


def _by_range(unique: ops.UniqueIds, outgoing: Outgoing, layout: RankLayout) -> ops.RankedIds:
    """The ids by the replica that sums their gradients.

    A partition among all ranks cuts each shard into C ranges. The blocks of other shards hold headers and no ids.
    """
    replicas, segments = layout.replicas.size, outgoing.num_segments
    first = layout.group.index * replicas
    ranked = outgoing.partition(unique.ids, unique.splits, num_ranks=layout.group.size * replicas)
    in_shard = slice(first, first + replicas)
    return ranked._replace(
        message=ranked.message[first * segments :],
        send_splits=ranked.send_splits[in_shard],
        id_splits=ranked.id_splits[in_shard],
    )
