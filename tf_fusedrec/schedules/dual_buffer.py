"""Coming batches are routed and read while batch t computes (NestPipe, section IV); equal to sync, bit for bit.

step t        refresh t ─▶ rows t ─▶ compute t ─▶ gradients t ─▶ update t
meanwhile     batch t+lead is read
              ids of t+1, with lead > 1 of t+2, ─▶ owners
              look ahead t+1, into a buffer at the owner
step t+1      refresh t+1: rows that batch t has updated are read again ─▶ rows t+1 ─▶ ...

With lead 1 the three stages of a coming batch run one after another inside one step. With lead 2 ids and look-ahead
work on different batches side by side, and with lead 3 all three do. A step is as long as the longest stage. NestPipe's
fifth stage copies a batch to the device: lead 4 reads one batch more.

Rows stay with their owner until they are refreshed, because rows sent earlier would be stale (section V-A). A
look-ahead changes nothing in a table (custom_ops/hash_table/cpu/look_ahead.cc). So a batch that never computes, at the
end of fit for example, leaves no trace. Between two steps, tables are as sync would have left them. Rows in the buffer
are not pinned, because pins would change evictions. The refresh searches again for rows that have moved or left.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import embeddings_of, tables_in
from tf_fusedrec.embedding.features import placing_ids
from tf_fusedrec.embedding.lookup import bring, fetch, look_ahead, route
from tf_fusedrec.embedding.routed_ids import RoutedIds
from tf_fusedrec.ops import RowsAhead
from tf_fusedrec.schedules import planned_calls
from tf_fusedrec.schedules.registry import register
from tf_fusedrec.schedules.schedule import Schedule

LARGEST_LEAD = 4  # NestPipe's five stages work on five batches


class State(NamedTuple):
    """The work on coming batches that passes from step to step."""

    routes: Sequence[Sequence[RoutedIds]]  # ids at their owners, by batch, next batch first
    rows_ahead: Sequence[RowsAhead]  # rows of the next batch


class LookAheadSchedule(Schedule):
    """Base of DualBuffer and Nested: routes and reads coming batches while another one computes."""

    looks_ahead = True

    @abc.abstractmethod
    def planned(self, model: Any, data: Any, steps_ahead: int) -> list[planned_calls.Planned]:
        """The lookups of a batch that will train in `steps_ahead` steps. Raises as planned_calls.plan."""

    @property
    def routes_ahead(self) -> int:
        """Distance of the batch whose ids travel to the batch that computes."""
        return min(self.lead, 2)

    def check(self, model: Any) -> None:
        for embedding in embeddings_of(model):
            embedding.check_deferrable(1)

    def _planned(self, model: Any, data: Any, steps_ahead: int) -> list[planned_calls.Planned]:
        with placing_ids(tables_in(model)):
            return self.planned(model, data, steps_ahead)

    def start(self, model: Any, batches: Sequence[Any]) -> State:
        plans = [self._planned(model, batches[i], steps_ahead=i + 1) for i in range(self.routes_ahead)]
        routes = [route(*planned_calls.waves(planned)) for planned in plans]
        return State(routes, look_ahead(routes[0]))

    def step(self, model: Any, batches: Sequence[Any], state: State) -> tuple[dict[str, tf.Tensor], State]:
        contexts = fetch(state.routes[0], state.rows_ahead)
        # Ops on one table run in program order: the buffer is filled between this refresh and the update below. With
        # few threads, work on coming batches could also delay the refresh, for which this batch waits.
        with tf.control_dependencies([context.answer.rows for context in contexts]):
            planned = self._planned(model, batches[self.routes_ahead], steps_ahead=self.routes_ahead + 1)
            routes = [*state.routes[1:], route(*planned_calls.waves(planned))]
            state = State(routes, look_ahead(routes[0]))
        found = bring(*planned_calls.by_micro_batch(planned, contexts))
        with planned_calls.supplying(planned, found):
            logs = model.train_step(batches[0])
        return logs, state


def check_lead(lead: Any) -> None:
    """Raises ValueError unless `lead` is an int from 1 to LARGEST_LEAD."""
    if not isinstance(lead, int) or isinstance(lead, bool) or not 1 <= lead <= LARGEST_LEAD:
        raise ValueError(
            f"lead is {lead!r}, and must be an int from 1 to {LARGEST_LEAD}. Remedy: 1 for one batch ahead, 3 where "
            "reading, routing and looking up a batch take long."
        )


@register("dual_buffer")
@dataclasses.dataclass(frozen=True)
class DualBuffer(LookAheadSchedule):
    """Hides the input, deduplication, routing and table lookups of coming batches behind the compute.

    The result equals Sync bit for bit, in rows, slots, counters and evictions. `model.embedding_inputs` gives the
    lookups of a batch. A user's own loop that calls `model.train_step` has no batch ahead, and hides nothing.
    `model.make_train_function()` returns a step that takes an iterator.

    Memory: `lead` batches of input; the routed ids of min(lead, 2) batches, 8 bytes for each unique id at its owner;
    one buffer of rows, whatever the lead.

    Args:
      lead: Number of batches that are read before the first one computes, 1 to 4. Data may have fewer batches.

    Raises:
      ValueError: another lead; in fit: a model without FusedEmbedding, with backend "tfra", or whose lookups are
        unknown.
    """

    lead: int = 1

    def __post_init__(self) -> None:
        check_lead(self.lead)

    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        return keras.Model.train_step(model, data)

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def planned(self, model: Any, data: Any, steps_ahead: int) -> list[planned_calls.Planned]:
        return planned_calls.plan(model, [data], steps_ahead=steps_ahead)
