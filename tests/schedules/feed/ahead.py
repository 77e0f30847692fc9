"""A schedule that only routes ids one step ahead. It tests the minimum of feed and stages."""

import dataclasses

from tf_fusedrec.embedding.lookup import bring, fetch, route
from tf_fusedrec.schedules import Schedule, Stages, planned_calls


@dataclasses.dataclass(frozen=True)
class RouteAhead(Schedule):
    stages = Stages(read=1)

    def start(self, model, batches):
        return route(planned_calls.requests(self._plan(model, batches[0], 1)))

    def step(self, model, batches, state):
        planned = self._plan(model, batches[1], 2)
        found = bring(fetch(state))
        state = route(planned_calls.requests(planned))
        with planned_calls.supplying(planned, found):
            logs = model.train_step(batches[0])
        return logs, state

    def _plan(self, model, data, steps_ahead):
        return planned_calls.plan(model, [data], steps_ahead=steps_ahead)
