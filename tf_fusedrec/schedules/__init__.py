"""Schedules of a PipelinedModel. A schedule decides when the exchanges of a training step run.

schedule.py has the records, staged_step.py and micro_batches.py the steps that they lay out, planned_calls.py the
lookups of coming batches. planning/ chooses a schedule for a cluster.

A module is imported when its first name is used, so that the records can be read before TensorFlow is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_fusedrec.exchange.model_state import average_state as average_state
    from tf_fusedrec.schedules.model import PipelinedModel as PipelinedModel
    from tf_fusedrec.schedules.planned_calls import EmbeddingCall as EmbeddingCall
    from tf_fusedrec.schedules.schedule import DualBuffer as DualBuffer
    from tf_fusedrec.schedules.schedule import FrozenWindow as FrozenWindow
    from tf_fusedrec.schedules.schedule import Nested as Nested
    from tf_fusedrec.schedules.schedule import Pipelined as Pipelined
    from tf_fusedrec.schedules.schedule import Schedule as Schedule
    from tf_fusedrec.schedules.schedule import SemiAsync as SemiAsync
    from tf_fusedrec.schedules.schedule import Stages as Stages
    from tf_fusedrec.schedules.schedule import Sync as Sync
    from tf_fusedrec.schedules.schedule import register as register

_RECORDS = ("DualBuffer", "FrozenWindow", "Nested", "Pipelined", "Schedule", "SemiAsync", "Stages", "Sync", "register")
_MODULES = {
    "EmbeddingCall": "schedules.planned_calls",
    "PipelinedModel": "schedules.model",
    "average_state": "exchange.model_state",
    **dict.fromkeys(_RECORDS, "schedules.schedule"),
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"tf_fusedrec.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
