"""Rows come before the update of the batch before: semi-asynchronous training (TurboGR, section 4.2.2)."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec.schedules.in_flight import InFlight
from tf_fusedrec.schedules.registry import register


@register("semi_async")
@dataclasses.dataclass(frozen=True)
class SemiAsync(InFlight):
    """All exchanges of rows and gradients run under the dense compute of another batch; staleness exactly one step.

    While batch t computes, gradients of batch t-1 travel and its update of the tables is made; behind it, ids and rows
    of batch t+1 travel. So rows of every batch but the first lack one update, that of the batch before, whatever its
    optimizer; the update itself is made to the newest rows. Dense weights are trained synchronously. Convergence:
    TurboGR, appendix C; for ids that seldom come twice in a row the difference is small.

    Gradients that wait are applied, and nothing else changes, before evaluation, predictions, saves, checkpoints and at
    the end of fit; in a loop of one's own `model.drain()` does so. A run that resumes from a checkpoint looks its first
    batch up anew, with no update missing. Outside of fit and make_train_function, as in train_on_batch, steps are those
    of Sync.

    Raises:
      ValueError: in fit, a model without FusedEmbedding, with backend "tfra", or whose lookups cannot be told (see
        PipelinedModel.embedding_inputs); tables whose rows move, without lookups_per_update=2.
    """

    routes_ahead = 1
    rows_ahead = True
    updates_late = True

    def get_config(self) -> dict[str, Any]:
        return {}
