"""Lengths of rows for the attention benchmarks on a GPU."""

from __future__ import annotations

import numpy as np

TOKENS = 1 << 16


def lengths_of_rows(random: np.random.Generator, longest: int) -> list[int]:
    """Draws lengths between longest / 2 and longest until their sum reaches TOKENS."""
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(int(random.integers(longest // 2, longest + 1)))
    return lengths
