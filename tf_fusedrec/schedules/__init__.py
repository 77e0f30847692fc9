"""Schedules of a PipelinedModel, one file each. A schedule decides when the exchanges of a training step run.
planning/ chooses one for a cluster."""

from tf_fusedrec.data.batches import cut
from tf_fusedrec.exchange.model_state import average_state
from tf_fusedrec.schedules.dual_buffer import DualBuffer
from tf_fusedrec.schedules.micro_batches import FrozenWindow
from tf_fusedrec.schedules.model import PipelinedModel
from tf_fusedrec.schedules.nested import Nested
from tf_fusedrec.schedules.pipelined import Pipelined
from tf_fusedrec.schedules.planned_calls import EmbeddingCall
from tf_fusedrec.schedules.registry import register
from tf_fusedrec.schedules.schedule import Schedule
from tf_fusedrec.schedules.semi_async import SemiAsync
from tf_fusedrec.schedules.sync import Sync
from tf_fusedrec.schedules.uneven_batches import MeanOverSamples, MicroBatch, weigh_by_samples

__all__ = [
    "DualBuffer",
    "EmbeddingCall",
    "FrozenWindow",
    "MeanOverSamples",
    "MicroBatch",
    "Nested",
    "Pipelined",
    "PipelinedModel",
    "Schedule",
    "SemiAsync",
    "Sync",
    "average_state",
    "cut",
    "register",
    "weigh_by_samples",
]
