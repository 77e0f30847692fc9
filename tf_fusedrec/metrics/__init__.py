"""Keras metrics for ranking and retrieval, summed over batches and ranks. exact.py has the same over arrays.

exact.py needs no TensorFlow, so the Keras metrics are loaded with the first name of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_fusedrec.metrics.streaming import (
        AUC,
        GAUC,
        MRR,
        NDCG,
        Calibration,
        HitRate,
        NormalizedEntropy,
        SummedMetric,
    )

__all__ = ["AUC", "GAUC", "MRR", "NDCG", "Calibration", "HitRate", "NormalizedEntropy", "SummedMetric"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("tf_fusedrec.metrics.streaming"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
