"""The exchange of a lookup: ids go to their owners, rows return, gradients go out. Knows no table.

    ids        of all lookups of a step in one all-to-all
    rows       one all-to-all for each lookup, or one for many
    gradients  the same

Without a shared all-to-all, ids of micro-batches would overtake each other, and rows of the first would wait for ids of
the last. Ops that make send buffers pad them to bucketed sizes; splits give the real sizes (custom_ops/common/bucket.h
says why). All-to-alls run inside a group of ranks (topology.py); gradient_sync.py has the exchange among replicas.

Micro-batches of one batch can share rows, because its tables do not change between them (a window):

    ids        all micro-batches in one all-to-all: the new ids of each, and marks with the last micro-batch of each id
    rows       with micro-batch i: ids that no earlier micro-batch has
    gradients  with micro-batch i: ids that no later micro-batch has, summed over micro-batches in their order

custom_ops/window_rows/window_rows.h defines the orders of rows and gradients, on which all ranks agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout

# <int64>, a block [counts[S] | ids] for each rank, and the entries of each block <int32>[R].
Message = tuple[tf.Tensor, tf.Tensor]


class Partition(Protocol):
    """Arranges unique ids <int64>[U] with splits <int64>[S+1] by their owners, as ops.rank_partition does."""

    def __call__(self, ids: tf.Tensor, splits: tf.Tensor, /, *, num_ranks: int) -> ops.RankedIds: ...


class Outgoing(NamedTuple):
    """Distinct ids of one lookup before the exchange."""

    name: str  # prefix of its collectives' names, the same on all ranks
    unique: ops.UniqueIds  # by segment
    partition: Partition
    num_segments: int  # S
    window: str = ""  # lookups of one window share rows; "": the lookup shares none
    row_bytes: int = 0  # of a row, or of its gradient, on the network


class OutgoingBags(NamedTuple):
    """Ids of one lookup that pools, before the exchange. It shares no rows."""

    name: str
    sums: ops.PartialSums
    num_segments: int
    row_bytes: int
    window: str = ""


class Piece(NamedTuple):
    """The place of a lookup among the micro-batches of its window."""

    window: str
    number: int  # i
    pieces: int  # M
    term_index: tf.Tensor  # <int32>[k], ids of the summed gradients, by place in all micro-batches
    term_splits: tf.Tensor  # <int64>[e+1], bounds of each sum inside term_index
    rows: tf.Tensor  # <int32>[E], place of the ids of Route.trained among the ids that the window requests of this rank
    marks_splits: tf.Tensor | None  # <int32>[R], entries of the window's marks for each owner; None but for i = 0


class SharedIds(NamedTuple):
    """The ids of all groups of ranks in this rank's shard, for the sums of their gradients (gradient_sync.py).

    This rank sums the gradients of its range of ids, or of all ids with two groups.
    """

    index: tf.Tensor  # <int32>[V], number of the v-th received gradient among the u sums that this rank sends
    num_sent: tf.Tensor  # <int64>[], u, distinct ids of this group of ranks
    sent_splits: tf.Tensor  # <int32>[C], of these, ids that each replica sums
    inverse: tf.Tensor  # <int32>[W], number of the w-th id from the replicas among the ids that this rank sums
    num_summed: tf.Tensor  # <int64>[], distinct ids that this rank sums


class Sums(NamedTuple):
    """The sums of a lookup, each of the rows that a bag has at one owner. They return in place of rows."""

    bag_splits: tf.Tensor  # <int64>[G+1], sums of each bag inside Route.index
    of_rows: ops.RowSums  # that this rank makes, of the ids of Route.request
    terms_splits: tf.Tensor  # <int32>[R], entries of the message of terms for each owner


class Route(NamedTuple):
    """How the ids of one lookup travelled: all that its rows and gradients need. It may wait for a later step."""

    name: str
    # <int32>[N], row of the n-th id among the rows that return, which in a window are the rows of all micro-batches up
    # to this one. None: rows return in the order of the ids.
    index: tf.Tensor
    sum_index: tf.Tensor | None  # <int32>[N], number of the n-th id among the u sums of this lookup's gradients
    num_unique: tf.Tensor  # <int64>[], u
    request: Message  # ids of the rows that this rank sends
    trained: Message  # ids of the gradients that this rank gets: `request`, except in a window or with replicas
    unique_splits: tf.Tensor  # <int32>[R], ids that this rank sent to each owner
    row_splits: tf.Tensor  # <int32>[R], rows, or sums of rows, that this rank sends to each rank
    gradient_splits: tf.Tensor  # <int32>[R], gradients, of rows or of sums, that this rank sends to each owner
    piece: Piece | None = None  # None: the lookup shares no rows
    shared: SharedIds | None = None  # None: only this group of ranks trains the rows
    sums: Sums | None = None  # None: rows return, and a gradient of each


def local_route(ids: tf.Tensor, segment_splits: tf.Tensor, name: str) -> Route:
    """The route of ids <int64>[N] that stay on their rank, duplicates included."""
    request, num_ids = own_message(ids, segment_splits), tf.reshape(tf.size(ids), [1])
    return Route(name, None, None, tf.size(ids, tf.int64), request, request, num_ids, num_ids, num_ids)


def own_message(ids: tf.Tensor, segment_splits: tf.Tensor) -> Message:
    """The message of ids <int64>[N], grouped by segment, that a single process would receive from itself."""
    message = tf.concat([segment_splits[1:] - segment_splits[:-1], ids], axis=0)
    return message, tf.reshape(tf.size(message), [1])


def send_ids(outgoing: Sequence[Outgoing | OutgoingBags], layout: RankLayout) -> list[Route]:
    """Sends the ids of all lookups, in the same order on all ranks, to their owners in one all-to-all. Collective."""
    windows: dict[Hashable, list[int]] = {}
    for i, ids in enumerate(outgoing):
        windows.setdefault(ids.window or i, []).append(i)
    departures = [_departure([outgoing[i] for i in positions], layout) for positions in windows.values()]
    sent = [message for departure in departures for message in departure.messages]
    segments = [count for departure in departures for count in departure.segments]
    if layout.group.size == 1:
        arrived = iter([(tf.strided_slice(message, [0], splits, [1]), splits) for message, splits in sent])
    else:
        received = collectives.all_to_all(*join_messages(sent), name=f"{outgoing[0].name}.ids", ranks=layout.group)
        arrived = iter(split_messages(*received, segments))
    routes: dict[int, Route] = {}
    for positions, departure in zip(windows.values(), departures):
        routes.update(zip(positions, departure.routes([next(arrived) for _ in departure.messages])))
    return [routes[i] for i in range(len(outgoing))]


class _Departure(NamedTuple):
    """The ids of one lookup, or of a window, on their way."""

    messages: list[Message]
    segments: list[int]  # headers of each message's blocks
    routes: Callable[[list[Message]], list[Route]]  # from the received messages


def _departure(lookups: Sequence[Outgoing | OutgoingBags], layout: RankLayout) -> _Departure:
    if isinstance(lookups[0], OutgoingBags):
        bags, sums = lookups[0], lookups[0].sums
        messages = [(sums.message, sums.send_splits), (sums.terms, sums.terms_splits)]
        return _Departure(messages, [bags.num_segments, 1], functools.partial(_route_of_bags, bags))
    rows = [ids for ids in lookups if isinstance(ids, Outgoing)]
    shared = ops.window_unique([ids.unique for ids in rows]) if len(rows) > 1 else None
    new = [ids.unique[:2] for ids in rows] if shared is None else shared.new
    ranked = [ids.partition(*part, num_ranks=layout.group.size) for ids, part in zip(rows, new)]
    messages, segments = [(ids.message, ids.send_splits) for ids in ranked], [ids.num_segments for ids in rows]
    if shared is None:
        return _Departure(messages, segments, functools.partial(_route, rows[0], ranked[0]))
    window = ops.window_route(shared, ranked, num_segments=rows[0].num_segments)
    messages.append((window.marks, window.marks_splits))
    return _Departure(messages, [*segments, 1], functools.partial(_window_routes, rows, ranked, window))


def _route(sent: Outgoing, ranked: ops.RankedIds, received: Sequence[Message]) -> list[Route]:
    (request,) = received
    index, num_unique = tf.gather(ranked.restore, sent.unique.inverse), tf.size(ranked.restore, out_type=tf.int64)
    splits, row_splits = ranked.id_splits, request[1] - sent.num_segments
    return [Route(sent.name, index, index, num_unique, request, request, splits, row_splits, splits)]


def _route_of_bags(sent: OutgoingBags, received: Sequence[Message]) -> list[Route]:
    (request, terms), sums = received, sent.sums
    of_rows, row_splits = ops.partial_sum_terms(*terms, request[1], num_segments=sent.num_segments)
    return [
        Route(
            name=sent.name,
            index=sums.index,
            sum_index=sums.index,
            num_unique=tf.cast(tf.reduce_sum(sums.sum_splits), tf.int64),
            request=request,
            trained=request,
            unique_splits=sums.id_splits,
            row_splits=row_splits,
            gradient_splits=sums.sum_splits,
            sums=Sums(sums.sum_bags, of_rows, sums.terms_splits),
        )
    ]


def _window_routes(
    lookups: Sequence[Outgoing], ranked: Sequence[ops.RankedIds], window: ops.WindowRoute,
    received: Sequence[Message],
) -> list[Route]:  # fmt: skip
    *requests, marks = received
    messages, splits = zip(*requests)
    gradients = ops.window_gradients(messages, splits, *marks, num_segments=lookups[0].num_segments)
    return [
        Route(
            name=sent.name,
            index=tf.gather(window.rows[i], sent.unique.inverse),
            sum_index=sent.unique.inverse,
            num_unique=tf.size(window.rows[i], out_type=tf.int64),
            request=requests[i],
            trained=gradients.trained[i],
            unique_splits=ranked[i].id_splits,
            row_splits=splits[i] - sent.num_segments,
            gradient_splits=window.gradient_splits[i],
            piece=Piece(
                sent.window, i, len(requests), window.term_index[i], window.term_splits[i], gradients.rows[i],
                window.marks_splits if i == 0 else None,
            ),
        )
        for i, sent in enumerate(lookups)
    ]  # fmt: skip


class OutgoingRows(NamedTuple):
    """Rows or gradients of one lookup before the exchange."""

    rows: tf.Tensor  # [P, D], with padding
    wire: tf.DType | None  # type of longer numbers in the exchange; None for their own
    name: str
    splits: tf.Tensor
    received_splits: tf.Tensor | None


def exchange(outgoing: Sequence[OutgoingRows], layout: RankLayout) -> list[tf.Tensor]:
    """Sends rows to the ranks that asked for them, or gradients to their owners. Collective.

    Returns:
      Rows: the rows or sums of each lookup, [U, D], in a window of its new ids.
      Gradients: [V, D] of each lookup, in the order of the received ids; with replicas, of the ids that this group of
        ranks sent.
    """
    travels = layout.group.size > 1
    sent = [
        collectives.Outgoing(name, narrowed(rows, wire if travels else None), splits, received_splits)
        for rows, wire, name, splits, received_splits in outgoing
    ]
    arrived = collectives.all_to_alls(sent, layout.group)
    return [tf.cast(rows, of_lookup.rows.dtype) for (rows, _), of_lookup in zip(arrived, outgoing)]


def outgoing_rows(route: Route, rows: tf.Tensor, wire: tf.DType | None) -> OutgoingRows:
    """Rows [P, D] of route.request, or their sums, on their way from their owner."""
    known = route.unique_splits if route.sums is None else route.gradient_splits
    return OutgoingRows(rows, wire, f"{route.name}.rows", route.row_splits, known)


def recover_rows(fused: ops.FusedIds, route: Route, arrived: Sequence[tf.Tensor]) -> tf.Tensor:
    """The row of each id, pooled where a feature is: [G, D].

    arrived: results of `exchange` of this lookup's window, up to this lookup.
    """
    if route.index is None:
        return arrived[0]
    recover = ops.pooled_recover_parts if route.piece is not None else ops.pooled_recover
    return recover(arrived if route.piece is not None else arrived[0], route.index, *_bags(fused, route))


def sum_gradients(fused: ops.FusedIds, route: Route, grads: tf.Tensor) -> tf.Tensor:
    """Sums the gradients of rows [G, D] by unique id: [>= u, D]. The mirror of recover_rows."""
    if route.sum_index is None:
        return grads
    pad = route.piece is None
    return ops.pooled_recover_grad(grads, route.sum_index, *_bags(fused, route), route.num_unique, pad=pad)


def _bags(fused: ops.FusedIds, route: Route) -> tuple[tf.Tensor, tf.Tensor]:
    """Bounds of the bags inside the indices of a route, and their scales. The requesting rank scales sums."""
    return fused.bag_splits if route.sums is None else route.sums.bag_splits, fused.bag_scale


def partial_sums(rows: tf.Tensor, sums: ops.RowSums) -> tf.Tensor:
    """Sums rows [P, D] that the owner has read already: [M, D], or the rows where no rank asks for sums."""
    ones = tf.ones_like(sums.splits[1:], tf.float32)
    summed = tf.cond(
        tf.size(sums.index) > 0, lambda: ops.pooled_recover(rows, sums.index, sums.splits, ones), lambda: rows
    )
    return tf.ensure_shape(summed, [None, rows.shape[1]])


def row_gradients(grads: tf.Tensor, sums: ops.RowSums, inverse: tf.Tensor) -> tf.Tensor:
    """The gradients of received ids [>= V, D] at their owner, from those of sums. The mirror of partial_sums.

    inverse: <int32>[V], the place of each received id's row.
    """
    ones, ids = tf.ones_like(sums.splits[1:], tf.float32), tf.size(inverse, tf.int64)
    by_id = tf.cond(
        tf.size(sums.index) > 0,
        lambda: ops.pooled_recover_grad(grads, sums.index, sums.splits, ones, ids),
        lambda: grads,
    )
    return tf.ensure_shape(by_id, [None, grads.shape[1]])


def outgoing_gradients(route: Route, sums: Sequence[tf.Tensor], wire: tf.DType | None) -> OutgoingRows:
    """Gradients of rows on their way to their owner: the mirror of outgoing_rows.

    sums: results of sum_gradients of this lookup's window, up to this lookup.
    """
    grads, piece = sums[0], route.piece
    if piece is not None:  # each gradient summed over micro-batches in their order
        ones = tf.ones_like(piece.term_splits[1:], tf.float32)
        grads = ops.pooled_recover_parts(sums, piece.term_index, piece.term_splits, ones, pad=True)
    known = route.row_splits if piece is None else None
    return OutgoingRows(grads, wire, f"{route.name}.gradients", route.gradient_splits, known)


def narrowed(tensor: tf.Tensor, wire: tf.DType | None) -> tf.Tensor:
    """Rows or gradients in their type on the wire, rounded to the nearest where that is shorter."""
    if wire is None or tensor.dtype.size <= wire.size:
        return tensor
    return tf.saturate_cast(tensor, wire)  # not infinite beyond float16's largest number


def by_ranges(replicas: int) -> bool:
    """Returns whether each of C replicas sums a range of the ids, and sends the sums to the others."""
    return replicas > 2


def traffic(sent: Outgoing | OutgoingBags, route: Route, layout: RankLayout, requested: tf.Tensor) -> tf.Tensor:
    """<int64>[3] of one lookup: `requested` ids, sent ids, bytes of ids, headers, rows and gradients to other ranks."""

    def away(ranks: collectives.Ranks, *parts: tuple[tf.Tensor, int]) -> tf.Tensor:
        """Bytes to other ranks. parts: splits by rank, and the bytes of an entry."""
        remote = np.arange(ranks.size) != ranks.index
        each = np.concatenate([entry_bytes * remote for _, entry_bytes in parts])
        return tf.reduce_sum(tf.cast(tf.concat([splits for splits, _ in parts], axis=0), tf.int64) * each)

    group, replicas, shared, row_bytes = layout.group, layout.replicas, route.shared, sent.row_bytes
    parts = [(route.unique_splits, 8), (route.row_splits, row_bytes), (route.gradient_splits, row_bytes)]
    if route.piece is not None and route.piece.marks_splits is not None:
        parts.append((route.piece.marks_splits, 8))
    if route.sums is not None:
        parts.append((route.sums.terms_splits, 8))
    total = away(group, *parts) + (group.size - 1) * 8 * sent.num_segments
    if shared is not None:
        total += away(replicas, (shared.sent_splits, 8 + row_bytes)) + (replicas.size - 1) * 8 * sent.num_segments
        if by_ranges(replicas.size):
            total += (replicas.size - 1) * (shared.num_summed * (8 + row_bytes) + 8 * sent.num_segments)
    sent_ids = tf.reduce_sum(tf.cast(route.unique_splits, tf.int64))
    return tf.stack([requested, sent_ids, total])


def join_sources(parts: Sequence[Message]) -> Message:
    """One message of all sources of several lookups, in their order, which a table answers in one lookup."""
    if len(parts) == 1:
        return parts[0]
    messages, splits = (tf.concat(tensors, axis=0) for tensors in zip(*parts))
    return messages, splits


def split_answer(answer: ops.TableRows, routes: Sequence[Route], segments: int) -> list[ops.TableRows]:
    """A table's answer to `join_sources` of the requests, by route: rows [bucketed V_i, D], any numbers after V_i.

    With replicas, the answer has the rows of the requests, and the inverse of `join_sources` of the trained ids. Where
    columns fill whole cache lines, rows share the answer's memory.
    """
    if len(routes) == 1:
        return [answer]
    counts = _num_ids([route.request for route in routes], segments)
    rows, begin = [], tf.constant(0)
    for count, size in zip(counts, tf.unstack(bucketed(tf.stack(counts)))):
        rows.append(_send_buffer(answer.rows, begin, size))
        begin += count
    if answer.inverse is None:
        return [answer._replace(rows=part) for part in rows]
    replicated = routes[0].shared is not None
    sizes = _num_ids([route.trained for route in routes], segments) if replicated else counts
    inverses = tf.split(answer.inverse, tf.stack(sizes))
    windows: dict[str, list[tf.Tensor]] = {}
    for route, inverse in zip(routes, inverses):
        if route.piece is not None and not replicated:
            windows.setdefault(route.piece.window, []).append(inverse)
    joined = {window: tf.concat(parts, axis=0) for window, parts in windows.items()}
    trained = [
        inverse if route.piece is None or replicated else tf.gather(joined[route.piece.window], route.piece.rows)
        for route, inverse in zip(routes, inverses)
    ]
    return [answer._replace(rows=part, inverse=inverse) for part, inverse in zip(rows, trained)]


def _num_ids(messages: Sequence[Message], segments: int) -> list[tf.Tensor]:
    return [tf.size(message) - segments * tf.size(splits) for message, splits in messages]


def _send_buffer(rows: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`size` rows from `begin` on. Padding is rows of other lookups, or zeros at the end."""
    part = rows[begin : begin + size]
    padded = tf.pad(part, [[0, size - tf.shape(part)[0]], [0, 0]])  # no copy where nothing is added
    return tf.ensure_shape(padded, [None, rows.shape[1]])


