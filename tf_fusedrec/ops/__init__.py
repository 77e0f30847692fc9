"""The Python face of the custom ops: check, call, gradient, docstring. Knows no Keras, no ranks, no tables."""

from tf_fusedrec.ops.fuse_ids import FusedIds, fuse_ids
from tf_fusedrec.ops.initial_rows import initial_rows
from tf_fusedrec.ops.rank_partition import RankedIds, ReceivedIds, rank_partition, unpack_message
from tf_fusedrec.ops.recovery import recover, recover_grad
from tf_fusedrec.ops.segment_unique import UniqueIds, segment_unique

__all__ = [
    "FusedIds",
    "RankedIds",
    "ReceivedIds",
    "UniqueIds",
    "fuse_ids",
    "initial_rows",
    "rank_partition",
    "recover",
    "recover_grad",
    "segment_unique",
    "unpack_message",
]
