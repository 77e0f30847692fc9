"""The way of one group's ids through all stages, forward and backward: Algorithm 1 of FusedRec (paper, section 3).

    fuse_ids ─▶ segment_unique ─▶ rank_partition ─▶ [all-to-all of ids] ─▶ table: key, dedup, find or insert
    outputs  ◀─ recover, pool  ◀───────────────────  [all-to-all of rows] ◀─┘

The backward pass is the mirror: recover_grad, [all-to-all of gradients], then the table sums over sources and trains.
One process whose features are not pooled runs the table alone, which finds duplicates by itself. Removing them first
would save bytes on a network that is not there, and cost two more passes over the rows.

Where groups of ranks share gradients (exchange/gradient_sync.py), the table answers rows for the ids of the own group.
The ids of all groups change it, and the sums of their gradients train it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import FeatureConfig
from tf_fusedrec.embedding.features import FlatFeature, placing_ids
from tf_fusedrec.embedding.groups import Group
from tf_fusedrec.embedding.left_out import LeftOut
from tf_fusedrec.embedding.replicas import Replica
from tf_fusedrec.embedding.routed_ids import Context, LookupRequest, Outgoing, RoutedIds
from tf_fusedrec.embedding.table_message import join_sources, of_trained_ids, split_answer
from tf_fusedrec.exchange import gradient_sync, routing
from tf_fusedrec.exchange.routing import sums_to_send
from tf_fusedrec.exchange.topology import RankLayout
from tf_fusedrec.tables import Answer, Table


class GroupLookup:
    """Rows of one group of tables: where ids, exchange and table meet. lookup.py calls its methods in their order.

    Args:
      layer_name: Name of the FusedEmbedding.
      group: The group of tables.
      table: The backend that holds their rows.
      gradient_scale: Factor of every gradient.
      layout: The position of this process among the ranks.
      wire: Type that longer rows and gradients travel as; None for their own.
      replica: Set where groups of ranks train apart and average.
    """

    def __init__(
        self,
        layer_name: str,
        group: Group,
        table: Table,
        gradient_scale: float,
        layout: RankLayout,
        wire: tf.DType | None,
        replica: Replica | None,
    ):
        self.group = group
        self.layout = layout
        self.table = table
        self._wire = wire
        self._replica = replica
        self._layer_name = layer_name
        self._gradient_scale = gradient_scale
        self._dtype = tf.as_dtype(group.tables[0].dtype)
        self._segment_of = {f.name: s for f, s in zip(group.features, group.segments)}
        self._left_out = self._make_left_out()
        # A gradient whose lookup is older than the last update would overwrite it with old rows.
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{layer_name}/{group.name}/updates")
        # <int64>[3] of training lookups that leave their rank: requested ids, sent ids, bytes of ids, rows and
        # gradients to other ranks.
        self.traffic = tf.Variable(
            [0, 0, 0], dtype=tf.int64, trainable=False, name=f"{layer_name}/{group.name}/traffic"
        )

    def requests(self, features: Sequence[FlatFeature], call: int, *, training: bool) -> list[LookupRequest]:
        """The lookups of features of this group: one per output dtype, the table's own dtype first."""
        trains = training and self.group.trains
        parts = {dtype: [f for f in features if self._output_dtype(f.config) == dtype] for dtype in self.output_dtypes}
        return [LookupRequest(self, dtype, part, call, trains) for dtype, part in parts.items() if part]

    @property
    def output_dtypes(self) -> list[str]:
        """The output dtypes of the group's features, the table's own dtype first."""
        own = self._dtype.name
        return sorted({self._output_dtype(feature) for feature in self.group.features}, key=lambda d: (d != own, d))

    def _output_dtype(self, feature: FeatureConfig) -> str:
        return feature.output_dtype or self._dtype.name

    def prepare(self, request: LookupRequest, window: int | None) -> Outgoing:
        """Fuses the ids of a request and removes duplicates from those that must travel.

        Args:
          request: The lookup.
          window: Number of the window that shares rows, in its step; None where the lookup shares none.
        """
        fused = self._fuse(request.features)
        if self._stay_here(request.features):
            return Outgoing(fused, None)
        dtype = "" if request.output_dtype == self._dtype.name else f".{request.output_dtype}"
        outgoing = self._outgoing(fused, f"{request.call}{dtype}")
        if window is not None:
            outgoing = outgoing._replace(window=f"{self._layer_name}.{self.group.name}.window.{window}")
        return Outgoing(fused, outgoing)

    @property
    def shares_rows(self) -> bool:
        """True if the micro-batches of a batch share rows. It would save nothing where nothing travels."""
        return self.layout.group.size > 1 or self.layout.shares_gradients

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

    def _stay_here(self, features: Sequence[FlatFeature]) -> bool:
        """Returns whether ids, rows and gradients need not travel, and duplicates may stay."""
        unpooled = all(feature.bag_size == 1 for feature in features)
        return not self.shares_rows and unpooled and self.table.takes_duplicates

    def _outgoing(self, fused: ops.FusedIds, number: str) -> routing.OutgoingIds:
        return routing.OutgoingIds(
            ops.segment_unique(fused.ids, fused.segment_splits),
            name=f"{self._layer_name}.{self.group.name}.{number}",
            owner=self.table.owner,
            id_bits=self.table.id_bits,
            segment_names=self.table.names,
        )

    def routed(
        self,
        request: LookupRequest,
        fused: ops.FusedIds,
        route: routing.Route | None,
        shared: gradient_sync.SharedIds | None,
    ) -> RoutedIds:
        """The routed ids of a request; `route` is None where they stay on this rank. Counts what a step sends."""
        if route is None:
            message = routing.own_message(fused.ids, fused.segment_splits)
        else:
            message = route.message, route.message_splits
            if request.training:
                self._count_traffic(fused, route, shared, tf.as_dtype(request.output_dtype))
        return RoutedIds(self, fused, route, shared, *message, request.output_dtype, request.training)

    def _count_traffic(
        self,
        fused: ops.FusedIds,
        route: routing.Route,
        shared: gradient_sync.SharedIds | None,
        output_dtype: tf.DType,
    ) -> None:
        narrowest = [self._dtype, output_dtype, *([] if self._wire is None else [self._wire])]
        row_bytes, segments = self.group.tables[0].dim * min(dtype.size for dtype in narrowest), len(self.group.tables)
        total = routing.bytes_sent(route, self.layout, segments, row_bytes)
        if shared is not None:
            total += gradient_sync.bytes_sent(shared, self.layout, segments, row_bytes)
        sent = tf.reduce_sum(tf.cast(route.id_splits, tf.int64))
        self.traffic.assign_add(tf.stack([tf.size(fused.ids, tf.int64), sent, total]))

    def look_ahead(self, routed: Sequence[RoutedIds]) -> ops.RowsAhead:
        """Reads at the owner the rows that `fetch` will want. No collective."""
        if self.table.can_prefetch and routed[0].shared is not None:
            with placing_ids([self.table]):
                trained = join_sources([one.trained for one in routed])
            self.table.prefetch(*trained)
        with placing_ids([self.table]):
            message = join_sources([one.asked for one in routed])
        return self.table.look_ahead(*message)

    def fetch(self, routed: Sequence[RoutedIds], rows_ahead: ops.RowsAhead | None) -> list[Context]:
        """Looks up at the owner, as one lookup of the table (table_message.py). No collective.

        Args:
          routed: The lookups of one step: micro-batches, output dtypes, calls.
          rows_ahead: The result of `look_ahead` for the same lookups, or None.
        """
        updates_seen = self._updates.read_value()
        parts = [one.asked for one in routed]
        with placing_ids([self.table]):
            message, splits = join_sources(parts)
        trained = None
        answer: Answer
        if routed[0].shared is not None:
            trained = [one.trained for one in routed]
            answer = self.table.lookup_shared(message, splits, join_sources(trained), rows_ahead)
        elif rows_ahead is None:
            answer = self.table.lookup(message, splits, training=routed[0].training)
        else:
            answer = self.table.refresh(message, splits, rows_ahead)
        answers = split_answer(answer, parts, len(self.group.tables), trained)
        if trained is None:
            answers = of_trained_ids(answers, [one.piece for one in routed])
        return [Context(one, part, updates_seen) for one, part in zip(routed, answers)]

    def bring(self, context: Context) -> tf.Tensor:
        """Sends rows to the ranks that asked for them: [U, D] of new ids; [>= N, D] where ids stay on this rank."""
        route, rows, output = context.routed.route, context.answer.rows, context.routed.output_dtype
        if route is None:
            return tf.cast(rows, output)
        narrowed = tf.cast(rows, output) if self._narrows(context) else rows
        return tf.cast(routing.bring_rows(route, narrowed, self.layout, self._wire), output)

    def recover(self, context: Context, arrived: Sequence[tf.Tensor]) -> tf.Tensor:
        """Rows of all features: [G, D], pooled where a feature is.

        Args:
          context: The context of the lookup.
          arrived: The result of `bring` for it, behind the results of the pieces before where it is a piece of a
            window.
        """
        fused, route = context.routed.fused, context.routed.route
        if route is None:
            return arrived[0][: tf.size(fused.ids)]
        bags = (fused.bag_splits, fused.bag_scale)
        if route.piece is None:
            return ops.pooled_recover(arrived[0], route.index, *bags)
        return ops.pooled_recover_parts(arrived, route.index, *bags)

    def _narrows(self, context: Context) -> bool:
        return tf.as_dtype(context.routed.output_dtype).size < self._dtype.size

    def prefetch(self, features: Sequence[FlatFeature], *, call: int) -> None:
        """Tells the owners of ids which rows a coming lookup will want. Collective where the table can prefetch."""
        if self.table.can_prefetch:
            with placing_ids([self.table]):
                outgoing = self._outgoing(self._fuse(features), f"{call}.prefetch")
                route = routing.route_ids([outgoing], self.layout)[0]
                wanted: routing.Route | gradient_sync.SharedIds = route
                if self.layout.shares_gradients:
                    wanted = gradient_sync.share_ids([outgoing], [route], self.layout)[0]
            self.table.prefetch(wanted.message, wanted.message_splits)

    def sum_gradients(self, context: Context, grads: tf.Tensor) -> tf.Tensor:
        """Sums the gradients of rows [G, D] by unique id: [>= U, D]; [N, D] where ids stay on this rank."""
        fused, route = context.routed.fused, context.routed.route
        grads = tf.cast(grads, self._dtype)
        if route is None:
            return grads
        bags = (fused.bag_splits, fused.bag_scale)
        if route.piece is None:
            return ops.pooled_recover_grad(grads, route.index, *bags, route.num_unique, pad=True)
        return ops.pooled_recover_grad(grads, route.piece.index, *bags, route.num_unique)

    def return_gradients(self, context: Context, sums: Sequence[tf.Tensor]) -> tf.Tensor:
        """Sends gradients to the owners.

        Args:
          context: The context of the lookup.
          sums: The result of `sum_gradients` for it, behind the results of the pieces before where it is a piece of a
            window.

        Returns:
          [>= V, D] of the rows that they train, in the order of RoutedIds.trained.
        """
        route, shared = context.routed.route, context.routed.shared
        if route is None:
            return sums[0]
        summed = sums[0] if route.piece is None else sums_to_send(route.piece, sums)
        # bfloat16: the gradients of a mean over many samples are below float16's range.
        wire = tf.bfloat16 if self._narrows(context) else self._wire
        received = routing.return_gradients(route, summed, self.layout, wire)
        if shared is None:
            return received
        return gradient_sync.sum_over_groups(shared, received, name=route.name, layout=self.layout, wire=wire)

    def update(self, parts: Sequence[tuple[Context, tf.Tensor]], *, staleness: int) -> None:
        """One update of the table at the owner. Collective only where replicas are averaged.

        Args:
          parts: The context of each lookup, and its gradients as `return_gradients` gives them.
          staleness: See lookup.apply_gradients.
        """
        checks = [check for context, _ in parts for check in self._not_updated_since(context, staleness)]
        gradients = [grads for _, grads in parts]
        answers = [(context.answer, grads) for context, grads in parts]
        begun = self._replica.begin() if self._replica is not None else None
        left_out = self.table.apply_gradients(answers, self._gradient_scale, checks)
        # Counters wait for all gradients, so that a step that finds no more data counts nothing.
        with tf.control_dependencies([*checks, *gradients]):
            if left_out is not None:
                for (context, grads), numbers, inverse in zip(parts, left_out.numbers, left_out.inverses):
                    self._left_out.note(*context.routed.trained, inverse, grads, numbers, left_out.update)
            self._updates.assign_add(1)
            if self._replica is not None:
                self._replica.note_update([one.routed.asked for one, _ in parts], begun)

    def _make_left_out(self) -> LeftOut:
        names = {
            table: [f.name for f, segment in zip(self.group.features, self.group.segments) if segment == s]
            for s, table in enumerate(self.table.names)
        }
        ranks = [f"rank {r}" for r in self.layout.group.members]
        sums = ["the sum over groups"] * self.layout.replicas.size
        return LeftOut(self.table.left_out, names, sums if self.layout.shares_gradients else ranks)

    def synchronize(self) -> None:
        """Makes replicas equal where they train apart. Collective there."""
        if self._replica is not None:
            self._replica.average()

    def _not_updated_since(self, context: Context, staleness: int) -> list[tf.Operation]:
        once = tf.debugging.assert_less_equal(
            self._updates.read_value(),
            context.updates_seen + staleness,
            message=(
                f"FusedEmbedding {self._layer_name!r} was trained twice from lookups of the same step (group "
                f"{self.group.name}, tables {self.table.names}): the second update would overwrite the first with old "
                "rows. Take one gradient of one loss. A call inside a tf.function of its own, a tf.cond or a "
                "tf.while_loop makes its own update: make all calls of a step outside of them."
            ),
        )
        return [once] if once is not None else []
