"""Ids travel to their owners, rows come back, gradients go out again. Knows no table.

A lookup of a group costs two all-to-alls, of rows and of gradients. The ids of many lookups share one (messages.py).
Lookups of one window share their rows, too (window.py).
The ops that make send buffers pad them to bucketed sizes; splits give the real sizes (custom_ops/common/bucket.h says
why).

All-to-alls run inside a group of ranks (topology.py). gradient_sync.py has the exchange among groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives, messages
from tf_fusedrec.exchange.messages import Message
from tf_fusedrec.exchange.topology import RankLayout
from tf_fusedrec.exchange.window import Departure, Piece

# Arranges unique ids <int64>[U] with splits <int64>[S+1] for R owners, as ops.rank_partition does.
Partition = Callable[[tf.Tensor, tf.Tensor, int], ops.RankedIds]


class Route(NamedTuple):
    """How the ids of one lookup travelled: all that bring_rows and return_gradients need."""

    name: str  # prefix of the collectives' names, the same on all ranks
    # <int32>[N], row of the n-th id among the rows that come back: restore[inverse], composed. The rows of a window
    # belong to all pieces up to this one, one piece after another.
    index: tf.Tensor
    num_unique: tf.Tensor  # <int64>[], U
    id_splits: tf.Tensor  # <int32>[R], ids that this rank sent to each owner
    message: tf.Tensor  # <int64>[V + R * S], ids that the group asks this rank for, blocks [counts[S] | ids] by rank
    message_splits: tf.Tensor  # <int32>[R], entries of each block
    received_splits: tf.Tensor  # <int32>[R], ids received from each rank of the group
    piece: Piece | None  # None: the lookup shares no rows

    @property
    def gradient_splits(self) -> tf.Tensor:
        """<int32>[R], gradients that this rank sends to each owner."""
        return self.id_splits if self.piece is None else self.piece.gradient_splits

    @property
    def trained(self) -> Message:
        """The ids whose gradients come to this rank."""
        return (self.message, self.message_splits) if self.piece is None else self.piece.trained


class OutgoingIds(NamedTuple):
    """Distinct ids of one lookup of a group of tables, before they travel."""

    unique: ops.UniqueIds  # by segment
    name: str  # prefix of its collectives' names, the same on all ranks
    owner: str | Partition  # this field and the next two are arguments of ops.rank_partition, or it replaces the op
    id_bits: int
    segment_names: Sequence[str]
    window: str = ""  # lookups with the same name share their rows; "": the lookup shares none


def route_ids(outgoing: Sequence[OutgoingIds], layout: RankLayout) -> list[Route]:
    """Sends the unique ids of all lookups to their owners in one all-to-all.

    Args:
      outgoing: The ids of each lookup, in the same order on all ranks.
      layout: The position of this process among the ranks.

    Returns:
      The route of each lookup.
    """
    windows = _by_window(outgoing)
    departures = [_depart([outgoing[i] for i in numbers], layout.group.size) for numbers in windows]
    sent = [message for departure in departures for message in _messages(departure)]
    segments = [
        count
        for numbers, departure in zip(windows, departures)
        for count in [len(outgoing[numbers[0]].segment_names)] * len(numbers) + [1] * isinstance(departure, Departure)
    ]
    arrived = iter(_send(sent, segments, outgoing[0].name, layout))
    routes: dict[int, Route] = {}
    for numbers, departure in zip(windows, departures):
        come = [next(arrived) for _ in _messages(departure)]
        routes.update(zip(numbers, _arrive([outgoing[i] for i in numbers], departure, come)))
    return [routes[i] for i in range(len(outgoing))]


def _by_window(outgoing: Sequence[OutgoingIds]) -> list[list[int]]:
    """Numbers of the lookups of each window; a lookup that shares no rows is alone."""
    numbers: dict[Any, list[int]] = {}
    for i, one in enumerate(outgoing):
        numbers.setdefault(one.window or i, []).append(i)
    return list(numbers.values())


def _depart(pieces: Sequence[OutgoingIds], ranks: int) -> ops.RankedIds | Departure:
    if len(pieces) == 1:
        return partition(pieces[0], ranks)
    ids = ops.window_unique([one.unique for one in pieces])
    ranked = [partition(one._replace(unique=ops.UniqueIds(*new, None)), ranks) for one, new in zip(pieces, ids.new)]
    route = ops.window_route(ids, ranked, num_segments=len(pieces[0].segment_names))
    return Departure([one.unique.inverse for one in pieces], ranked, route)


def _messages(departure: ops.RankedIds | Departure) -> list[Message]:
    if isinstance(departure, Departure):
        return departure.messages
    return [(departure.message, departure.send_splits)]


def _arrive(
    pieces: Sequence[OutgoingIds], departure: ops.RankedIds | Departure, arrived: Sequence[Message]
) -> list[Route]:
    segments = len(pieces[0].segment_names)
    if isinstance(departure, Departure):
        of_window: Sequence[Piece | None] = departure.arrive(pieces[0].window, arrived, segments)
        ranked, rows = departure.ranked, departure.route.rows
    else:
        of_window, ranked, rows = [None], [departure], [departure.restore]
    return [
        Route(
            name=one.name,
            index=tf.gather(row, one.unique.inverse),
            num_unique=tf.size(row, out_type=tf.int64),
            id_splits=ids.id_splits,
            message=message,
            message_splits=splits,
            received_splits=splits - segments,
            piece=piece,
        )
        for one, ids, row, piece, (message, splits) in zip(pieces, ranked, rows, of_window, arrived)
    ]


def partition(outgoing: OutgoingIds, ranks: int) -> ops.RankedIds:
    """Arranges the unique ids of one lookup by their owners among `ranks` ranks."""
    ids, splits = outgoing.unique.ids, outgoing.unique.splits
    if callable(outgoing.owner):
        return outgoing.owner(ids, splits, ranks)
    names = outgoing.segment_names
    return ops.rank_partition(
        ids, splits, num_ranks=ranks, owner=outgoing.owner, id_bits=outgoing.id_bits, segment_names=names
    )


def _send(sent: Sequence[Message], segments: Sequence[int], name: str, layout: RankLayout) -> list[Message]:
    if layout.group.size == 1:
        return [(message[: splits[0]], splits) for message, splits in sent]
    arrived = collectives.all_to_all(*messages.join(sent), name=f"{name}.ids", ranks=layout.group)
    return messages.split(*arrived, segments)


def own_message(ids: tf.Tensor, segment_splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The message that a single process would receive from itself, duplicates included.

    Args:
      ids: <int64>[N], grouped by segment.
      segment_splits: <int64>[S+1].

    Returns:
      The message <int64>[S + N] and its splits <int32>[1], as in Route.
    """
    message = tf.concat([segment_splits[1:] - segment_splits[:-1], ids], axis=0)
    return message, tf.reshape(tf.size(message), [1])


