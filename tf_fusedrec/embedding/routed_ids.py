"""The records of a lookup on its way: what is asked, what leaves, what the owner got, and what its gradients need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding.features import FlatFeature
from tf_fusedrec.exchange import gradient_sync, routing
from tf_fusedrec.exchange.routing import Message, Piece
from tf_fusedrec.tables import Answer

if TYPE_CHECKING:
    from tf_fusedrec.embedding.group_lookup import GroupLookup


class LookupRequest(NamedTuple):
    """One lookup: features of one group that have one output dtype."""

    lookup: GroupLookup
    output_dtype: str  # name of the dtype of the rows
    features: Sequence[FlatFeature]  # in the group's order
    call: int  # number of the layer's call in its graph: two calls must not share the names of their collectives
    training: bool  # whether ids without a row get one; never for frozen tables and those of another model


class Outgoing(NamedTuple):
    """The ids of one request before they travel."""

    fused: ops.FusedIds
    ids: routing.OutgoingIds | None  # None: ids, rows and gradients stay on this rank


class RoutedIds(NamedTuple):
    """The ids of one lookup at their owners, and the way back. Leaves are tensors or constants: it may wait a step."""

    lookup: GroupLookup
    fused: ops.FusedIds
    route: routing.Route | None  # None: ids, rows and gradients stay on this rank
    shared: gradient_sync.SharedIds | None  # None: the group's ids alone train this rank's rows
    message: tf.Tensor  # <int64>[V + R * S], ids whose rows are wanted of this rank: blocks [counts[S] | ids] by source
    message_splits: tf.Tensor  # <int32>[R], entries of each block
    output_dtype: str
    training: bool

    @property
    def asked(self) -> Message:
        """The ids whose rows are wanted of this rank."""
        return self.message, self.message_splits

    @property
    def trained(self) -> Message:
        """The ids whose gradients come to this rank."""
        if self.shared is not None:
            return self.shared.message, self.shared.message_splits
        return self.asked if self.route is None else self.route.trained

    @property
    def piece(self) -> Piece | None:
        """The piece of a window whose rows travel once; None: the lookup shares no rows."""
        return None if self.route is None else self.route.piece


class Context(NamedTuple):
    """All that the gradients of a lookup need. Leaves are tensors or constants: it may wait a step."""

    routed: RoutedIds
    answer: Answer  # the table's
    updates_seen: tf.Tensor  # <int64>[], updates that the table had had at the lookup
