"""Semi-asynchronous training: rows are read before the previous batch has updated them (TurboGR, section 4.2.2)."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec.schedules.in_flight import InFlight
from tf_fusedrec.schedules.registry import register


@register("semi_async")
@dataclasses.dataclass(frozen=True)
class SemiAsync(InFlight):
    """All exchanges of rows and gradients run under the dense compute of another batch. The staleness is one step.

    While batch t computes, gradients of batch t-1 travel and update the tables; then ids and rows of batch t+1 travel.
    So rows of every batch but the first lack exactly the update of the batch before, whatever the optimizer. The update
    itself changes the newest rows. Dense weights are trained synchronously. TurboGR's appendix C has the convergence.
    The difference is small for ids that seldom come in two batches one after another.

    Waiting gradients are applied before evaluation, predictions, saves and checkpoints, and at the end of fit. A user's
    own loop calls `model.drain()`. A run that resumes from a checkpoint looks its first batch up anew, with no update
    missing. Outside of fit and make_train_function, as in train_on_batch, steps are steps of Sync.

    Raises:
      ValueError: in fit, a model without FusedEmbedding, with backend "tfra", or whose lookups are unknown (see
        PipelinedModel.embedding_inputs); tables whose rows move, without lookups_per_update=2.
    """

    routes_ahead = 1
    rows_ahead = True
    updates_late = True

    def get_config(self) -> dict[str, Any]:
        return {}
