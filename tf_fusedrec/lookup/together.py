"""What several lookups do together: their ids travel in one all2all, their gradients make one update.

What comes together cannot overtake each other, and costs one exchange instead of many: messages.py says how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec import exchange
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.features import FlatFeature
from tf_fusedrec.lookup.group import Context, GroupLookup, Routed
from tf_fusedrec.xla import outside_clusters


class LaneCall(NamedTuple):
    """One lookup: features of one lane of a group (GroupLookup.lanes), in the group's order."""

    lookup: GroupLookup
    lane: str  # name of the output dtype
    features: Sequence[FlatFeature]
    number: int  # of the call in its graph, so that two calls do not share the names of their collectives
    training: bool  # whether ids without a row get one, where the tables are this model's own


def route(calls: Sequence[LaneCall]) -> list[Routed]:
    """First stage: ids travel to their owners, in one all2all where those are the same ranks. Reads no table.

    Args:
      calls: in the same order on all ranks.
    """
    fused = [call.lookup.fuse(call.features) for call in calls]
    routed: dict[int, Routed] = {}
    travelling: dict[tuple, list[int]] = {}
    for i, call in enumerate(calls):
        place, training = call.lookup.place, call.training
        if call.lookup.stay_here(call.features):
            message = exchange.own_message(fused[i].ids, fused[i].segment_splits)
            routed[i] = Routed(fused[i], None, *message, call.lane)
        else:
            replicas = place.replicas.members if training and place.shares_gradients else None
            travelling.setdefault((place.group.members, replicas), []).append(i)
    for (_, replicas), numbers in travelling.items():
        leaving = [calls[i].lookup.leaving(fused[i], calls[i].lane, str(calls[i].number)) for i in numbers]
        place = calls[numbers[0]].lookup.place
        for i, way in zip(numbers, exchange.route_ids(leaving, place, training=replicas is not None)):
            routed[i] = Routed(fused[i], way, way.message, way.message_splits, calls[i].lane)
            if calls[i].training:
                calls[i].lookup.count_traffic(routed[i])
    return [routed[i] for i in range(len(calls))]


class WaitingGradients(NamedTuple):
    """Gradients [G, D] of one lookup that wait for others of their update."""

    lookup: GroupLookup
    context: Context
    grads: tf.Tensor


def apply_waiting(waiting: Sequence[WaitingGradients], *, staleness: int = 0) -> None:
    """One update of every group that has waiting gradients, summed in the order given. Collective, native tables only.

    Args:
      staleness: see GroupLookup.apply_returned.

    Raises:
      As GroupLookup.apply_returned.
    """
    groups: dict[int, list[int]] = {}
    for i, part in enumerate(waiting):
        groups.setdefault(id(part.lookup), []).append(i)
    with outside_clusters("An update of tables"):
        # All are sent before the first is waited for.
        arrived = [part.lookup.return_gradients(part.context, part.grads) for part in waiting]
        for numbers in groups.values():
            parts = [(waiting[i].context, arrived[i]) for i in numbers]
            waiting[numbers[0]].lookup.apply_returned(parts, staleness=staleness)
