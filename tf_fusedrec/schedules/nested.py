"""FrozenWindow inside DualBuffer (NestPipe): lookups hide behind the batch before, exchanges behind micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data.batches import cut
from tf_fusedrec.schedules import planned_calls
from tf_fusedrec.schedules.dual_buffer import LookAheadSchedule, check_lead
from tf_fusedrec.schedules.micro_batches import FrozenWindow
from tf_fusedrec.schedules.registry import register


@register("nested")
@dataclasses.dataclass(frozen=True)
class Nested(LookAheadSchedule):
    """FrozenWindow's micro-batches. Their ids are routed and their rows read while earlier batches compute.

    The result equals FrozenWindow(micro_batches) bit for bit. The remarks there on micro-batches hold here.

    Args:
      micro_batches: M >= 1.
      lead: As for DualBuffer.

    Raises:
      ValueError: as FrozenWindow and DualBuffer.
    """

    micro_batches: int
    lead: int = 1

    def __post_init__(self) -> None:
        FrozenWindow(self.micro_batches)  # raises for a wrong number
        check_lead(self.lead)

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        return FrozenWindow(self.micro_batches).train_step(model, data)

    def planned(self, model: Any, data: Any, steps_ahead: int) -> list[planned_calls.Planned]:
        pieces = cut(data, self.micro_batches)
        return planned_calls.plan(model, pieces, steps_ahead=steps_ahead)