def narrowed(tensor: tf.Tensor, wire: tf.DType | None) -> tf.Tensor:
    """Rows or gradients in the type they travel as: rounded to the nearest where that is shorter."""
    if wire is None or tensor.dtype.size <= wire.size:
        return tensor
    return tf.saturate_cast(tensor, wire)  # not infinite beyond float16's largest number


def bring_rows(route: Route, rows: tf.Tensor, layout: RankLayout, wire: tf.DType | None) -> tf.Tensor:
    """Sends rows from their owner to the ranks that asked. Collective.

    Args:
      route: The route of the ids.
      rows: [P, D], the table's answer to route.message; rows behind the last id are padding.
      layout: The position of this process among the ranks.
      wire: Type that longer numbers travel as; None for their own.

    Returns:
      [U, D] in the order that route.index refers to; of a window the rows of this piece.
    """
    sent = narrowed(rows, wire if layout.group.size > 1 else None)
    received, _ = collectives.all_to_all(sent, route.received_splits, name=f"{route.name}.rows", ranks=layout.group)
    return tf.cast(received, rows.dtype)


def return_gradients(route: Route, grads: tf.Tensor, layout: RankLayout, wire: tf.DType | None) -> tf.Tensor:
    """Sends gradients of rows to their owner: the mirror of bring_rows. Collective.

    Args:
      route: The route of the ids.
      grads: [>= U, D] in the order of bring_rows' result, of a window as window.sums_to_send gives them; rows behind
        the last one are padding.
      layout: The position of this process among the ranks.
      wire: As in bring_rows.

    Returns:
      [V, D], in the order of the ids in route.trained.
    """
    sent = narrowed(grads, wire if layout.group.size > 1 else None)
    received, _ = collectives.all_to_all(
        sent, route.gradient_splits, name=f"{route.name}.gradients", ranks=layout.group
    )
    return tf.cast(received, grads.dtype)


def bytes_sent(route: Route, layout: RankLayout, segments: int, row_bytes: int) -> tf.Tensor:
    """<int64>[]: the bytes that this rank sends to others of its group for one lookup: ids, headers, rows, gradients.

    Args:
      route: The route of the ids.
      layout: The position of this process among the ranks.
      segments: S, tables in a message.
      row_bytes: Bytes of a row, or of its gradient, on the network.
    """
    me, others = layout.group.index, layout.group.size - 1

    def away(splits: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.reduce_sum(splits) - splits[me], tf.int64)

    total = 8 * (away(route.id_splits) + others * segments)
    if route.piece is not None and route.piece.marks_splits is not None:
        total += 8 * away(route.piece.marks_splits)
    return total + (away(route.received_splits) + away(route.gradient_splits)) * row_bytes
