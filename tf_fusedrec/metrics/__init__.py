"""Keras metrics for ranking and retrieval, summed over batches and ranks. exact.py has the same over arrays."""

from tf_fusedrec.metrics.streaming import AUC, GAUC, MRR, NDCG, Calibration, HitRate, NormalizedEntropy, SummedMetric

__all__ = ["AUC", "GAUC", "MRR", "NDCG", "Calibration", "HitRate", "NormalizedEntropy", "SummedMetric"]
