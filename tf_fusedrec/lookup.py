"""The way of one group's ids through all stages, forward and backward: Algorithm 1 of FusedRec (paper, section 3).

    fuse_ids ─▶ segment_unique ─▶ rank_partition ─▶ [all2all ids] ─▶ unpack_message ─▶ segment_unique ─▶ table
    outputs  ◀─ recover        ◀───────────────────  [all2all rows] ◀─ recover        ◀───────────────────┘

The backward pass is the mirror: recover_grad, [all2all gradients], recover_grad, the table's optimizer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec import collectives, exchange, ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.features import FlatFeature
from tf_fusedrec.grouping import Group
from tf_fusedrec.tables import Lookup, TfraTable


class Context(NamedTuple):
    """What a forward pass leaves for its backward pass."""

    route: exchange.Route
    handles: tf.Tensor  # <int32>[V], row of the v-th received id among the rows found
    found: Lookup
    ticket: tf.Tensor  # <int64>[], number of updates that the table had seen


class GroupLookup:
    """Rows of one group of tables: where ids, exchange and table meet. `gradient_scale` multiplies every gradient."""

    def __init__(self, layer_name: str, group: Group, table: TfraTable, gradient_scale: float):
        self.group = group
        self.table = table
        self._layer_name = layer_name
        self._gradient_scale = gradient_scale
        self._segment_of = {f.name: s for f, s in zip(group.features, group.segments)}
        # Counts updates: a gradient whose forward pass is older than the last update would overwrite it with old rows.
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{layer_name}/{group.name}/updates")

    def lookup(self, features: Sequence[FlatFeature], *, call: int) -> tuple[tf.Tensor, tf.Tensor, Context]:
        """Brings the rows of features, which must be in the group's order.

        Args:
          features: of this group.
          call: number of this call in its graph, so that two calls do not share the names of their collectives.

        Returns:
          rows [N, D] of all features, feature_lengths <int64>[F], and the context for apply_gradients.
        """
        ticket = self._updates.read_value()
        fused = ops.fuse_ids(
            [feature.ids for feature in features],
            {f: feature.row_splits for f, feature in enumerate(features) if feature.row_splits is not None},
            segments=[self._segment_of[feature.config.name] for feature in features],
            num_segments=len(self.group.tables),
            feature_names=[feature.config.name for feature in features],
        )
        route = exchange.route_ids(
            ops.segment_unique(fused.ids, fused.segment_splits),
            name=f"{self._layer_name}.{self.group.name}.{call}",
            owner=self.table.owner,
            id_bits=self.table.id_bits,
            segment_names=self.table.names,
        )
        owned = ops.segment_unique(route.received.ids, route.received.segment_splits)
        handles = tf.gather(owned.inverse, route.received.position)
        found = self.table.lookup(owned.ids, owned.splits)
        arrived = exchange.bring_rows(route, ops.recover(found.rows, handles, pad=True))
        rows = ops.recover(arrived, route.index)
        return rows, fused.feature_lengths, Context(route, handles, found, ticket)

    def apply_gradients(self, context: Context, grads: tf.Tensor) -> None:
        """Takes gradients [N, D] of `lookup`'s rows to their owners and trains the table.

        Raises:
          InvalidArgumentError: the table was updated after the context's lookup (the layer was called twice in one
            training step, or one tape gave two gradients).
        """
        route, handles, found, ticket = context
        summed = ops.recover_grad(grads, route.index, route.num_unique, pad=True)
        arrived = exchange.return_gradients(route, summed)
        owned = ops.recover_grad(arrived, handles, tf.size(found.keys, out_type=tf.int64))
        once = tf.debugging.assert_equal(
            self._updates.read_value(),
            ticket,
            message=(
                f"FusedEmbedding {self._layer_name!r} was trained twice from lookups of the same step (group "
                f"{self.group.name}, tables {self.table.names}): the second update would overwrite the first with old "
                "rows. Look up all features of a step in one call, and take one gradient of one loss."
            ),
        )
        with tf.control_dependencies([once] if once is not None else []):
            self.table.apply_gradients(found, owned * tf.cast(self._gradient_scale, owned.dtype))
            self._updates.assign_add(1)


def gradient_scale(gradient_op: str) -> float:
    """Factor that turns sums over ranks into what `gradient_op` names: "sum" or "average" over ranks."""
    if gradient_op not in ("average", "sum"):
        raise ValueError(f"gradient_op must be 'average' or 'sum', got {gradient_op!r}.")
    return 1.0 / collectives.size() if gradient_op == "average" else 1.0
