"""Metrics for ranking and retrieval: exact metrics over arrays, streaming metrics over batches and ranks."""

from tf_fusedrec.metrics.exact import auc, calibration, gauc, hit_rate, mrr, ndcg, normalized_entropy, rank_of_target
from tf_fusedrec.metrics.streaming import (
    AUC,
    GAUC,
    MRR,
    NDCG,
    Calibration,
    HitRate,
    NormalizedEntropy,
    SummedMetric,
    check_summable,
    summed_over_ranks,
)

__all__ = [
    "AUC",
    "GAUC",
    "MRR",
    "NDCG",
    "Calibration",
    "HitRate",
    "NormalizedEntropy",
    "SummedMetric",
    "auc",
    "calibration",
    "check_summable",
    "gauc",
    "hit_rate",
    "mrr",
    "ndcg",
    "normalized_entropy",
    "rank_of_target",
    "summed_over_ranks",
]
