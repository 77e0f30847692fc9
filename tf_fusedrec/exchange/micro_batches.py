"""Where a batch is cut into micro-batches: the first and the last are half as large as those between.

A schedule of micro-batches cannot hide two parts of the exchange. Nothing computes before the rows of the first
micro-batch, and nothing behind the gradients of the last. NestPipe (section V) cuts evenly: 1 / M of the exchange.
Halves of those two leave 1 / (2 M - 2) of it, for compute that is about as long as the exchange or longer.

The rank with the most rows sets the time of an exchange. A batch is therefore cut by tokens, where its samples have
numbers of tokens. Ranks with equal tokens in a batch then have nearly equal tokens in each micro-batch.
"""

from __future__ import annotations

from typing import Any

from tf_fusedrec._tf_compat import tf


def piece_bounds(samples: Any, micro_batches: int) -> list[Any]:
    """Bounds of the pieces of a batch: piece i is samples [bounds[i], bounds[i + 1]).

    Every piece has a sample before one has two, so that none is empty unless there are fewer samples than pieces.

    Args:
      samples: B, an int or <int64>[].
      micro_batches: M >= 1.

    Returns:
      M + 1 of the type of `samples`, the first 0 and the last B.

    Example:
      piece_bounds(12, 4)  ->  [0, 2, 6, 10, 12]
    """
    shares = _shares(micro_batches)
    each = tf.minimum(samples, micro_batches) if tf.is_tensor(samples) else min(samples, micro_batches)
    return [
        each * i // micro_batches + (samples - each) * sum(shares[:i]) // sum(shares) for i in range(micro_batches + 1)
    ]


def token_bounds(tokens: tf.Tensor, micro_batches: int) -> list[tf.Tensor]:
    """Bounds of the pieces of a batch whose samples have different numbers of tokens.

    The tokens before a bound are as close as possible to the share of the pieces before it. A bound is off by at most
    half of a sample. Every piece has a sample before one has two, as in `piece_bounds`.

    Args:
      tokens: <int64>[B], tokens of each sample, >= 1.
      micro_batches: M >= 1.

    Returns:
      M + 1 bounds <int64>[], the first 0 and the last B.

    Example:
      token_bounds([1, 1, 4, 2, 2, 2], 3)  ->  [0, 2, 4, 6], pieces of 2, 6 and 4 tokens for shares of 3, 6 and 3
    """
    shares = _shares(micro_batches)
    ends = tf.cumsum(tokens)
    # Where the closest bound moves from before a sample to behind it, times 2.
    middles = 2 * ends - tokens
    wanted = 2 * tf.reduce_sum(tokens) * tf.constant([sum(shares[:i]) for i in range(micro_batches + 1)], tf.int64)
    closest = tf.searchsorted(middles * sum(shares), wanted, out_type=tf.int64)
    samples = tf.size(tokens, tf.int64)
    each = tf.minimum(samples, micro_batches)
    first = [each * i // micro_batches for i in range(micro_batches + 1)]  # samples that the pieces before i must have
    bounds = [first[0]]
    for i in range(1, micro_batches + 1):
        least = bounds[-1] + first[i] - first[i - 1]
        bounds.append(tf.clip_by_value(closest[i], least, samples - each + first[i]))
    return bounds


def _shares(micro_batches: int) -> list[int]:
    """Shares of the pieces in a batch, in halves of the share of a whole piece."""
    return [2 - (i in (0, micro_batches - 1)) for i in range(micro_batches)]
