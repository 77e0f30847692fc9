"""fr.collectives: exchanges among the ranks of a job, and the optimizer of dense weights."""

from tf_fusedrec.exchange.collectives import (
    all_gather,
    all_gather_object,
    barrier,
    broadcast_variables,
    exchange_name,
)
from tf_fusedrec.exchange.dense_gradients import distributed_optimizer

__all__ = [
    "all_gather", "all_gather_object", "barrier", "broadcast_variables", "distributed_optimizer", "exchange_name"
]  # fmt: skip
