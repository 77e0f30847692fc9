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

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding import replicas
from tf_fusedrec.embedding.features import FlatFeature
from tf_fusedrec.embedding.groups import Group
from tf_fusedrec.embedding.left_out import LeftOut
from tf_fusedrec.embedding.one_lookup import joined, parted
from tf_fusedrec.exchange import all_to_all
from tf_fusedrec.exchange.topology import Place
from tf_fusedrec.tables import ExternalTable, NativeTable, TfraTable

Table = Union[NativeTable, TfraTable, ExternalTable]


class Routed(NamedTuple):
    """Ids of one lookup where their owners are, and the way back."""

    fused: ops.FusedIds
    route: all_to_all.Route | None  # None: ids, rows and gradients stay where they are
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
        self.place = place
        self._wire = wire
        self.table = table
        self._layer_name = layer_name
        self._gradient_scale = gradient_scale
        self._dtype = tf.as_dtype(group.tables[0].dtype)
        self._segment_of = {f.name: s for f, s in zip(group.features, group.segments)}
        self._left_out = self._make_left_out()
        # Counts updates: a gradient whose forward pass is older than the last update would overwrite it with old rows.
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{layer_name}/{group.name}/updates")
        # <int64>[3], of training lookups that leave their rank: ids that features asked for, ids that were sent, bytes
        # of ids, rows and gradients to other ranks.
        self.traffic = tf.Variable(
            [0, 0, 0], dtype=tf.int64, trainable=False, name=f"{layer_name}/{group.name}/traffic"
        )

    def lanes(self, features: Sequence[FlatFeature]) -> list[tuple[str, list[FlatFeature]]]:
        """Features whose rows travel together, and the name of their output dtype; the table's own dtype first."""
        parts: dict[str, list[FlatFeature]] = {}
        for feature in features:
            parts.setdefault(feature.config.output_dtype or self._dtype.name, []).append(feature)
        return sorted(parts.items(), key=lambda part: (part[0] != self._dtype.name, part[0]))

    def fuse(self, features: Sequence[FlatFeature]) -> ops.FusedIds:
        """Ids of features of one lane, in the group's order, side by side."""
        return ops.fuse_ids(
            [feature.ids for feature in features],
            {f: feature.row_splits for f, feature in enumerate(features) if feature.row_splits is not None},
            segments=[self._segment_of[feature.config.name] for feature in features],
            num_segments=len(self.group.tables),
            feature_names=[feature.config.name for feature in features],
            bag_sizes=[feature.bag_size for feature in features],
            combiners=[feature.config.combiner or "sum" for feature in features],
        )

    def stay_here(self, features: Sequence[FlatFeature]) -> bool:
        """Whether their ids, rows and gradients need not travel, and duplicates may stay."""
        unpooled = all(feature.bag_size == 1 for feature in features)
        alone = self.place.group.size == 1 and not self.place.shares_gradients
        return alone and unpooled and not isinstance(self.table, TfraTable)

    def leaving(self, fused: ops.FusedIds, lane: str, number: str) -> all_to_all.Leaving:
        """What all_to_all.route_ids sends of `fuse`: distinct ids. `number` is of the call, "0" or "0.prefetch"."""
        name = number if lane == self._dtype.name else f"{number}.{lane}"
        return all_to_all.Leaving(
            ops.segment_unique(fused.ids, fused.segment_splits),
            name=f"{self._layer_name}.{self.group.name}.{name}",
            owner=self.table.owner,
            id_bits=self.table.id_bits,
            segment_names=self.table.names,
        )

    def look_ahead(self, routed: Sequence[Routed]) -> ops.RowsAhead:
        """Between the stages, at the owner: reads ahead what `fetch` will want. No collective; native tables only."""
        assert isinstance(self.table, NativeTable)
        return self.table.look_ahead(*joined([(one.message, one.message_splits) for one in routed]))

    def fetch(self, routed: Sequence[Routed], *, training: bool, ahead: ops.RowsAhead | None = None) -> list[Context]:
        """Second stage, at the owner: rows of all lookups of one step, as they are now. No collective.

        The table makes one lookup of them: one tick of its clock, one count of each id (one_lookup.py).

        Args:
          routed: the step's lookups: micro-batches, lanes, calls.
          training: whether ids without a row get one.
          ahead: of `look_ahead` for the same lookups: only rows that have changed since are read.
        """
        ticket = self._updates.read_value()
        parts = [(one.message, one.message_splits) for one in routed]
        message, splits = joined(parts)
        if ahead is None:
            found = self.table.lookup(message, splits, training=training)
        else:
            assert isinstance(self.table, NativeTable)
            found = self.table.lookup(message, splits, training=training, ahead=ahead)
        answers = parted(found, parts, len(self.group.tables))
        return [Context(one, answer, ticket) for one, answer in zip(routed, answers)]

    def bring(self, context: Context) -> tf.Tensor:
        """Third stage: rows travel to who asked: [G, D] of all features, pooled where a feature is."""
        fused, route, rows = context.routed.fused, context.routed.route, context.found.rows
        output = tf.as_dtype(context.routed.output_dtype)
        if route is None:
            return tf.cast(rows[: tf.size(fused.ids)], output)
        narrowed = tf.cast(rows, output) if self._narrows(context) else rows
        arrived = all_to_all.bring_rows(route, narrowed, self.place, self._wire)
        return ops.pooled_recover(tf.cast(arrived, output), route.index, fused.bag_splits, fused.bag_scale)

    def _narrows(self, context: Context) -> bool:
        return tf.as_dtype(context.routed.output_dtype).size < self._dtype.size

    def prefetch(self, features: Sequence[FlatFeature], *, call: int) -> None:
        """Tells the owners of the ids of features which rows a coming lookup will want. Changes nothing.

        Only tables with a memory budget have rows to fetch; for others this is no collective either.
        """
        if isinstance(self.table, NativeTable) and self.group.tables[0].memory_budget:
            leaving = self.leaving(self.fuse(features), self._dtype.name, f"{call}.prefetch")
            route = all_to_all.route_ids([leaving], self.place, training=True)[0]
            self.table.prefetch(route.message, route.message_splits)

    def count_traffic(self, routed: Routed) -> None:
        """Adds what one training lookup sends to `traffic`, inside its group of ranks."""
        route = routed.route
        assert route is not None
        sent, received = (tf.cast(splits, tf.int64) for splits in (route.id_splits, route.received_splits))
        me = self.place.group.index
        sent_away, asked_of_me = tf.reduce_sum(sent) - sent[me], tf.reduce_sum(received) - received[me]
        narrowest = [self._dtype, tf.as_dtype(routed.output_dtype), *([] if self._wire is None else [self._wire])]
        row_bytes = self.group.tables[0].dim * min(dtype.size for dtype in narrowest)
        header_bytes = 8 * len(self.group.tables) * (self.place.group.size - 1)
        total = 8 * sent_away + header_bytes + (asked_of_me + sent_away) * row_bytes
        self.traffic.assign_add(tf.stack([tf.size(routed.fused.ids, tf.int64), tf.reduce_sum(sent), total]))

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
        return all_to_all.return_gradients(route, summed, self.place, wire)

    def apply_returned(self, parts: Sequence[tuple[Context, tf.Tensor]], *, staleness: int = 0) -> None:
        """Fifth stage, at the owner: one update of the table. No collective.

        Args:
          parts: of each lookup its context, of `fetch`, and gradients, of `return_gradients`, which are summed in this
            order. Several only for native tables.
          staleness: updates that the schedule makes between `fetch` and here, at most. Rows must stay where they are
            meanwhile: FusedEmbedding(lookups_per_update) above it.

        Raises:
          InvalidArgumentError: the table was updated more often after a context's fetch (the layer was called twice in
            one training step, or one tape gave two gradients).
        """
        checks = [check for context, _ in parts for check in self._not_updated_since(context, staleness)]
        # What counts waits for gradients: a step that finds no data any more counts nothing.
        with tf.control_dependencies([*checks, *[arrived for _, arrived in parts]]):
            found = [(context.found, arrived) for context, arrived in parts]
            if isinstance(self.table, NativeTable):
                update = self.table.optimizer.iterations.read_value() + 1
                left_out = self.table.apply_together(found, self._gradient_scale)
                self._tell_left_out(parts, left_out, update)
            else:
                self.table.apply_gradients(*found[0], self._gradient_scale)
            self._updates.assign_add(1)
            self._note_trained([context for context, _ in parts])

    def _make_left_out(self) -> LeftOut | None:
        if not isinstance(self.table, NativeTable):
            return None
        names = {
            table: [f.name for f, segment in zip(self.group.features, self.group.segments) if segment == s]
            for s, table in enumerate(self.table.names)
        }
        place = self.place
        groups = [f"group {g}" for g in range(place.replicas.size)]
        ranks = [f"rank {r}" for r in place.group.members]
        return LeftOut(self.table.left_out, names, groups if place.shares_gradients else ranks)

    def _tell_left_out(
        self, parts: Sequence[tuple[Context, tf.Tensor]], left_out: Sequence[tf.Tensor], update: tf.Tensor
    ) -> None:
        assert self._left_out is not None
        for (context, arrived), numbers in zip(parts, left_out):
            asked = context.routed.message, context.routed.message_splits
            self._left_out.note(*asked, context.found.inverse, arrived, numbers, update)

    def _note_trained(self, contexts: Sequence[Context]) -> None:
        """After an update: what the other replicas must hear of it, and, every few updates, what they say."""
        if not self.place.averages:
            return
        assert isinstance(self.table, NativeTable)
        for context in contexts:
            self.table.note_trained(context.routed.message, context.routed.message_splits)
        every = self.place.topology.sync_every
        tf.cond(self.table.updates_make_a_multiple_of(every), self.synchronize, lambda: None)

    def synchronize(self) -> None:
        """Makes replicas equal that train apart, now; others are equal. Collective."""
        if self.place.averages:
            assert isinstance(self.table, NativeTable)
            replicas.average(self.table, self.place, name=f"{self._layer_name}.{self.group.name}.average")

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


def gradient_scale(gradient_op: str, ranks: int) -> float:
    """Factor that turns sums over `ranks` ranks into what `gradient_op` names: "sum" or "average" over them."""
    if gradient_op not in ("average", "sum"):
        raise ValueError(f"gradient_op must be 'average' or 'sum', got {gradient_op!r}.")
    return 1.0 / ranks if gradient_op == "average" else 1.0
