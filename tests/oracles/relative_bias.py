"""Oracles for layers/relative_bias.py: the float32 formula step by step, and one pair at a time. NumPy only."""

import decimal

import numpy as np


def bucket_oracle(difference, num_buckets):
    """trunc(ln(max(|d|, 1)) / 0.301), every step rounded to float32, the logarithm rounded correctly."""
    number = np.int64(max(abs(int(difference)), 1)).astype(np.float32)
    with decimal.localcontext() as context:
        context.prec = 50
        log = np.float32(float(decimal.Decimal(float(number)).ln()))
    return min(int(np.float32(log / np.float32(0.301))), num_buckets)


def pair_bias_oracle(position_weights, time_weights, asks, answers, num_targets, num_buckets):
    """Bias [L, L] of one row. asks, answers: [L] seconds."""
    length = len(answers)
    centre = len(position_weights) // 2
    bias = np.zeros((length, length))
    for i in range(length):
        for j in range(length):
            place_i, place_j = min(i, length - num_targets), min(j, length - num_targets)
            bucket = bucket_oracle(int(asks[i]) - int(answers[j]), num_buckets)
            bias[i, j] = position_weights[centre + place_j - place_i] + time_weights[bucket]
    return bias


def next_times_oracle(times, num_targets):
    """When each token of one row asks: at its successor's time; last history token and targets at their own."""
    history = len(times) - num_targets
    return [times[i + 1] if i + 1 < history else times[i] for i in range(len(times))]
