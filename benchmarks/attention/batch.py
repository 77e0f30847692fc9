"""The batch of benchmarks.attention: lengths, tokens, times, and the op and its peers on them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.attention.padded import Peer, Rows, Weights, groups_of, padded
from tf_fusedrec import ops, tf
from tf_fusedrec.layers import bucket_thresholds

HEADS, DIM = 4, 64
LONGEST, MEAN = 3000, 600
BUCKETS = 128
EDGES = (64, 128, 256, 512, 1024, 2048, LONGEST)  # longest rows of the buckets of the bucketed peer
MOST_PAIRS = 4 * LONGEST**2  # pairs per head that a padded peer computes at a time


def long_tailed(rows: int) -> np.ndarray:
    """Returns lengths with maximum LONGEST and mean MEAN, at the quantiles of a lognormal law (MTGRBoost, 6.1)."""
    normal = statistics.NormalDist()
    tail = np.array([normal.inv_cdf((row + 0.5) / rows) for row in range(rows)])
    low, high = 0.0, 5.0
    for _ in range(60):  # a longer tail makes the others shorter
        sigma = (low + high) / 2
        lengths = LONGEST * np.exp(sigma * (tail - tail[-1]))
        low, high = (sigma, high) if lengths.mean() > MEAN else (low, sigma)
    return np.random.default_rng(0).permutation(np.maximum(np.round(lengths), 1).astype(np.int64))


class Batch:
    """Tokens of some rows. `bias` adds the position and time bias of the research HSTU."""

    def __init__(self, lengths: np.ndarray, bias: bool):
        random = np.random.default_rng(1)
        self.lengths, self.longest = lengths, int(lengths.max())
        self.splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = int(self.splits[-1])
        self.arrays = [random.normal(size=(tokens, HEADS, DIM)).astype(np.float32) * DIM**-0.25 for _ in range(4)]
        # Sessions: half of the events follow within a minute, the others hours later.
        gaps = np.where(random.random(tokens) < 0.5, random.exponential(60, tokens), random.exponential(40_000, tokens))
        stamps = 1_500_000_000 + np.cumsum(gaps).astype(np.int64)
        self.times = ops.sequence_times(tf.RaggedTensor.from_row_splits(stamps, self.splits))
        self.thresholds = bucket_thresholds(BUCKETS)
        self.scale = 1.0 / self.longest
        self.weights = None
        if bias:
            drawn = [random.normal(size=n).astype(np.float32) * 0.1 for n in (2 * self.longest - 1, BUCKETS + 1)]
            self.weights = Weights(*map(tf.constant, drawn))

    def pairs(self) -> float:
        """Returns the number of visible pairs, over all heads."""
        return HEADS * float(np.sum(self.lengths * (self.lengths + 1) // 2))

    def flops(self, passes: str) -> float:
        """Returns the useful FLOPs. A pair has two products forward, and five backward with the scores again."""
        return self.pairs() * 2 * DIM * {"fwd": 2, "fwd_bwd": 7}[passes]

    def ours(self) -> dict[str, Callable[[], Any]]:
        """Returns calls of the op by name: "fwd", "fwd_bwd"."""
        query, key, value, grads = map(tf.constant, self.arrays)
        splits, weights = tf.constant(self.splits), list(self.weights or ())

        def attend(query, key, value, weights):
            bias = None
            if weights:
                table = ops.BucketTable(weights[1], tf.constant(self.thresholds))
                bias = ops.RelativeBias(weights[0], table, self.times)
            return ops.jagged_attention(query, key, value, splits, scale=self.scale, bias=bias)

        def both():
            watched = [query, key, value, *weights]
            with tf.GradientTape() as tape:
                tape.watch(watched)
                out = attend(query, key, value, weights)
            return out, tape.gradient(out, watched, grads)

        return {"fwd": tf.function(lambda: attend(query, key, value, weights)), "fwd_bwd": tf.function(both)}

    def peer(self, xla: bool, bucketed: bool = False, most_pairs: int = MOST_PAIRS) -> tuple[Peer, list[list[int]]]:
        """Returns the padded peer and the rows of each of its batches."""
        groups = groups_of(self.lengths, EDGES if bucketed else (self.longest,), most_pairs)
        if not bucketed:  # padded to the longest of all
            size = max(1, most_pairs // self.longest**2)
            order = [row for group in groups for row in group]
            groups = [order[begin : begin + size] for begin in range(0, len(order), size)]
        return Peer([self._rows(group, bucketed) for group in groups], self.weights, self.scale, xla), groups

    def _rows(self, rows: list[int], bucketed: bool) -> Rows:
        length = int(self.lengths[rows].max()) if bucketed else self.longest
        query, key, value, grads = map(tf.constant, padded(self.arrays, self.splits, rows, length))
        buckets = np.zeros((len(rows), length, length) if self.weights else (0, 0, 0), np.int32)
        for place, row in enumerate(rows if self.weights else ()):
            asks, answers = (times.numpy()[self.splits[row] : self.splits[row + 1]] for times in self.times)
            found = np.searchsorted(self.thresholds, np.abs(asks[:, None] - answers[None, :]), side="right")
            buckets[place, : len(asks), : len(asks)] = found
        return Rows(query, key, value, grads, tf.constant(buckets))
