"""The lookups of a step, one way: ids go to their owners, rows come back; then gradients go out and tables are updated.

    route ─▶ fetch ─▶ bring ─▶ (outputs, the model, its loss) ─▶ apply_gradients

Lookups that share a stage share its cost. The ids of all travel in one all-to-all (exchange/routing.py says why). A
table is looked up once, and the gradients of all make one update. So no lookup of a step can overtake another.

Lookups come in waves, one for each micro-batch. An id that several waves hold travels once (exchange/routing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import outside_clusters, tf
from tf_fusedrec.embedding.features import placing_ids
from tf_fusedrec.embedding.group_lookup import GroupLookup
from tf_fusedrec.embedding.routed_ids import Context, LookupRequest, Outgoing, RoutedIds
from tf_fusedrec.exchange import gradient_sync, routing
from tf_fusedrec.ops import RowsAhead


class Found(NamedTuple):
    """Rows of one lookup on the rank that asked for them."""

    rows: tf.Tensor  # <output dtype>[G, D], pooled where a feature is
    context: Context  # for their gradients


class RowGradients(NamedTuple):
    """Gradients of the rows of one lookup."""

    context: Context
    grads: tf.Tensor  # <output dtype>[G, D]


def route(*waves: Sequence[LookupRequest]) -> list[RoutedIds]:
    """Sends ids to their owners, in one all-to-all per set of ranks and place of ids. Reads no table. Collective.

    Where groups share gradients, two more collectives tell the ids of all groups to all replicas. No row waits for
    them.

    Args:
      waves: The lookups of a step, in the same order on all ranks. Lookups at the same place of several waves share
        rows, if they are of one group, have one output dtype and train.

    Returns:
      The routed ids of each request, one wave after another.
    """
    requests, windows = [request for wave in waves for request in wave], _windows(waves)
    outgoing: list[Outgoing] = []
    for request, window in zip(requests, windows):
        with placing_ids([request.lookup.table]):
            outgoing.append(request.lookup.prepare(request, window))
    routes: dict[int, routing.Route] = {}
    shared: dict[int, gradient_sync.SharedIds] = {}
    for numbers in _by_way(requests, outgoing):
        layout = requests[numbers[0]].lookup.layout
        sent = [ids for i in numbers if (ids := outgoing[i].ids) is not None]
        with placing_ids([requests[numbers[0]].lookup.table]):
            of_group = routing.route_ids(sent, layout)
            routes.update(zip(numbers, of_group))
            if requests[numbers[0]].training and layout.shares_gradients:
                shared.update(zip(numbers, gradient_sync.share_ids(sent, of_group, layout)))
    routed: list[RoutedIds] = []
    for i, (request, leaving) in enumerate(zip(requests, outgoing)):
        with placing_ids([request.lookup.table]):
            routed.append(request.lookup.routed(request, leaving.fused, routes.get(i), shared.get(i)))
    return routed


def _windows(waves: Sequence[Sequence[LookupRequest]]) -> list[int | None]:
    """For each request of all waves the number of its window; None: it shares no rows."""
    windows: list[int | None] = []
    for wave in waves:
        for place, request in enumerate(wave):
            like = [
                len(other) > place
                and other[place].lookup is request.lookup
                and other[place].output_dtype == request.output_dtype
                for other in waves
            ]
            shares = sum(like) > 1 and request.training and request.lookup.shares_rows
            windows.append(place if shares else None)
    return windows


def look_ahead(routed: Sequence[RoutedIds]) -> list[RowsAhead]:
    """Reads at the owner the rows that `fetch` will want. Changes nothing. No collective.

    Returns:
      Rows for each group of tables, in the order in which the groups first come.
    """
    return [
        routed[numbers[0]].lookup.look_ahead([routed[i] for i in numbers])
        for numbers in by_group([ids.lookup for ids in routed])
    ]


def fetch(routed: Sequence[RoutedIds], rows_ahead: Sequence[RowsAhead] | None = None) -> list[Context]:
    """Looks rows up at the owners as they are now, each table once. No collective.

    Args:
      routed: The routed ids of one step. All of a group train, or none do.
      rows_ahead: The result of `look_ahead` for the same ids: only rows that changed since are read. None: all are.

    Returns:
      The context of each lookup.
    """
    contexts: dict[int, Context] = {}
    for group, numbers in enumerate(by_group([ids.lookup for ids in routed])):
        lookup, of_group = routed[numbers[0]].lookup, [routed[i] for i in numbers]
        contexts.update(zip(numbers, lookup.fetch(of_group, None if rows_ahead is None else rows_ahead[group])))
    return [contexts[i] for i in range(len(routed))]


def bring(*waves: Sequence[Context]) -> list[Found]:
    """Sends rows to the ranks that asked for them. Collective.

    Args:
      waves: Contexts of lookups. The rows of one wave leave together. The rows of the next wave leave when they have
        arrived: Horovod does not keep the order of exchanges that wait together (schedules/micro_batches.py).
    """
    found: list[Found] = []
    arrived: list[tf.Tensor] = []
    of_windows: dict[str, list[tf.Tensor]] = {}
    for contexts in waves:
        with tf.control_dependencies(arrived):
            arrived = [context.routed.lookup.bring(context) for context in contexts]
        for context, rows in zip(contexts, arrived):
            rows_so_far = _with_pieces_before(context, rows, of_windows)
            found.append(Found(context.routed.lookup.recover(context, rows_so_far), context))
    return found


def _with_pieces_before(context: Context, one: tf.Tensor, of_windows: dict[str, list[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns `one`, behind the results of the pieces before where the lookup is a piece of a window.

    Args:
      context: The context of the lookup.
      one: The rows or the gradients of the lookup.
      of_windows: Rows or gradients of the lookups before, by window. Gets `one`.

    Raises:
      ValueError: pieces are missing, or come in another order.
    """
    piece = context.routed.piece
    if piece is None:
        return [one]
    before = of_windows.setdefault(piece.window, [])
    if len(before) != piece.number:
        raise ValueError(
            f"micro-batch {piece.number} of tables {context.routed.lookup.table.names} came after {len(before)} of "
            f"{piece.pieces} micro-batches, which share rows and sum their gradients in order. Remedy: a loss that "
            "depends on the rows of every micro-batch, or schedule='sync'."
        )
    before.append(one)
    return list(before)


