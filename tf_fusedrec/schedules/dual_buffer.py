"""Batch t+1 is routed and its rows are read while batch t computes (NestPipe, section IV); equal to sync, bit for bit.

step t        refresh t ─▶ rows t ─▶ compute t ─▶ gradients t ─▶ update t
meanwhile     read t+1 ─▶ ids t+1 ─▶ look ahead t+1, into a buffer at the owner
step t+1      refresh t+1: rows that batch t has updated are read again ─▶ rows t+1 ─▶ ...

Rows stay with their owner until they are refreshed, because rows sent earlier would be stale (section V-A). A
look-ahead changes nothing in a table (custom_ops/hash_table/cpu/look_ahead.cc). So a batch that never computes, at the
end of fit for example, leaves no trace. Between two steps, tables are as sync would have left them. Rows in the buffer
are not pinned, because pins would change evictions. The refresh searches again for rows that have moved or left.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding.group_lookup import RoutedIds
from tf_fusedrec.embedding.lookup import bring, fetch, look_ahead, route
from tf_fusedrec.ops import RowsAhead
from tf_fusedrec.schedules import stages
from tf_fusedrec.schedules.calls import embeddings_so_far
from tf_fusedrec.schedules.registry import register
from tf_fusedrec.schedules.schedule import Schedule


class LookAheadSchedule(Schedule):
    """Base of DualBuffer and Nested: routes and reads the coming batch while another one computes."""

    looks_ahead = True

    @abc.abstractmethod
    def planned(self, model: Any, data: Any, steps_ahead: int) -> list[stages.Planned]:
        """The lookups of a batch that will train in `steps_ahead` steps. Raises as stages.plan."""

    def check(self, model: Any) -> None:
        for embedding in embeddings_so_far(model):
            embedding.check_deferrable(1)

    def start(self, model: Any, batches: Sequence[Any]) -> Any:
        return _prepare(self.planned(model, batches[0], steps_ahead=1))

    def step(self, model: Any, batches: Sequence[Any], state: Any) -> tuple[dict[str, tf.Tensor], Any]:
        contexts = fetch(*state)
        # Ops on one table run in program order: the buffer is filled between this refresh and the update below. With
        # few threads, work on the coming batch could also delay the refresh, for which this batch waits.
        with tf.control_dependencies([context.answer.rows for context in contexts]):
            planned = self.planned(model, batches[1], steps_ahead=2)
            state = _prepare(planned)
        found = bring(*stages.by_micro_batch(planned, contexts))
        with stages.supplying(planned, found):
            logs = model.train_step(batches[0])
        return logs, state


def _prepare(planned: Sequence[stages.Planned]) -> tuple[list[RoutedIds], list[RowsAhead]]:
    routed = route(stages.requests(planned))
    return routed, look_ahead(routed)


@register("dual_buffer")
@dataclasses.dataclass(frozen=True)
class DualBuffer(LookAheadSchedule):
    """Hides the input, deduplication, routing and table lookups of a batch behind the compute of the one before.

    The result equals Sync bit for bit, in rows, slots, counters and evictions. `model.embedding_inputs` gives the
    lookups of a batch. A user's own loop that calls `model.train_step` has no batch ahead, and hides nothing.
    `model.make_train_function()` returns a step that takes an iterator.

    Raises:
      ValueError: in fit: a model without FusedEmbedding, with backend "tfra", or whose lookups are unknown.
    """

    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        return keras.Model.train_step(model, data)

    def get_config(self) -> dict[str, Any]:
        return {}

    def planned(self, model: Any, data: Any, steps_ahead: int) -> list[stages.Planned]:
        return stages.plan(model, [data], steps_ahead=steps_ahead)
