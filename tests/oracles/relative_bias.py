"""Oracles for layers/relative_bias.py: the float32 formula step by step. NumPy only."""

import decimal

import numpy as np


def bucket_oracle(difference, num_buckets):
    """trunc(ln(max(|d|, 1)) / 0.301), every step rounded to float32, the logarithm rounded correctly."""
    number = np.int64(max(abs(int(difference)), 1)).astype(np.float32)
    with decimal.localcontext() as context:
        context.prec = 50
        log = np.float32(float(decimal.Decimal(float(number)).ln()))
    return min(int(np.float32(log / np.float32(0.301))), num_buckets)
