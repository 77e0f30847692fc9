"""A schedule that only sends ids one step ahead. It tests the minimum of a schedule of your own."""

import dataclasses

from tf_fusedrec.schedules import Schedule, Stages, planned_calls


@dataclasses.dataclass(frozen=True)
class RouteAhead(Schedule):
    stages = Stages(read=1)

    def start(self, model, batches):
        return self._plan(model, batches[0], 1).send_ids()

    def step(self, model, batches, state):
        following = self._plan(model, batches[1], 2)
        current = state.look_up()
        rows, state = current.return_rows(), following.send_ids()
        with planned_calls.running(model, current, rows):
            logs = model.train_step(batches[0])
        return logs, state

    def _plan(self, model, data, steps_ahead):
        return planned_calls.plan_step(model, [data], steps_ahead=steps_ahead)
