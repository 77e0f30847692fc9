"""Ids travel to their owners, rows come back, gradients go out again. Knows no table.

A lookup of a group costs two all-to-alls, of rows and of gradients. The ids of many lookups share one.
Lookups of one window share their rows, too.
The ops that make send buffers pad them to bucketed sizes; splits give the real sizes (custom_ops/common/bucket.h says
why).

All-to-alls run inside a group of ranks (topology.py). gradient_sync.py has the exchange among groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout

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
    arrived = collectives.all_to_all(*join_messages(sent), name=f"{name}.ids", ranks=layout.group)
    return split_messages(*arrived, segments)


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


# <int64>, a block for each rank, and the entries of each <int32>[R].
Message = tuple[tf.Tensor, tf.Tensor]


def join_messages(parts: Sequence[Message]) -> Message:
    """Joins several messages. Each rank's block holds its blocks of all messages, in their order.

    Args:
      parts: For each lookup <int64>[P_i], blocks of [counts[S_i] | ids] as ops.rank_partition makes them. Entries
        behind the last block are padding.

    Returns:
      <int64>[P], padded to a bucketed size, and the entries of each block <int32>[R].
    """
    if len(parts) == 1:
        return parts[0]
    return ops.join_messages(*zip(*parts))


def split_messages(message: tf.Tensor, splits: tf.Tensor, segments: Sequence[int]) -> list[Message]:
    """Splits a received message that `join_messages` made. Headers of counts give the length of each block.

    Args:
      message: <int64>, blocks of all sources, not padded.
      splits: <int32>[R], entries of each source's block.
      segments: S_i of each message.

    Returns:
      For each message <int64>[V_i + R * S_i], not padded, and the entries of each block <int32>[R].

    Raises:
      InvalidArgumentError: several messages, of which a header does not agree with its block.
    """
    if len(segments) == 1:
        return [(message, splits)]
    return list(zip(*ops.split_messages(message, splits, segments=segments)))


def all_to_each(tensor: tf.Tensor, *, name: str, ranks: collectives.Ranks) -> tuple[tf.Tensor, tf.Tensor]:
    """Gathers tensors, whose first dimensions may differ, on all of `ranks`, in rank order. Collective.

    An all-to-all of equal parts returns the lengths, and its padding does not travel. The padding of an all-gather
    would travel, and a copy as large as the copies here would cut it out again. Without padding, a tensor of another
    size in every step misses Horovod's response cache, and all ranks negotiate anew. It also needs a second collective
    for the lengths.

    Args:
      tensor: [n, ...].
      name: Name of the collective, see collectives.all_to_all.
      ranks: The R ranks that take part.

    Returns:
      The gathered tensor [sum of all n, ...] and each n, <int32>[R].
    """
    length = tf.shape(tensor)[0]
    if ranks.size == 1:
        return tensor, tf.reshape(length, [1])
    total = ranks.size * length
    padding = tf.zeros(tf.concat([[bucketed(total) - total], tf.shape(tensor)[1:]], axis=0), tensor.dtype)
    copies = tf.concat([*[tensor] * ranks.size, padding], axis=0)
    return collectives.all_to_all(copies, tf.fill([ranks.size], length), name=name, ranks=ranks)


def bucketed(n: tf.Tensor) -> tf.Tensor:
    """<int32>[] >= n, one of few sizes; see custom_ops/common/bucket.h."""
    quarters = tf.math.log(tf.cast(tf.maximum(n, 1024), tf.float64) / 1024) / tf.math.log(tf.constant(2.0, tf.float64))
    step = 256 * 2 ** tf.cast(tf.math.floor(quarters), tf.int32)
    return -(-tf.maximum(n, 1) // step) * step


class Piece(NamedTuple):
    """One piece of a window: what it reads and sends beside its new ids."""

    window: str  # name of the window, the same for all of its pieces
    number: int  # i
    pieces: int  # M
    index: tf.Tensor  # <int32>[N], number of the n-th id among the u distinct ids of the piece
    term_index: tf.Tensor  # <int32>[k], ids whose gradients are summed, by place in all pieces
    term_splits: tf.Tensor  # <int64>[e+1], bounds of each sum inside term_index
    gradient_splits: tf.Tensor  # <int32>[R], sums that leave with the piece for each owner
    trained: Message  # ids whose gradients come to this rank with the piece
    rows: tf.Tensor  # <int32>[E], place of these ids among the ids that the window asks this rank for
    marks_splits: tf.Tensor | None  # <int32>[R], entries of the marks for each owner; None but for the first piece


class Departure(NamedTuple):
    """The ids of a window before they travel."""

    inverse: list[tf.Tensor]  # <int32>[N] of each piece
    ranked: list[ops.RankedIds]  # the new ids of each piece
    route: ops.WindowRoute

    @property
    def messages(self) -> list[Message]:
        """The messages of the pieces, and the marks."""
        return [*((one.message, one.send_splits) for one in self.ranked), (self.route.marks, self.route.marks_splits)]

    def arrive(self, window: str, arrived: Sequence[Message], segments: int) -> list[Piece]:
        """Returns the pieces, from the messages that came to this rank.

        Args:
          window: Name of the window.
          arrived: The received messages, in the order of `messages`.
          segments: S.
        """
        *messages, (marks, marks_splits) = arrived
        new, splits = [entries for entries, _ in messages], [of_ranks for _, of_ranks in messages]
        come = ops.window_gradients(new, splits, marks, marks_splits, num_segments=segments)
        pieces = len(self.ranked)
        return [
            Piece(
                window, i, pieces, index, term_index, term_splits, gradient_splits, trained, rows,
                self.route.marks_splits if i == 0 else None,
            )
            for i, (index, term_index, term_splits, gradient_splits, trained, rows) in enumerate(
                zip(
                    self.inverse, self.route.term_index, self.route.term_splits, self.route.gradient_splits,
                    come.trained, come.rows,
                )
            )
        ]  # fmt: skip


def sums_to_send(piece: Piece, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The gradients that leave with a piece, each summed over pieces in their order.

    Args:
      piece: The piece.
      gradients: [u, D] of the distinct ids of each piece up to this one.

    Returns:
      [>= e, D], in the order of the owner's Piece.trained. Rows behind e are padding.
    """
    ones = tf.ones_like(piece.term_splits[1:], tf.float32)
    return ops.pooled_recover_parts(gradients, piece.term_index, piece.term_splits, ones, pad=True)
