"""Where a batch is cut into micro-batches: the first and the last are half as large as those between.

What a schedule of micro-batches cannot hide is the rows of the first, before which nothing computes, and the gradients
of the last, behind which nothing does (NestPipe, section V, cuts evenly: 1 / M of the exchange). Halves of those two
leave 1 / (2 M - 2) of it, for compute that is about as long as the exchange or longer.
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
    shares = [2 - (i in (0, micro_batches - 1)) for i in range(micro_batches)]
    each = tf.minimum(samples, micro_batches) if tf.is_tensor(samples) else min(samples, micro_batches)
    return [
        each * i // micro_batches + (samples - each) * sum(shares[:i]) // sum(shares) for i in range(micro_batches + 1)
    ]
