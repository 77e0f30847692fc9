"""Several batches in flight: what SemiAsync and Pipelined have in common (TurboGR, sections 4.2.2 and 4.2.3).

In step t, one under the other, where batch t computes on rows that came in the step before:

    gradients of t-1 -> owners, update -> rows of t+1 looked up -> all-to-all   the table's order; no compute in it
    ids of t+a: unique, all-to-all                                              read no table
    batch t: dense forward, backward, dense update                              waits for none of these

So the rows of a batch lack the update of the batch before, and no other. Dense weights are always the newest.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import embeddings_of
from tf_fusedrec.embedding.group_lookup import Context, RoutedIds
from tf_fusedrec.embedding.lookup import RowGradients, apply_gradients, fetch, route
from tf_fusedrec.schedules import stages
from tf_fusedrec.schedules.calls import required_embeddings
from tf_fusedrec.schedules.schedule import Schedule


class Waiting(NamedTuple):
    """Gradients that wait for the next step."""

    there: tf.Tensor  # <bool>[]; False before the first step and after a drain: then `parts` are a filling
    parts: Sequence[RowGradients]


class State(NamedTuple):
    """What a step finds of the batches before and behind its own."""

    routes: Sequence[
        Sequence[RoutedIds]
    ]  # ids at their owners: of the batch whose rows come next, and of those behind it
    found: Sequence[stages.Found]  # rows of the batch that computes next; none where that is looked up in its step
    waiting: Waiting | None  # None: updates are made in the step of their batch


class InFlight(Schedule):
    """A schedule of stages. What a stage does is done for one batch per step; which one, a subclass says."""

    @property
    def looks_ahead(self) -> bool:
        return True

    @property
    @abc.abstractmethod
    def routes_ahead(self) -> int:
        """a: in step t the ids of batch t+a travel; 0: those of batch t, as under Sync."""

    @property
    @abc.abstractmethod
    def rows_ahead(self) -> bool:
        """Whether in step t the rows of t+1 travel; else those of t, which are then as fresh as under Sync."""

    @property
    @abc.abstractmethod
    def updates_late(self) -> bool:
        """Whether in step t the gradients of t-1 travel and their update is made, else those of t."""

    @property
    def staleness(self) -> int:
        """Updates of the tables that the rows of a batch lack: 0 as under Sync."""
        return int(self.rows_ahead)

    def check(self, model: Any) -> None:
        for embedding in embeddings_of(model) if self.routes_ahead else []:
            embedding.check_deferrable(self._lookups_before_update)

    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        return keras.Model.train_step(model, data)

    def start(self, model: Any, batches: Sequence[Any]) -> State:
        required_embeddings(model)  # which there must be
        plans = [self._plan(model, batches[i], i + 1) for i in range(self.routes_ahead)]
        routes = [route(stages.requests(planned)) for planned in plans]
        if not self.rows_ahead:
            return State(routes, [], None)
        found = stages.bring(fetch(routes[0]))
        filling = [RowGradients(context, rows) for rows, context in found]
        waiting = Waiting(tf.constant(False), filling) if self.updates_late else None
        return State(routes[1:], found, waiting)

    def step(self, model: Any, batches: Sequence[Any], state: State) -> tuple[dict[str, tf.Tensor], State]:
        if not self.routes_ahead:
            return model.train_step(batches[0]), state
        planned = self._plan(model, batches[self.routes_ahead], self.routes_ahead + 1)
        routes = [*state.routes, route(stages.requests(planned))]
        if state.waiting is not None:
            _update_late(state.waiting)
        found = stages.bring(fetch(routes.pop(0)))
        if not self.rows_ahead:
            with stages.supplying(planned, found):
                return model.train_step(batches[0]), State(routes, [], None)
        mine: list[RowGradients] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(stages.supplying(planned, state.found))
            for embedding in required_embeddings(model):
                stack.enter_context(embedding.deferred(mine, None))
            logs = model.train_step(batches[0])
        parts = [_gradients_of(model, context, mine) for _, context in state.found]
        if self.updates_late:
            return logs, State(routes, found, Waiting(tf.constant(True), parts))
        apply_gradients(parts, staleness=1)
        return logs, State(routes, found, None)

    def drain(self, model: Any, state: State) -> State:
        if state.waiting is None:
            return state
        _update_late(state.waiting)
        return state._replace(waiting=state.waiting._replace(there=tf.constant(False)))

    @property
    def _lookups_before_update(self) -> int:
        return 1 + self.rows_ahead

    def _plan(self, model: Any, data: Any, steps_ahead: int) -> list[stages.Planned]:
        return stages.plan(model, [data], steps_ahead=steps_ahead, before_update=self._lookups_before_update)


def _gradients_of(model: Any, context: Context, gradients: Sequence[RowGradients]) -> RowGradients:
    for part in gradients:
        if part.context is context:
            return part
    raise ValueError(
        f"the loss of {model.name!r} does not depend on all rows that it looks up for training, so that there are no "
        f"gradients for them to wait for. Remedy: schedule='sync', or `trainable = False` of the FusedEmbedding."
    )


def _update_late(waiting: Waiting) -> None:
    """Sends gradients to their owners and trains the tables, if there are any: on all ranks or on none."""

    def update() -> tf.Tensor:
        apply_gradients(waiting.parts, staleness=1)
        return waiting.there

    tf.cond(waiting.there, update, lambda: waiting.there)
