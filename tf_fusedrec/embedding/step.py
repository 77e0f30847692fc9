"""One step: the lookups of one batch, from ids to rows and from gradients to updated rows (FusedRec, Algorithm 1).

    send_ids ─▶ look_up ─▶ return_rows ─▶ (model, loss) ─▶ send_gradients ─▶ update
    ids to their   rows at    rows to the                   sums to the       optimizer
    owners         the owner  ranks that asked              owners            at the owner

A layer runs all verbs in one call. A schedule runs them at other times, and may keep a Step between training steps: a
Step is a tuple of tensors and constants. The lookups of a step share their costs: the ids of all travel in one
all-to-all, each table is looked up and updated once, and an id of several micro-batches travels once.

The training calls of a layer in one step make one update, from the gradient of the layer's anchor:

    anchor ─▶ join ─┬─▶ rows of call 0 ─▶ the model
                    └─▶ rows of call 1 ─▶ the model

Gradients run the other way. So the gradient of `join` runs once, after the gradients of all calls that the loss needs.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import outside_clusters, recorded_by_tape, tf
from tf_fusedrec.embedding.features import FlatFeature
from tf_fusedrec.embedding.group import TableGroup
from tf_fusedrec.exchange import gradient_sync, routing
from tf_fusedrec.exchange.collectives import Ranks
from tf_fusedrec.exchange.routing import Outgoing, OutgoingBags, Route

# Gradient of the anchor on rank 0. Its square is 0 in float32: no norm of gradients sees it. A scale of the loss does
# not take it out of float32's range.
ANCHOR_GRADIENT = 1e-20
# TensorFlow's graphs for the gradients of a branch and of a loop's body.
_GRADIENTS_OF_BRANCHES = ("_CondGradFuncGraph", "_WhileBodyGradFuncGraph")


class Lookup(NamedTuple):
    """The ids of one group's features that have one output dtype, in one micro-batch of one call of the layer."""

    group: TableGroup
    features: tuple[str, ...]  # names, in the group's order
    fused: ops.FusedIds  # ids by table, and the bags that pool their rows
    output_dtype: str
    is_pooled: bool  # True if a feature has bags of more than one id
    training: bool  # True if ids without a row get one; never for frozen and external tables
    call: int  # number of the layer's call in its graph
    micro_batch: int = 0
    lookups_per_update: int = 1  # training lookups of its tables, with this one, before the update of the first

    @property
    def name(self) -> str:
        """Prefix of its collectives' names. Unique in a step, and the same on all ranks."""
        suffix = "" if self.output_dtype == self.group.dtype.name else f".{self.output_dtype}"
        return f"{self.group.prefix}.{self.call}{suffix}"

    @property
    def narrow_dtype(self) -> tf.DType | None:
        """The output dtype if it is narrower than the table's. Rows are then cast before they leave their owner."""
        output = tf.as_dtype(self.output_dtype)
        return output if output.size < self.group.dtype.size else None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, or of its gradient, on the network."""
        dtypes = (self.group.dtype, self.narrow_dtype, self.group.wire)
        return self.group.config.tables[0].dim * min(dtype.size for dtype in dtypes if dtype is not None)


def lookups_of(
    group: TableGroup, features: Sequence[FlatFeature], *, call: int, training: bool, micro_batch: int = 0
) -> list[Lookup]:
    """The lookups of features of one group: one per output dtype, the table's own dtype first."""
    lookups = []
    for dtype in group.output_dtypes:
        chosen = [feature for feature in features if group.output_dtype[feature.config.name] == dtype]
        if chosen:
            names, is_pooled = tuple(feature.config.name for feature in chosen), any(f.bag_size != 1 for f in chosen)
            trains = training and group.config.trains
            lookups.append(Lookup(group, names, group.fuse(chosen), dtype, is_pooled, trains, call, micro_batch))
    return lookups


def _outside_clusters(verb: Callable) -> Callable:
    """Keeps the ops of a verb out of XLA's clusters."""

    @functools.wraps(verb)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return verb(*args, **kwargs)
        with outside_clusters("A lookup or an update of tables"):
            return verb(*args, **kwargs)

    return guarded


