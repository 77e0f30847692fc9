"""A training step whose stages work on several batches (NestPipe, section IV; TurboGR, sections 4.2.2 and 4.2.3).

Fresh rows (DualBuffer, Nested, Pipelined(3)), equal to sync bit for bit:

    step t        refresh t ─▶ rows t ─▶ compute t ─▶ gradients t ─▶ update t
    at the same   batch t+read is read; ids of t+send_ids ─▶ owners
    time          look-ahead t+1, into a buffer at the owner
    step t+1      refresh t+1: rows that batch t has updated are read again ─▶ rows t+1 ─▶ ...

The more batches apart, the fewer stages run one after another. A step takes as long as the longest stage.

Rows stay with their owner until they are refreshed, because rows sent earlier would be stale (NestPipe, section V-A). A
look-ahead changes nothing in a table (custom_ops/hash_table/cpu/look_ahead.cc). So a batch that never computes, at the
end of fit for example, leaves no trace. Between two steps, tables are as sync would have left them. Rows in the buffer
are not pinned, because pins would change evictions. The refresh searches again for rows that have moved or left.

Stale rows (SemiAsync, Pipelined from depth 4 on). Three chains of ops run side by side in step t, which computes on
rows that arrived in the step before:

    gradients of t-1 ─▶ owners, update ─▶ rows of t+1 looked up ─▶ all-to-all   in this order at the table
    ids of t+send_ids: unique, all-to-all                                       reads no table
    batch t: dense forward, backward, dense update                              waits for no other chain

So the rows of a batch lack the update of the batch before, and no other. Dense weights are always the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data.batches import cut
from tf_fusedrec.embedding import tables_in
from tf_fusedrec.embedding.features import placing_ids
from tf_fusedrec.embedding.lookup import Found, RowGradients, apply_gradients, bring, fetch, look_ahead, route
from tf_fusedrec.embedding.routed_ids import RoutedIds
from tf_fusedrec.ops import RowsAhead
from tf_fusedrec.schedules import planned_calls
from tf_fusedrec.schedules.planned_calls import by_micro_batch, required_embeddings, supplying, waves


class Stages(NamedTuple):
    """Distances in batches from batch t, which computes, to the batch of each stage; 0 as under Sync."""

    micro_batches: int = 0  # M parts of batch t compute one after another on frozen tables; 0: Keras' step of the batch
    read: int = 0  # t + read is read from the data set
    send_ids: int = 0  # ids of t + send_ids go to their owners
    look_ahead: int = 0  # 1: rows of t + 1 are read at the owner, and refreshed in their own step
    return_rows: int = 0  # 1: rows of t + 1 are looked up and returned; they lack one update
    update: int = 0  # 1: gradients of t - 1 are sent and make their update

    @property
    def pieces(self) -> int:
        """Parts of a batch that compute one after another."""
        return max(1, self.micro_batches)

    @property
    def lead(self) -> int:
        """Batches that are read before the first one computes."""
        return max(1, self.read)

    @property
    def staleness(self) -> int:
        """Updates that the rows of a batch lack."""
        return self.return_rows

    @property
    def lookups_per_update(self) -> int:
        """Steps whose lookups are made before the update of the first: FusedEmbedding(lookups_per_update)."""
        return 1 + self.staleness


class Waiting(NamedTuple):
    """Gradients that wait for the next step."""

    exist: tf.Tensor  # <bool>[]; False before the first step and after a drain, when `parts` is a placeholder
    parts: Sequence[RowGradients]


class Ahead(NamedTuple):
    """Unfinished work on other batches, which passes from one training step to the next."""

    routes: Sequence[Sequence[RoutedIds]] = ()  # ids at their owners by batch, next batch first
    rows_ahead: Sequence[RowsAhead] = ()  # rows of the next batch at their owners
    ready: Sequence[Found] = ()  # rows of the batch that computes next, on the ranks that asked
    waiting: Waiting | None = None  # None: the step of a batch makes its update


def start(stages: Stages, model: Any, batches: Sequence[Any]) -> Ahead:
    """Begins the work on the first batches of an iterator."""
    if stages.read:
        required_embeddings(model)  # raises where the model has none
    plans = [_plan(stages, model, batches[i], steps_ahead=i + 1) for i in range(stages.send_ids)]
    routes = [route(*waves(planned)) for planned in plans]
    if stages.look_ahead:
        return Ahead(routes, look_ahead(routes[0]))
    if not stages.return_rows:
        return Ahead(routes)
    ready = bring(fetch(routes[0]))
    placeholder = [RowGradients(lookup.context, lookup.rows) for lookup in ready]
    waiting = Waiting(tf.constant(False), placeholder) if stages.update else None
    return Ahead(routes[1:], ready=ready, waiting=waiting)


def step(stages: Stages, model: Any, batches: Sequence[Any], ahead: Ahead) -> tuple[dict[str, tf.Tensor], Ahead]:
    """Trains batches[0], and works on coming batches while it computes."""
    if not stages.send_ids:
        return model.train_step(batches[0]), ahead
    if stages.return_rows:
        return _step_on_stale_rows(stages, model, batches, ahead)
    current, *coming = ahead.routes
    # Ops on one table run in program order: the buffer is filled between this refresh and the update of the batch.
    contexts = fetch(current, ahead.rows_ahead) if stages.look_ahead else []
    # With few threads, work on coming batches could delay the refresh, for which this batch waits.
    with tf.control_dependencies([context.answer.rows for context in contexts]):
        planned = _plan(stages, model, batches[stages.send_ids], steps_ahead=stages.send_ids + 1)
        coming.append(route(*waves(planned)))
        ahead = Ahead(coming, look_ahead(coming[0]) if stages.look_ahead else [])
    ready = bring(*by_micro_batch(planned, contexts or fetch(current)))
    with supplying(planned, ready):
        return model.train_step(batches[0]), ahead


def _step_on_stale_rows(
    stages: Stages, model: Any, batches: Sequence[Any], ahead: Ahead
) -> tuple[dict[str, tf.Tensor], Ahead]:
    """Rows of batch t + 1 are looked up and returned while batch t computes on rows of the step before."""
    planned = _plan(stages, model, batches[stages.send_ids], steps_ahead=stages.send_ids + 1)
    following, *coming = [*ahead.routes, route(*waves(planned))]
    if ahead.waiting is not None:
        _update_late(ahead.waiting)
    ready = bring(fetch(following))
    gradients: list[RowGradients] = []
    with supplying(planned, ahead.ready), planned_calls.deferring(model, gradients):
        logs = model.train_step(batches[0])
    parts = [planned_calls.gradients_of(model, lookup.context, gradients) for lookup in ahead.ready]
    if stages.update:
        return logs, Ahead(coming, ready=ready, waiting=Waiting(tf.constant(True), parts))
    apply_gradients(parts, staleness=stages.staleness)
    return logs, Ahead(coming, ready=ready)


def drain(ahead: Ahead) -> Ahead:
    """Makes the updates that wait."""
    if ahead.waiting is None:
        return ahead
    _update_late(ahead.waiting)
    return ahead._replace(waiting=ahead.waiting._replace(exist=tf.constant(False)))


def _plan(stages: Stages, model: Any, data: Any, *, steps_ahead: int) -> list[planned_calls.Planned]:
    with placing_ids(tables_in(model)):
        pieces = cut(data, stages.micro_batches) if stages.micro_batches else [data]
        return planned_calls.plan(model, pieces, steps_ahead=steps_ahead, before_update=stages.lookups_per_update)


def _update_late(waiting: Waiting) -> None:
    """Sends waiting gradients, if any, to their owners and updates the tables: on all ranks or on none."""

    def update() -> tf.Tensor:
        apply_gradients(waiting.parts, staleness=1)
        return waiting.exist

    tf.cond(waiting.exist, update, lambda: waiting.exist)
