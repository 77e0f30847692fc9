"""Lengths of rows as logs have them, and the cost of a row by its length."""

from __future__ import annotations

import numpy as np

from tf_fusedrec.data import Cost

MEAN, LONGEST, SIGMA = 600, 3000, 1.0
COST = Cost(1.0, 1.0 / MEAN)


def lengths(rows: int, seed: int = 0) -> np.ndarray:
    """Returns <int64>[rows] log-normal lengths with mean MEAN, cut at LONGEST."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, rows)
    scale = 1.0
    for _ in range(30):  # the cut lowers the mean, and the scale restores it
        scale *= MEAN / np.minimum(scale * drawn, LONGEST).mean()
    return np.maximum(np.rint(np.minimum(scale * drawn, LONGEST)), 1).astype(np.int64)
