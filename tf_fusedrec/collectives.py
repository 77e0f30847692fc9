"""fr.collectives: the ranks of a job, their collectives, and the optimizer of dense weights."""

from tf_fusedrec.exchange.collectives import (
    Ranks,
    all_gather,
    all_gather_object,
    all_reduce_sum,
    all_to_all,
    among,
    barrier,
    broadcast_variables,
    check_init,
    init,
    launched_size,
    rank,
    size,
    world,
)  # fmt: skip
from tf_fusedrec.exchange.dense_gradients import distributed_optimizer
from tf_fusedrec.exchange.model_state import equal_start

__all__ = [
    "Ranks", "all_gather", "all_gather_object", "all_reduce_sum", "all_to_all", "among", "barrier",
    "broadcast_variables", "check_init", "distributed_optimizer", "equal_start", "init", "launched_size", "rank",
    "size", "world",
]  # fmt: skip
