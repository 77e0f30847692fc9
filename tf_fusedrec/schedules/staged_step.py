"""A training step with stages that work on several batches (NestPipe, section IV; TurboGR, sections 4.2.2 and 4.2.3).

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
from tf_fusedrec.embedding import Step, tables_in
from tf_fusedrec.embedding.features import placing_ids
from tf_fusedrec.schedules.planned_calls import plan_step, required_embeddings, running
from tf_fusedrec.schedules.schedule import Stages


class Ready(NamedTuple):
    """The rows of the batch that computes next, on the ranks that asked."""

    step: Step
    rows: Sequence[tf.Tensor]


class Waiting(NamedTuple):
    """Gradients that wait for the next step."""

    exist: tf.Tensor  # <bool>[]; False before the first step and after a drain, when the gradients are placeholders
    step: Step
    gradients: Sequence[tf.Tensor]  # by position of the lookup


class Ahead(NamedTuple):
    """Unfinished work on other batches, which passes from one training step to the next."""

    sent: Sequence[Step] = ()  # steps with their ids at the owners, next batch first
    ready: Ready | None = None  # None: the step of a batch looks its rows up
    waiting: Waiting | None = None  # None: the step of a batch makes its update


def start(stages: Stages, model: Any, batches: Sequence[Any]) -> Ahead:
    """Begins the work on the first batches of an iterator."""
    if stages.read:
        required_embeddings(model)  # raises where the model has none
    sent = [_plan(stages, model, batches[i], steps_ahead=i + 1).send_ids() for i in range(stages.send_ids)]
    if stages.look_ahead:
        sent[0] = sent[0].look_ahead()
    if not stages.return_rows:
        return Ahead(sent)
    ready = _returned(sent.pop(0))
    waiting = Waiting(tf.constant(False), *ready) if stages.update else None
    return Ahead(sent, ready, waiting)


def step(stages: Stages, model: Any, batches: Sequence[Any], ahead: Ahead) -> tuple[dict[str, tf.Tensor], Ahead]:
    """Trains batches[0], and works on coming batches while it computes."""
    if not stages.send_ids:
        return model.train_step(batches[0]), ahead
    if stages.return_rows:
        return _step_on_stale_rows(stages, model, batches, ahead)
    current, *coming = ahead.sent
    if stages.look_ahead:  # Ops on one table run in program order: refresh, look-ahead of the next batch, update.
        current = current.look_up()
    # With few threads, work on coming batches could delay the refresh, for which this batch waits.
    with tf.control_dependencies([answer.rows for answer in current.answers]):
        coming.append(_plan(stages, model, batches[stages.send_ids], steps_ahead=stages.send_ids + 1).send_ids())
        if stages.look_ahead:
            coming[0] = coming[0].look_ahead()
    with running(model, *_returned(current)):
        return model.train_step(batches[0]), Ahead(coming)


def _step_on_stale_rows(
    stages: Stages, model: Any, batches: Sequence[Any], ahead: Ahead
) -> tuple[dict[str, tf.Tensor], Ahead]:
    """Rows of batch t + 1 are looked up and returned while batch t computes on rows of the step before."""
    assert ahead.ready is not None
    planned = _plan(stages, model, batches[stages.send_ids], steps_ahead=stages.send_ids + 1)
    following, *coming = [*ahead.sent, planned.send_ids()]
    if ahead.waiting is not None:
        _update_late(ahead.waiting)
    ready, current = _returned(following), ahead.ready.step
    with running(model, *ahead.ready) as run:
        collected = run.keep_gradients()
        logs = model.train_step(batches[0])
    if len(collected) < len(current.lookups):
        raise ValueError(
            f"the loss of {model.name!r} does not depend on all rows that it looks up for training, so some rows have "
            "no gradients to wait for. Use schedule='sync', or `trainable = False` of the FusedEmbedding."
        )
    gradients = [collected[i] for i in range(len(current.lookups))]
    if stages.update:
        return logs, Ahead(coming, ready, Waiting(tf.constant(True), current, gradients))
    current.update(current.send_gradients(dict(enumerate(gradients))), staleness=stages.staleness)
    return logs, Ahead(coming, ready)


def drain(ahead: Ahead) -> Ahead:
    """Makes the updates that wait."""
    if ahead.waiting is None:
        return ahead
    _update_late(ahead.waiting)
    return ahead._replace(waiting=ahead.waiting._replace(exist=tf.constant(False)))


def _plan(stages: Stages, model: Any, data: Any, *, steps_ahead: int) -> Step:
    with placing_ids(tables_in(model)):
        pieces = cut(data, stages.micro_batches) if stages.micro_batches else [data]
        return plan_step(model, pieces, steps_ahead=steps_ahead, lookups_per_update=stages.lookups_per_update)


def _returned(looked_up: Step) -> Ready:
    looked_up = looked_up if looked_up.answers else looked_up.look_up()
    return Ready(looked_up, looked_up.return_rows())


def _update_late(waiting: Waiting) -> None:
    """Sends waiting gradients, if any, to their owners and updates the tables: on all ranks or on none."""

    def update() -> tf.Tensor:
        waiting.step.update(waiting.step.send_gradients(dict(enumerate(waiting.gradients))), staleness=1)
        return waiting.exist

    tf.cond(waiting.exist, update, lambda: waiting.exist)
