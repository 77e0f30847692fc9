"""What the lookups of a step do together: their ids travel in one all2all, a table looks them up once, and their
gradients make one update.

What comes together cannot overtake each other, and costs one exchange instead of many: messages.py says how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding.features import FlatFeature
from tf_fusedrec.embedding.group_lookup import Context, GroupLookup, Routed
from tf_fusedrec.exchange import all_to_all
from tf_fusedrec.ops import RowsAhead
from tf_fusedrec.ops.xla import outside_clusters


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
            message = all_to_all.own_message(fused[i].ids, fused[i].segment_splits)
            routed[i] = Routed(fused[i], None, *message, call.lane)
        else:
            replicas = place.replicas.members if training and place.shares_gradients else None
            travelling.setdefault((place.group.members, replicas), []).append(i)
    for (_, replicas), numbers in travelling.items():
        leaving = [calls[i].lookup.leaving(fused[i], calls[i].lane, str(calls[i].number)) for i in numbers]
        place = calls[numbers[0]].lookup.place
        for i, way in zip(numbers, all_to_all.route_ids(leaving, place, training=replicas is not None)):
            routed[i] = Routed(fused[i], way, way.message, way.message_splits, calls[i].lane)
            if calls[i].training:
                calls[i].lookup.count_traffic(routed[i])
    return [routed[i] for i in range(len(calls))]


def look_ahead(calls: Sequence[LaneCall], routed: Sequence[Routed]) -> list[RowsAhead]:
    """Reads rows at the owner that `fetch` will want, of each group, and changes nothing. Native tables only."""
    groups = _by_group([call.lookup for call in calls])
    return [calls[numbers[0]].lookup.look_ahead([routed[i] for i in numbers]) for numbers in groups]


def fetch(
    calls: Sequence[LaneCall], routed: Sequence[Routed], ahead: Sequence[RowsAhead] | None = None
) -> list[Context]:
    """Second stage, at the owners: the rows of all lookups of a step, each table's in one lookup. No collective.

    Args:
      calls: of one step; all of a group train, or none.
      routed: of `route`, of each call.
      ahead: of `look_ahead`; None where nothing was read ahead.

    Returns:
      Context of each call.
    """
    contexts: dict[int, Context] = {}
    groups = _by_group([call.lookup for call in calls])
    for g, numbers in enumerate(groups):
        first = calls[numbers[0]]
        seen = None if ahead is None else ahead[g]
        of_group = first.lookup.fetch([routed[i] for i in numbers], training=first.training, ahead=seen)
        contexts.update(zip(numbers, of_group))
    return [contexts[i] for i in range(len(calls))]


def _by_group(lookups: Sequence[GroupLookup]) -> list[list[int]]:
    """Places of each group's lookups, groups in the order in which they come first."""
    places: dict[int, list[int]] = {}
    for i, lookup in enumerate(lookups):
        places.setdefault(id(lookup), []).append(i)
    return list(places.values())


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
    with outside_clusters("An update of tables"):
        # All are sent before the first is waited for.
        arrived = [part.lookup.return_gradients(part.context, part.grads) for part in waiting]
        for numbers in _by_group([part.lookup for part in waiting]):
            parts = [(waiting[i].context, arrived[i]) for i in numbers]
            waiting[numbers[0]].lookup.apply_returned(parts, staleness=staleness)
