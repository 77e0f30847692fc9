"""Several batches in flight: the base of SemiAsync and Pipelined (TurboGR, sections 4.2.2 and 4.2.3).

Three chains of ops run side by side in step t. Batch t computes on rows that came in the step before:

    gradients of t-1 -> owners, update -> rows of t+1 looked up -> all-to-all   in this order at the table
    ids of t+a: unique, all-to-all                                              reads no table
    batch t: dense forward, backward, dense update                              waits for no other chain

So the rows of a batch lack the update of the batch before, and no other. Dense weights are always the newest.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import embeddings_of
from tf_fusedrec.embedding.lookup import Found, RowGradients, apply_gradients, bring, fetch, route
from tf_fusedrec.embedding.routed_ids import Context, RoutedIds
from tf_fusedrec.schedules import planned_calls
from tf_fusedrec.schedules.planned_calls import required_embeddings
from tf_fusedrec.schedules.schedule import Schedule


class Waiting(NamedTuple):
    """Gradients that wait for the next step."""

    there: tf.Tensor  # <bool>[]; False before the first step and after a drain, when `parts` is a placeholder
    parts: Sequence[RowGradients]


class State(NamedTuple):
    """Unfinished work on other batches, which passes from step to step."""

    # Ids at their owners: of the next batch whose rows travel, and of the batches after it.
    routes: Sequence[Sequence[RoutedIds]]
    found: Sequence[Found]  # rows of the batch that computes next; empty where its own step looks them up
    waiting: Waiting | None  # None: the step of a batch makes its update


class InFlight(Schedule):
    """A schedule of stages. Each stage works on one batch per step; a subclass says on which one."""

    @property
    def looks_ahead(self) -> bool:
        return True

    @property
    @abc.abstractmethod
    def routes_ahead(self) -> int:
        """a: in step t the ids of batch t+a travel; 0: the ids of batch t, as under Sync."""

    @property
    @abc.abstractmethod
    def rows_ahead(self) -> bool:
        """True if in step t the rows of t+1 travel; else the rows of t, which are as fresh as under Sync."""

    @property
    @abc.abstractmethod
    def updates_late(self) -> bool:
        """True if in step t the gradients of t-1 travel and make their update; else the gradients of t."""

    @property
    def staleness(self) -> int:
        """Number of table updates that the rows of a batch lack; 0 as under Sync."""
        return int(self.rows_ahead)

    def check(self, model: Any) -> None:
        for embedding in embeddings_of(model) if self.routes_ahead else []:
            embedding.check_deferrable(self._lookups_before_update)

    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        return keras.Model.train_step(model, data)

    def start(self, model: Any, batches: Sequence[Any]) -> State:
        required_embeddings(model)  # raises where the model has none
        plans = [self._plan(model, batches[i], i + 1) for i in range(self.routes_ahead)]
        routes = [route(planned_calls.requests(planned)) for planned in plans]
        if not self.rows_ahead:
            return State(routes, [], None)
        found = bring(fetch(routes[0]))
        placeholder = [RowGradients(one.context, one.rows) for one in found]
        waiting = Waiting(tf.constant(False), placeholder) if self.updates_late else None
        return State(routes[1:], found, waiting)

    def step(self, model: Any, batches: Sequence[Any], state: State) -> tuple[dict[str, tf.Tensor], State]:
        if not self.routes_ahead:
            return model.train_step(batches[0]), state
        planned = self._plan(model, batches[self.routes_ahead], self.routes_ahead + 1)
        routes = [*state.routes, route(planned_calls.requests(planned))]
        if state.waiting is not None:
            _update_late(state.waiting)
        found = bring(fetch(routes.pop(0)))
        if not self.rows_ahead:
            with planned_calls.supplying(planned, found):
                return model.train_step(batches[0]), State(routes, [], None)
        mine: list[RowGradients] = []
        with planned_calls.supplying(planned, state.found), planned_calls.deferring(model, mine):
            logs = model.train_step(batches[0])
        parts = [_gradients_of(model, one.context, mine) for one in state.found]
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

    def _plan(self, model: Any, data: Any, steps_ahead: int) -> list[planned_calls.Planned]:
        return planned_calls.plan(model, [data], steps_ahead=steps_ahead, before_update=self._lookups_before_update)


def _gradients_of(model: Any, context: Context, gradients: Sequence[RowGradients]) -> RowGradients:
    for part in gradients:
        if part.context is context:
            return part
    raise ValueError(
        f"the loss of {model.name!r} does not depend on all rows that it looks up for training, so some rows have no "
        "gradients to wait for. Remedy: schedule='sync', or `trainable = False` of the FusedEmbedding."
    )


def _update_late(waiting: Waiting) -> None:
    """Sends waiting gradients, if any, to their owners and trains the tables: on all ranks or on none."""

    def update() -> tf.Tensor:
        apply_gradients(waiting.parts, staleness=1)
        return waiting.there

    tf.cond(waiting.there, update, lambda: waiting.there)
