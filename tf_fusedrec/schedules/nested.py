"""FrozenWindow inside DualBuffer (NestPipe): lookups hide behind the batch before, exchanges behind micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.schedules import stages
from tf_fusedrec.schedules.dual_buffer import LookAheadSchedule
from tf_fusedrec.schedules.frozen_window import FrozenWindow
from tf_fusedrec.schedules.micro_batch import cut
from tf_fusedrec.schedules.registry import register


@register("nested")
@dataclasses.dataclass(frozen=True)
class Nested(LookAheadSchedule):
    """The micro-batches of FrozenWindow, whose ids are routed and whose rows are read while the batch before computes.

    Equal to FrozenWindow(micro_batches) bit for bit; what that says of micro-batches holds here.

    Args:
      micro_batches: M >= 1.

    Raises:
      ValueError: as those of FrozenWindow and of DualBuffer.
    """

    micro_batches: int

    def __post_init__(self):
        FrozenWindow(self.micro_batches)  # which checks it

    def check(self, model: Any) -> None:
        FrozenWindow(self.micro_batches).check(model)

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        return FrozenWindow(self.micro_batches).train_step(model, data)

    def planned(self, model: Any, data: Any, steps_ahead: int) -> list[stages.Planned]:
        pieces = cut(data, self.micro_batches)
        return stages.plan(model, pieces, steps_ahead=steps_ahead)
