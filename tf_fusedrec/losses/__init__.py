"""Losses for ranking and retrieval, sampled negatives, and the mean over ranks."""

from tf_fusedrec.losses.objectives import (
    COLLISION_LOGIT,
    global_mean,
    sampled_softmax,
    sampled_softmax_of_catalogue,
    total_weight,
    weighted_binary_cross_entropy,
)

__all__ = [
    "COLLISION_LOGIT",
    "global_mean",
    "sampled_softmax",
    "sampled_softmax_of_catalogue",
    "total_weight",
    "weighted_binary_cross_entropy",
]
