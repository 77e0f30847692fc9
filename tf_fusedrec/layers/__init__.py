"""Keras layers over ragged sequences and feature vectors, the dense side of a recommender.

Reading order: jagged (rows of different length), positions (the input), hstu with relative_bias and gated_output, fuxi,
sasrec, mmoe, interactions (of dense vectors). base.py has the states that servers keep of users.
tf_fusedrec/ops/attention.py computes the attention. stock_attention.py replaces it for serving without our ops.
"""

from tf_fusedrec.layers.fuxi import FuXi
from tf_fusedrec.layers.hstu import HSTU
from tf_fusedrec.layers.interactions import DotInteraction, FeatureCross
from tf_fusedrec.layers.jagged import interleave
from tf_fusedrec.layers.mmoe import MMoE
from tf_fusedrec.layers.positions import PositionEmbedding, PositionTimeEmbedding
from tf_fusedrec.layers.sasrec import SASRec
from tf_fusedrec.layers.sync_batch_normalization import SyncBatchNormalization
from tf_fusedrec.ops import (
    BucketTable,
    OutputGate,
    RelativeBias,
    TimeFunction,
    bias_attention,
    jagged_attention,
    sequence_times,
)

__all__ = [
    "BucketTable",
    "DotInteraction",
    "FeatureCross",
    "FuXi",
    "HSTU",
    "MMoE",
    "OutputGate",
    "PositionEmbedding",
    "PositionTimeEmbedding",
    "RelativeBias",
    "SASRec",
    "SyncBatchNormalization",
    "TimeFunction",
    "bias_attention",
    "interleave",
    "jagged_attention",
    "sequence_times",
]
