"""The second moments of row-wise Adagrad, measured, and as 2D sparse parallelism predicts them.

Proposition 1 (Zhang et al., "Two-dimensional Sparse Parallelism", section 3.2): with gradients that are i.i.d. over
groups, E[v] is equal in all groups and grows at least as fast as in one group. The proof says more. Let s be the
mean gradient of a row and n the noise of the gradient over all ranks. A step adds |s|^2 + E|n|^2 to v in one group. A
group of the M-th part of the ranks has M times the variance, so it adds |s|^2 + M E|n|^2. Hence E[v] is linear in M,
and lies between its value in one group and M times that value. The upper end is the paper's Scaling Rule 1.
"""

from __future__ import annotations

import numpy as np

import tf_fusedrec as fr


def expected_moment(groups: int, of_one: np.ndarray, of_two: np.ndarray) -> np.ndarray:
    """Returns E[v] of `groups` groups, <float>[...], from E[v] of one group and of two groups with the same batches."""
    return of_one + (groups - 1) * (np.asarray(of_two) - of_one)


def mean_moment(embedding: fr.FusedEmbedding) -> float:
    """Returns the mean second moment of all rows of the layer's tables with RowWiseAdagrad. Collective."""
    found = [
        lookup.table.snapshot(name, in_hash_order=False)[1]["accumulator"]  # type: ignore[attr-defined]
        for lookup in embedding.lookups
        for name in lookup.table.names
    ]
    here = np.concatenate(found).astype(np.float64)
    total, rows = fr.collectives.all_gather(np.array([[here.sum(), len(here)]])).sum(axis=0)
    return float(total / rows)
