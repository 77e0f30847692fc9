"""Losses for ranking and retrieval, sampled negatives, and the mean over ranks."""

from tf_fusedrec.losses.negatives import Sampler
from tf_fusedrec.losses.objectives import global_mean, sampled_softmax

__all__ = ["Sampler", "global_mean", "sampled_softmax"]