def look_up(groups: Sequence[Sequence[LookupRequest]]) -> list[list[Found]]:
    """Finds the rows of each request, by group: all stages at once. Collective."""
    found = iter(bring(fetch(route([request for group in groups for request in group]))))
    return [[next(found) for _ in group] for group in groups]


def apply_gradients(parts: Sequence[RowGradients], *, staleness: int = 0) -> list[tf.Tensor]:
    """Sends gradients to the owners and makes one update of each group of tables. Collective.

    Args:
      parts: The context of each lookup and its gradients. An owner sums them in this order; gradients of an id that
        several waves hold are summed before they are sent.
      staleness: Updates that a schedule makes between `fetch` and here, at most. Rows must stay where they are
        meanwhile: FusedEmbedding(lookups_per_update) above it.

    Returns:
      [>= V, D], the gradients that came to this rank with each lookup.

    Raises:
      ValueError: gradients of a wave are missing.
      InvalidArgumentError: at run time, the table was updated more often since a context's fetch: one step made two
        updates.
    """
    with outside_clusters("An update of tables"):
        # All gradients are sent before the first are waited for.
        received: list[tf.Tensor] = []
        of_windows: dict[str, list[tf.Tensor]] = {}
        for context, grads in parts:
            lookup = context.routed.lookup
            sums = _with_pieces_before(context, lookup.sum_gradients(context, grads), of_windows)
            received.append(lookup.return_gradients(context, sums))
        _require_all_pieces([context for context, _ in parts])
        for numbers in by_group([part.context.routed.lookup for part in parts]):
            lookup = parts[numbers[0]].context.routed.lookup
            lookup.update([(parts[i].context, received[i]) for i in numbers], staleness=staleness)
    return received


def _require_all_pieces(contexts: Sequence[Context]) -> None:
    last = {piece.window: (piece, one) for one in contexts if (piece := one.routed.piece) is not None}
    for piece, context in last.values():
        if piece.number + 1 < piece.pieces:
            raise ValueError(
                f"gradients came for {piece.number + 1} of {piece.pieces} micro-batches of tables "
                f"{context.routed.lookup.table.names}; the gradients of the last never left. Remedy: a loss that "
                "depends on the rows of every micro-batch, or schedule='sync'."
            )


def by_group(lookups: Sequence[GroupLookup]) -> list[list[int]]:
    """Numbers of each group's lookups; groups in the order in which they first come."""
    numbers: dict[int, list[int]] = {}
    for i, lookup in enumerate(lookups):
        numbers.setdefault(id(lookup), []).append(i)
    return list(numbers.values())


def _by_way(requests: Sequence[LookupRequest], outgoing: Sequence[Outgoing]) -> list[list[int]]:
    """Numbers of the requests whose ids travel among the same ranks and in one memory; none of those whose ids stay."""
    numbers: dict[tuple, list[int]] = {}
    for i, request in enumerate(requests):
        if outgoing[i].ids is not None:
            layout = request.lookup.layout
            replicas = layout.replicas.members if request.training and layout.shares_gradients else None
            numbers.setdefault((layout.group.members, replicas, request.lookup.table.ids_on_host), []).append(i)
    return list(numbers.values())