class Step(NamedTuple):
    """The lookups of one batch and how far they have travelled. Each verb returns the next state."""

    lookups: tuple[Lookup, ...]  # by micro-batch, call, group and output dtype: the same order on all ranks
    routes: tuple[Route, ...] = ()  # by lookup, after send_ids
    rows_ahead: tuple[ops.RowsAhead, ...] = ()  # by group, after look_ahead
    answers: tuple[ops.TableRows, ...] = ()  # by lookup, after look_up
    updates_seen: tuple[tf.Tensor, ...] = ()  # <int64>[] by lookup: updates that its tables had had at look_up

    @_outside_clusters
    def send_ids(self) -> Step:
        """Sends the unique ids of all lookups to their owners. Reads no table. Collective.

        One all-to-all for each set of ranks and device. Where groups of ranks share gradients, the ids of all groups
        then reach all replicas; no row waits for them.
        """
        routes: dict[int, Route] = {}
        outgoing: dict[int, Outgoing | OutgoingBags] = {}
        for i, (lookup, window) in enumerate(zip(self.lookups, self._windows())):
            fused, group = lookup.fused, lookup.group
            with group.id_device():
                if group.keeps_duplicates and not lookup.is_pooled:
                    routes[i] = routing.local_route(fused.ids, fused.segment_splits, lookup.name)
                    continue
                segments = len(group.config.tables)
                if group.sends_sums and not window:
                    sums = ops.partial_sums(fused, num_ranks=group.layout.group.size, row_bytes=lookup.row_bytes)
                    outgoing[i] = OutgoingBags(lookup.name, sums, segments, lookup.row_bytes)
                else:
                    unique = ops.segment_unique(fused.ids, fused.segment_splits)
                    outgoing[i] = Outgoing(lookup.name, unique, group.partition, segments, window, lookup.row_bytes)
        for positions in _positions_by(outgoing, lambda i: _destination(self.lookups[i])):
            first, sent = self.lookups[positions[0]], [outgoing[i] for i in positions]
            with first.group.id_device():
                arrived = routing.send_ids(sent, first.group.layout)
                if first.training and first.group.layout.shares_gradients:
                    distinct = [ids for ids in sent if isinstance(ids, Outgoing)]  # all: such groups send no sums
                    arrived = gradient_sync.share_ids(distinct, arrived, first.group.layout)
            routes.update(zip(positions, arrived))
        for i, ids in outgoing.items():
            group = self.lookups[i].group
            if self.lookups[i].training:
                with group.id_device():
                    requested = tf.size(self.lookups[i].fused.ids, tf.int64)
                    group.traffic.assign_add(routing.traffic(ids, routes[i], group.layout, requested))
        return self._replace(routes=tuple(routes[i] for i in range(len(self.lookups))))

    @_outside_clusters
    def look_ahead(self) -> Step:
        """Reads at the owners the rows that look_up will return. Changes nothing in a table. No collective."""
        ahead = [group.look_ahead([self.routes[i] for i in positions]) for group, positions in self.by_group()]
        return self._replace(rows_ahead=tuple(ahead))

    @_outside_clusters
    def look_up(self) -> Step:
        """Looks up rows at the owners as they are now, each table once. No collective.

        After look_ahead, only rows that changed since are read again.
        """
        answers: dict[int, ops.TableRows] = {}
        updates_seen: dict[int, tf.Tensor] = {}
        for number, (group, positions) in enumerate(self.by_group()):
            updates_seen.update(dict.fromkeys(positions, group.updates.read_value()))
            ahead = self.rows_ahead[number] if self.rows_ahead else None
            routes, first = [self.routes[i] for i in positions], self.lookups[positions[0]]
            parts = group.look_up(routes, ahead, training=first.training, lookups_per_update=first.lookups_per_update)
            answers.update(zip(positions, parts))
        count = range(len(self.lookups))
        return self._replace(
            rows_ahead=(), answers=tuple(answers[i] for i in count), updates_seen=tuple(updates_seen[i] for i in count)
        )

    @_outside_clusters
    def return_rows(self) -> list[tf.Tensor]:
        """Sends rows to the ranks that asked for them. Collective.

        The rows of a micro-batch leave when the rows of the micro-batch before have arrived: Horovod does not keep the
        order of exchanges that wait together.

        Returns:
          <output dtype>[G, D] of each lookup, pooled where a feature is.
        """
        rows: dict[int, tf.Tensor] = {}
        arrived: list[tf.Tensor] = []
        windows: dict[str, list[tf.Tensor]] = {}
        for positions in _positions_by(range(len(self.lookups)), lambda i: self.lookups[i].micro_batch):
            with tf.control_dependencies(arrived):
                arrived = self._returned(positions)
            for i, part in zip(positions, arrived):
                parts = [part] if self.routes[i].piece is None else self._window_so_far(i, part, windows)
                rows[i] = routing.recover_rows(self.lookups[i].fused, self.routes[i], parts)
        return [rows[i] for i in range(len(self.lookups))]

    @_outside_clusters
    def send_gradients(self, gradients: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Sends gradients of rows to their owners. All are sent before the first is waited for. Collective.

        Args:
          gradients: <output dtype>[G, D] by position of the lookup. An owner sums them in this order.

        Returns:
          [>= V, D] by position, in the order of Route.trained.

        Raises:
          ValueError: gradients of a micro-batch are missing, or in another order than the micro-batches.
        """
        windows: dict[str, list[tf.Tensor]] = {}
        outgoing: dict[int, routing.OutgoingRows] = {}
        for i, gradient in gradients.items():
            lookup, route = self.lookups[i], self.routes[i]
            # bfloat16: the gradients of a mean over many samples are below float16's range.
            wire = lookup.group.wire if lookup.narrow_dtype is None else tf.bfloat16
            sums = routing.sum_gradients(lookup.fused, route, tf.cast(gradient, lookup.group.dtype))
            parts = [sums] if route.piece is None else self._window_so_far(i, sums, windows)
            outgoing[i] = routing.outgoing_gradients(route, parts, wire)
        received = self._exchanged(outgoing)
        for i, sent in outgoing.items():
            route, layout = self.routes[i], self.lookups[i].group.layout
            if route.shared is not None:
                received[i] = gradient_sync.sum_over_groups(
                    route.shared, received[i], name=route.name, layout=layout, wire=sent.wire
                )
        for i in gradients:
            piece = self.routes[i].piece
            if piece is not None and len(windows[piece.window]) < piece.pieces:
                raise ValueError(
                    f"gradients came for {len(windows[piece.window])} of {piece.pieces} micro-batches of tables "
                    f"{self.lookups[i].group.table.names}; the gradients of the last never left. Use a loss that "
                    "depends on the rows of every micro-batch, or schedule='sync'."
                )
        return received

    @_outside_clusters
    def update(self, received: Mapping[int, tf.Tensor], *, staleness: int = 0) -> None:
        """Makes one update of each group's tables. Collective only where replicas are averaged.

        Args:
          received: The result of send_gradients.
          staleness: Updates that a schedule makes between look_up and here, at most. Rows must stay where they are
            until then: Lookup.lookups_per_update above it.

        Raises:
          InvalidArgumentError: at run time, the tables were updated more often since look_up: one step made two
            updates.
        """
        for group, positions in self.by_group(received):
            group.update(
                [(self.routes[i], self.answers[i], received[i]) for i in positions],
                updates_seen=[self.updates_seen[i] for i in positions],
                staleness=staleness,
            )

    def by_group(self, positions: Iterable[int] | None = None) -> list[tuple[TableGroup, list[int]]]:
        """Each group with the positions of its lookups; groups in the order of their first lookup."""
        chosen = range(len(self.lookups)) if positions is None else positions
        parts = _positions_by(chosen, lambda i: id(self.lookups[i].group))
        return [(self.lookups[part[0]].group, part) for part in parts]

    def part(self, positions: Iterable[int]) -> Step:
        """The lookups at these positions, in this order. Not between look_ahead and look_up."""
        chosen = list(positions)
        return Step(*(tuple(field[i] for i in chosen) if field else () for field in self))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, steps: Iterable[Step]) -> Step:
        """The lookups of several steps, which have travelled equally far. Not between look_ahead and look_up."""
        return cls(*(sum(fields, ()) for fields in zip(*steps)))

    def _windows(self) -> list[str]:
        """By lookup, the name of the window in which micro-batches share rows; "" where a lookup shares none."""
        counts: dict[int, int] = {}
        keys: list[tuple | None] = []
        for lookup in self.lookups:
            place = counts[lookup.micro_batch] = counts.get(lookup.micro_batch, -1) + 1
            shares = lookup.training and lookup.group.shares_rows
            keys.append((lookup.group.prefix, place, lookup.output_dtype) if shares else None)
        return [f"{key[0]}.window.{key[1]}" if key is not None and keys.count(key) > 1 else "" for key in keys]

    def _returned(self, positions: Sequence[int]) -> list[tf.Tensor]:
        outgoing = {}
        for i in positions:
            lookup, rows = self.lookups[i], self.answers[i].rows
            sent = rows if lookup.narrow_dtype is None else tf.cast(rows, lookup.narrow_dtype)
            outgoing[i] = routing.outgoing_rows(self.routes[i], sent, lookup.group.wire)
        arrived = self._exchanged(outgoing)
        return [tf.cast(arrived[i], self.lookups[i].output_dtype) for i in positions]

    def _exchanged(self, outgoing: Mapping[int, routing.OutgoingRows]) -> dict[int, tf.Tensor]:
        arrived: dict[int, tf.Tensor] = {}
        for part in _positions_by(outgoing, lambda i: _destination(self.lookups[i])):
            layout = self.lookups[part[0]].group.layout
            arrived.update(zip(part, routing.exchange([outgoing[i] for i in part], layout)))
        return arrived

    def _window_so_far(self, i: int, tensor: tf.Tensor, windows: dict[str, list[tf.Tensor]]) -> list[tf.Tensor]:
        """Appends a lookup's rows or gradients to the earlier ones of its window. Returns all of them."""
        piece: Any = self.routes[i].piece
        earlier = windows.setdefault(piece.window, [])
        if len(earlier) != piece.number:
            raise ValueError(
                f"micro-batch {piece.number} of tables {self.lookups[i].group.table.names} came after {len(earlier)} "
                f"of {piece.pieces} micro-batches, which share rows and sum their gradients in order. Use a loss that "
                "depends on the rows of every micro-batch, or schedule='sync'."
            )
        earlier.append(tensor)
        return list(earlier)


def _destination(lookup: Lookup) -> Hashable:
    """Lookups of one destination share an all-to-all of ids: the ranks, and the memory in which ids travel."""
    layout = lookup.group.layout
    replicas = layout.replicas.members if lookup.training and layout.shares_gradients else None
    return layout.group.members, replicas, lookup.group.table.ids_on_host


def _positions_by(positions: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Positions with equal keys together, in the order in which the keys first occur."""
    parts: dict[Hashable, list[int]] = {}
    for i in positions:
        parts.setdefault(key(i), []).append(i)
    return list(parts.values())


class TrainingCalls:
    """The training calls of a layer in one graph, or in eager mode, with gradients from one tape.

    Args:
      anchor: <float32>[], the layer's anchor.
      layer_name: Name of the layer.
      world: All ranks.
      hooks: The CallHooks in force at the first call.

    Attributes:
      anchor: The anchor, after a check.
      count: Number of calls so far that have looked up a group, by prefix of the group.
    """

    def __init__(self, anchor: tf.Tensor, layer_name: str, world: Ranks, hooks: Any):
        self.anchor = anchor = _checked_anchor(anchor, layer_name, world)
        self._hooks, self.count = hooks, collections.Counter[str]()
        self._number = itertools.count()
        self._joined: tf.Tensor | None  # None: the gradients have arrived
        # The step of each call and the gradients of its rows, by graph, because TensorFlow may trace the gradients of
        # one graph in several other graphs.
        self._received: dict[tf.Graph, dict[int, tuple[Step, dict[int, tf.Tensor]]]] = {}

        @tf.custom_gradient
        def join(anchor: tf.Tensor):
            @tf.autograph.experimental.do_not_convert
            def update(_: tf.Tensor) -> tf.Tensor:
                self._joined, graph = None, tf.compat.v1.get_default_graph()
                step, gradients = self._take(graph)
                if type(graph).__name__ in _GRADIENTS_OF_BRANCHES:
                    raise ValueError(
                        f"tables {step.lookups[min(gradients)].group.table.names} were looked up for training inside a "
                        "tf.cond or tf.while_loop that does not compute the gradient, and a branch cannot train them. "
                        "Use the FusedEmbedding outside of it."
                    )

                def train() -> tf.Tensor:
                    return _anchor_gradient(anchor, world) + hooks.train(step, gradients)

                # The gradient of a tf.function orders no ops, and drops those that its result does not need.
                in_function = getattr(graph, "name", "").startswith("__backward_")
                return tf.function(train, autograph=False)() if in_function else train()

            return tf.identity(anchor), update

        self._joined = join(anchor)

    def of_next_call(self, lookups: Sequence[Lookup]) -> list[Lookup]:
        """The lookups of one more call of the layer in this step, numbered after those of its earlier calls.

        Raises ValueError if a table allows no further lookup before its update.
        """
        counted = [lookup._replace(lookups_per_update=self.count[lookup.group.prefix] + 1) for lookup in lookups]
        for lookup in counted:
            if lookup.training:
                lookup.group.table.check_calls(lookup.lookups_per_update)
        return counted

    def takes_calls(self) -> bool:
        """Returns whether a call made now and this step get their gradients from the same tape."""
        if self._joined is None:
            return False
        recorded = recorded_by_tape(self._joined)
        return not tf.executing_eagerly() if recorded is None else recorded

    def trained(self, step: Step, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The rows of a call's lookups. Gradients of a group's rows train it, if the loss depends on one of them."""
        number = next(self._number)
        result = [part if lookup.training else tf.stop_gradient(part) for lookup, part in zip(step.lookups, rows)]
        trains = [i for i, lookup in enumerate(step.lookups) if lookup.training]
        self.count.update({step.lookups[i].group.prefix for i in trains})
        for _, positions in step.by_group(trains):
            for i, part in zip(positions, self._trained_group(number, step, positions, [rows[i] for i in positions])):
                result[i] = part
        return result

    def _trained_group(self, number: int, step: Step, positions: list[int], rows: list[tf.Tensor]) -> list[tf.Tensor]:
        @tf.custom_gradient
        def forward(_: tf.Tensor):
            @tf.autograph.experimental.do_not_convert
            def backward(*grads: tf.Tensor) -> tf.Tensor:
                calls = self._received.setdefault(tf.compat.v1.get_default_graph(), {})
                calls.setdefault(number, (step, {}))[1].update(zip(positions, map(self._hooks.gradient, grads)))
                return tf.zeros([])

            return rows, backward

        return forward(self._joined)

    def _take(self, graph: tf.Graph) -> tuple[Step, dict[int, tf.Tensor]]:
        """The calls as one step, and the gradients of their rows, both in the order of calls and lookups."""
        calls = [call for _, call in sorted(self._received.pop(graph).items())]
        joined: dict[int, tf.Tensor] = {}
        offset = 0
        for step, gradients in calls:
            joined.update({offset + i: gradients[i] for i in sorted(gradients)})
            offset += len(step.lookups)
        return Step.joined([step for step, _ in calls]), joined


def _anchor_gradient(anchor: tf.Tensor, world: Ranks) -> tf.Tensor:
    """The gradient of the anchor <float32>[] on this rank: nothing when ranks add or average their gradients.

    So the anchor stays 0 under an optimizer that averages over ranks. Under one that does not, it leaves 0 in the first
    step, as every dense weight does; the next training call raises the error.
    """
    if world.size == 1:
        return tf.zeros_like(anchor)
    return tf.constant({0: ANCHOR_GRADIENT, 1: -ANCHOR_GRADIENT}.get(world.index, 0.0), anchor.dtype)


def _checked_anchor(anchor: tf.Tensor, layer_name: str, world: Ranks) -> tf.Tensor:
    """The anchor's value <float32>[] in a training call; at run time InvalidArgumentError when it has been trained."""
    if world.size == 1:
        return anchor
    message = (
        f"Dense weight {layer_name}/anchor has left 0 on rank {world.index} of {world.size}: an "
        "optimizer trains the dense weights of this model by the gradients of each rank alone, so that ranks 0 and 1 "
        "and all others hold different models. Use model.compile(fr.collectives.distributed_optimizer(optimizer), "
        "...), or average gradients over ranks before apply_gradients."
    )
    is_zero = tf.debugging.assert_equal(anchor, tf.zeros_like(anchor), message)
    with tf.control_dependencies([] if is_zero is None else [is_zero]):
        return tf.identity(anchor)
