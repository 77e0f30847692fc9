"""The way of one group's ids through all stages, forward and backward: Algorithm 1 of FusedRec (paper, section 3).

    fuse_ids ─▶ segment_unique ─▶ rank_partition ─▶ [all2all ids] ─▶ table: key, dedup, find or insert
    outputs  ◀─ recover, pool  ◀───────────────────  [all2all rows] ◀─┘

The backward pass is the mirror: recover_grad, [all2all gradients], the table sums over sources and trains. One process
whose features are not pooled leaves out all but the table, which finds duplicates by itself: to take them out first
saves bytes on a network that is not there, and costs two more passes over the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union

from tf_fusedrec import exchange, ops, replicas
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.features import FlatFeature
from tf_fusedrec.grouping import Group
from tf_fusedrec.tables import ExternalTable, NativeTable, TfraTable
from tf_fusedrec.topology import Place

Table = Union[NativeTable, TfraTable, ExternalTable]


class Routed(NamedTuple):
    """Ids of one lookup where their owners are, and the way back."""

    fused: ops.FusedIds
    route: exchange.Route | None  # None: ids, rows and gradients stay where they are
    message: tf.Tensor  # <int64>[V + R * S], ids that this rank owns: blocks [counts[S] | ids] by source
    message_splits: tf.Tensor  # <int32>[R], entries of each block
    output_dtype: str  # name of the dtype of the rows that are brought


class Context(NamedTuple):
    """What a forward pass leaves for its backward pass. All leaves but names are tensors: it may wait for a step."""

    routed: Routed
    found: Any  # the table's: rows, and what its apply_gradients needs
    ticket: tf.Tensor  # <int64>[], number of updates that the table had seen


class GroupLookup:
    """Rows of one group of tables: where ids, exchange and table meet.

    Args:
      layer_name: of the FusedEmbedding.
      group: of tables.
      table: where their rows live.
      gradient_scale: multiplies every gradient.
      place: of this process among the ranks.
      wire: type that rows and gradients travel as; None for their own.
    """

    def __init__(
        self,
        layer_name: str,
        group: Group,
        table: Table,
        gradient_scale: float,
        place: Place,
        wire: tf.DType | None,
    ):
        self.group = group
        self._place = place
        self._wire = wire
        self.table = table
        self._layer_name = layer_name
        self._gradient_scale = gradient_scale
        self._dtype = tf.as_dtype(group.tables[0].dtype)
        self._segment_of = {f.name: s for f, s in zip(group.features, group.segments)}
        # Counts updates: a gradient whose forward pass is older than the last update would overwrite it with old rows.
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{layer_name}/{group.name}/updates")
        # <int64>[3], of training lookups that leave their rank: ids that features asked for, ids that were sent, bytes
        # of ids, rows and gradients to other ranks.
        self.traffic = tf.Variable(
            [0, 0, 0], dtype=tf.int64, trainable=False, name=f"{layer_name}/{group.name}/traffic"
        )

    def lookup(
        self, features: Sequence[FlatFeature], *, call: int, training: bool
    ) -> tuple[tf.Tensor, tf.Tensor, Context]:
        """Brings the rows of features, which must be in the group's order: `route`, `fetch` and `bring` in one.

        Args:
          features: of one lane of this group, see `lanes`.
          call: number of this call in its graph, so that two calls do not share the names of their collectives.
          training: whether ids without a row get one, where the tables are this model's own.

        Returns:
          rows [G, D] of all features, pooled where a feature is, their number by feature <int64>[F], and the context
          for apply_gradients.
        """
        context = self.fetch(self.route(features, call=call, training=training), training=training)
        return self.bring(context), context.routed.fused.feature_bags, context

    def route(self, features: Sequence[FlatFeature], *, call: int, training: bool = True) -> Routed:
        """First stage: ids travel to their owners. Reads no table. Args as those of `lookup`.

        Raises:
          ValueError: features of several lanes.
        """
        dtypes = [lane for lane, _ in self.lanes(features)]
        if len(dtypes) > 1:
            raise ValueError(
                f"features {[feature.config.name for feature in features]} have the output dtypes {dtypes}, which "
                "travel apart and cannot be looked up ahead. Give them one output_dtype, or take another schedule."
            )
        fused = self._fuse(features)
        if self._stays_here(features):
            return Routed(fused, None, *exchange.own_message(fused.ids, fused.segment_splits), dtypes[0])
        name = str(call) if dtypes[0] == self._dtype.name else f"{call}.{dtypes[0]}"
        route = self._route(fused, name, training)
        if training:
            self.traffic.assign_add(self._traffic_of(fused, route, dtypes[0]))
        return Routed(fused, route, route.message, route.message_splits, dtypes[0])

    def lanes(self, features: Sequence[FlatFeature]) -> list[tuple[str, list[FlatFeature]]]:
        """Features whose rows travel together, and the name of their output dtype; the table's own dtype first."""
        parts: dict[str, list[FlatFeature]] = {}
        for feature in features:
            parts.setdefault(feature.config.output_dtype or self._dtype.name, []).append(feature)
        return sorted(parts.items(), key=lambda part: (part[0] != self._dtype.name, part[0]))

    def look_ahead(self, routed: Routed) -> ops.RowsAhead:
        """Between the stages, at the owner: reads ahead what `fetch` will want. No collective; native tables only."""
        assert isinstance(self.table, NativeTable)
        return self.table.look_ahead(routed.message, routed.message_splits)

    def fetch(self, routed: Routed, *, training: bool, ahead: ops.RowsAhead | None = None) -> Context:
        """Second stage, at the owner: rows as they are now; with `ahead`, only what changed is read. No collective."""
        ticket = self._updates.read_value()
        if ahead is None:
            found = self.table.lookup(routed.message, routed.message_splits, training=training)
        else:
            assert isinstance(self.table, NativeTable)
            found = self.table.lookup(routed.message, routed.message_splits, training=training, ahead=ahead)
        return Context(routed, found, ticket)

    def bring(self, context: Context) -> tf.Tensor:
        """Third stage: rows travel to who asked: [G, D] of all features, pooled where a feature is."""
        fused, route, rows = context.routed.fused, context.routed.route, context.found.rows
        output = tf.as_dtype(context.routed.output_dtype)
        if route is None:
            return tf.cast(rows[: tf.size(fused.ids)], output)
        arrived = exchange.bring_rows(
            route, tf.cast(rows, output) if self._narrows(context) else rows, self._place, self._wire
        )
        return ops.pooled_recover(tf.cast(arrived, output), route.index, fused.bag_splits, fused.bag_scale)

    def _narrows(self, context: Context) -> bool:
        return tf.as_dtype(context.routed.output_dtype).size < self._dtype.size

    def prefetch(self, features: Sequence[FlatFeature], *, call: int) -> None:
        """Tells the owners of the ids of features which rows a coming lookup will want. Changes nothing.

        Only tables with a memory budget have rows to fetch; for others this is no collective either.
        """
        if isinstance(self.table, NativeTable) and self.group.tables[0].memory_budget:
            route = self._route(self._fuse(features), f"{call}.prefetch", training=True)
            self.table.prefetch(route.message, route.message_splits)

    def _stays_here(self, features: Sequence[FlatFeature]) -> bool:
        unpooled = all(feature.bag_size == 1 for feature in features)
        alone = self._place.group.size == 1 and not self._place.shares_gradients
        return alone and unpooled and not isinstance(self.table, TfraTable)

    def _fuse(self, features: Sequence[FlatFeature]) -> ops.FusedIds:
        return ops.fuse_ids(
            [feature.ids for feature in features],
            {f: feature.row_splits for f, feature in enumerate(features) if feature.row_splits is not None},
            segments=[self._segment_of[feature.config.name] for feature in features],
            num_segments=len(self.group.tables),
            feature_names=[feature.config.name for feature in features],
            bag_sizes=[feature.bag_size for feature in features],
            combiners=[feature.config.combiner or "sum" for feature in features],
        )

    def _route(self, fused: ops.FusedIds, name: str, training: bool) -> exchange.Route:
        """Brings ids to their owners; `name` is of the collective inside this group of tables."""
        return exchange.route_ids(
            ops.segment_unique(fused.ids, fused.segment_splits),
            name=f"{self._layer_name}.{self.group.name}.{name}",
            owner=self.table.owner,
            id_bits=self.table.id_bits,
            segment_names=self.table.names,
            place=self._place,
            training=training,
        )

    def _traffic_of(self, fused: ops.FusedIds, route: exchange.Route, output_dtype: str) -> tf.Tensor:
        """What one lookup adds to `traffic`; inside its group of ranks."""
        sent, received = (tf.cast(splits, tf.int64) for splits in (route.id_splits, route.received_splits))
        me = self._place.group.index
        sent_away, asked_of_me = tf.reduce_sum(sent) - sent[me], tf.reduce_sum(received) - received[me]
        narrowest = [self._dtype, tf.as_dtype(output_dtype), *([] if self._wire is None else [self._wire])]
        row_bytes = self.group.tables[0].dim * min(dtype.size for dtype in narrowest)
        header_bytes = 8 * len(self.group.tables) * (self._place.group.size - 1)
        total = 8 * sent_away + header_bytes + (asked_of_me + sent_away) * row_bytes
        return tf.stack([tf.size(fused.ids, tf.int64), tf.reduce_sum(sent), total])

    def apply_gradients(self, context: Context, grads: tf.Tensor) -> None:
        """Takes gradients [G, D] of `lookup`'s rows to their owners and trains the table: two stages in one.

        Raises:
          As `apply_returned`.
        """
        self.apply_returned(context, self.return_gradients(context, grads))

    def return_gradients(self, context: Context, grads: tf.Tensor) -> tf.Tensor:
        """Fourth stage: gradients of the rows that this rank owns, [>= V, D] in the order in which the ids arrived."""
        fused, route = context.routed.fused, context.routed.route
        grads = tf.cast(grads, self._dtype)
        if route is None:
            return grads
        bags = (fused.bag_splits, fused.bag_scale)
        summed = ops.pooled_recover_grad(grads, route.index, *bags, route.num_unique, pad=True)
        # bfloat16: gradients of a mean over many samples lie below float16.
        wire = tf.bfloat16 if self._narrows(context) else self._wire
        return exchange.return_gradients(route, summed, self._place, wire)

    def apply_returned(self, context: Context, arrived: tf.Tensor, *, staleness: int = 0) -> None:
        """Fifth stage, at the owner: trains the table. No collective.

        Args:
          context: of `fetch`.
          arrived: of `return_gradients`.
          staleness: updates that the schedule makes between `fetch` and here, at most. Rows must stay where they are
            meanwhile: FusedEmbedding(lookups_per_update) above it.

        Raises:
          InvalidArgumentError: the table was updated more often after the context's fetch (the layer was called twice
            in one training step, or one tape gave two gradients).
        """
        # What counts waits for gradients: a step that finds no data any more counts nothing.
        with tf.control_dependencies([*self._not_updated_since(context, staleness), arrived]):
            self.table.apply_gradients(context.found, arrived, self._gradient_scale)
            self._updates.assign_add(1)
            self._note_trained([context])

    def apply_together(self, parts: Sequence[tuple[Context, tf.Tensor]]) -> None:
        """As apply_gradients, for several lookups: one update, of the sum of their gradients. Native tables only."""
        assert isinstance(self.table, NativeTable)
        # All are sent before the first is waited for.
        arrived = [self.return_gradients(context, grads) for context, grads in parts]
        checks = [check for context, _ in parts for check in self._not_updated_since(context, 0)]
        with tf.control_dependencies([*checks, *arrived]):
            found = [context.found for context, _ in parts]
            self.table.apply_together(list(zip(found, arrived)), self._gradient_scale)
            self._updates.assign_add(1)
            self._note_trained([context for context, _ in parts])

    def _note_trained(self, contexts: Sequence[Context]) -> None:
        """After an update: what the other replicas must hear of it, and, every few updates, what they say."""
        if not self._place.averages:
            return
        assert isinstance(self.table, NativeTable)
        for context in contexts:
            self.table.note_trained(context.routed.message, context.routed.message_splits)
        every = self._place.topology.sync_every
        tf.cond(self.table.updates_make_a_multiple_of(every), self.synchronize, lambda: None)

    def synchronize(self) -> None:
        """Makes replicas equal that train apart, now; others are equal. Collective."""
        if self._place.averages:
            assert isinstance(self.table, NativeTable)
            replicas.average(self.table, self._place, name=f"{self._layer_name}.{self.group.name}.average")

    def _not_updated_since(self, context: Context, staleness: int) -> list[tf.Operation]:
        once = tf.debugging.assert_less_equal(
            self._updates.read_value(),
            context.ticket + staleness,
            message=(
                f"FusedEmbedding {self._layer_name!r} was trained twice from lookups of the same step (group "
                f"{self.group.name}, tables {self.table.names}): the second update would overwrite the first with old "
                "rows. Look up all features of a step in one call, and take one gradient of one loss."
            ),
        )
        return [once] if once is not None else []


class WaitingGradients(NamedTuple):
    """Gradients [G, D] of one lookup that wait for others of their update."""

    lookup: GroupLookup
    context: Context
    grads: tf.Tensor


def apply_waiting(waiting: Sequence[WaitingGradients]) -> None:
    """One update of every group that has waiting gradients, summed in the order given. Collective, native tables only.

    Raises:
      As GroupLookup.apply_gradients.
    """
    groups: dict[int, list[WaitingGradients]] = {}
    for part in waiting:
        groups.setdefault(id(part.lookup), []).append(part)
    for parts in groups.values():
        parts[0].lookup.apply_together([(part.context, part.grads) for part in parts])


def gradient_scale(gradient_op: str, ranks: int) -> float:
    """Factor that turns sums over `ranks` ranks into what `gradient_op` names: "sum" or "average" over them."""
    if gradient_op not in ("average", "sum"):
        raise ValueError(f"gradient_op must be 'average' or 'sum', got {gradient_op!r}.")
    return 1.0 / ranks if gradient_op == "average" else 1.0
