"""Keras layers over ragged sequences: what the dense side of a generative recommender is built of.

Reading order: jagged (rows of different length), masks and relative_bias (which pairs see each
other, and how near they are), attention (the one function that a fused op will replace), hstu,
mmoe, positions.
"""

from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.attention import jagged_attention
from tf_fusedrec.layers.hstu import HSTU
from tf_fusedrec.layers.mmoe import MMoE
from tf_fusedrec.layers.positions import PositionEmbedding
from tf_fusedrec.layers.relative_bias import RelativeBias, TimeBuckets, time_buckets

__all__ = [
    "HSTU",
    "MMoE",
    "PositionEmbedding",
    "RelativeBias",
    "TimeBuckets",
    "jagged",
    "jagged_attention",
    "time_buckets",
]
