"""Schedules of a PipelinedModel. A schedule decides when the exchanges of a training step run.

schedule.py has the records, staged_step.py and micro_batches.py the steps that they lay out, planned_calls.py the
lookups of coming batches. planning/ chooses a schedule for a cluster.
"""

from tf_fusedrec.exchange.model_state import average_state
from tf_fusedrec.schedules.model import PipelinedModel
from tf_fusedrec.schedules.planned_calls import EmbeddingCall
from tf_fusedrec.schedules.schedule import (
    DualBuffer,
    FrozenWindow,
    Nested,
    Pipelined,
    Schedule,
    SemiAsync,
    Sync,
    register,
)
from tf_fusedrec.schedules.staged_step import Stages
from tf_fusedrec.schedules.uneven_batches import weigh_by_samples

__all__ = [
    "DualBuffer",
    "EmbeddingCall",
    "FrozenWindow",
    "Nested",
    "Pipelined",
    "PipelinedModel",
    "Schedule",
    "SemiAsync",
    "Stages",
    "Sync",
    "average_state",
    "register",
    "weigh_by_samples",
]
