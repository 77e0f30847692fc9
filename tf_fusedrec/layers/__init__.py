"""Keras layers over ragged sequences, the dense side of a generative recommender.

Reading order: jagged (rows of different length), positions (the input), hstu with relative_bias and gated_output, fuxi,
sasrec, mmoe, attention_state (for servers that keep users' states). tf_fusedrec/ops/attention.py computes the
attention. stock_attention.py replaces it for serving without our ops.
"""

from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.base import AttentionState
from tf_fusedrec.layers.fuxi import FuXi
from tf_fusedrec.layers.gated_output import GatedOutput
from tf_fusedrec.layers.hstu import HSTU
from tf_fusedrec.layers.jagged import visible_keys
from tf_fusedrec.layers.mmoe import MMoE
from tf_fusedrec.layers.positions import PositionEmbedding, PositionTimeEmbedding
from tf_fusedrec.layers.relative_bias import BiasWeights, bucket_thresholds
from tf_fusedrec.layers.sasrec import SASRec
from tf_fusedrec.layers.stock_attention import FUSED, STOCK
from tf_fusedrec.layers.sync_batch_normalization import SyncBatchNormalization
from tf_fusedrec.ops import (
    BucketTable,
    RelativeBias,
    SequenceTimes,
    TimeFunction,
    bias_attention,
    jagged_attention,
    sequence_times,
)

__all__ = [
    "FUSED",
    "HSTU",
    "STOCK",
    "AttentionState",
    "BiasWeights",
    "BucketTable",
    "FuXi",
    "GatedOutput",
    "MMoE",
    "PositionEmbedding",
    "PositionTimeEmbedding",
    "RelativeBias",
    "SASRec",
    "SequenceTimes",
    "SyncBatchNormalization",
    "TimeFunction",
    "bias_attention",
    "bucket_thresholds",
    "jagged",
    "jagged_attention",
    "sequence_times",
    "visible_keys",
]