def join_messages(parts: Sequence[Message]) -> Message:
    """Joins messages into one, padded to a bucketed size. Each rank's block has its blocks of all, in their order."""
    return parts[0] if len(parts) == 1 else ops.join_messages(*zip(*parts))


def split_messages(message: tf.Tensor, splits: tf.Tensor, segments: Sequence[int]) -> list[Message]:
    """Splits a received message that `join_messages` made. Headers of counts give the length of each block.

    Raises InvalidArgumentError at run time for several messages, if a header does not agree with its block.
    """
    if len(segments) == 1:
        return [(message, splits)]
    return list(zip(*ops.split_messages(message, splits, segments=segments)))


def all_to_each(tensor: tf.Tensor, *, name: str, ranks: collectives.Ranks) -> tuple[tf.Tensor, tf.Tensor]:
    """Gathers tensors [n, ...] with different first dimensions on all of `ranks`, in rank order. Collective.

    An all-to-all of equal parts returns the lengths, too; an all-gather needs a second collective for them.

    Returns:
      The gathered tensor [sum of all n, ...] and each n, <int32>[R].
    """
    length = tf.shape(tensor)[0]
    if ranks.size == 1:
        return tensor, tf.reshape(length, [1])
    copies = tf.concat([tensor] * ranks.size, axis=0)
    return collectives.all_to_all(copies, tf.fill([ranks.size], length), name=name, ranks=ranks)


def bucketed(n: tf.Tensor) -> tf.Tensor:
    """<int32>[...] >= n, each one of few sizes; see custom_ops/common/bucket.h."""
    quarters = tf.math.log(tf.cast(tf.maximum(n, 1024), tf.float64) / 1024) / tf.math.log(tf.constant(2.0, tf.float64))
    step = 256 * 2 ** tf.cast(tf.math.floor(quarters), tf.int32)
    return -(-tf.maximum(n, 1) // step) * step
