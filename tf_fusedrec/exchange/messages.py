"""One all-to-all for several tensors: messages joined and split again, and copies of a tensor for each rank.

The ids of all lookups of a step always travel in one all-to-all, which saves its fixed cost. Apart, the ids of
micro-batches would also overtake each other, and rows of the first would wait for ids of the last. Buffers are padded
to few sizes, see custom_ops/common/bucket.h.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives

# <int64>, a block for each rank, and the entries of each <int32>[R].
Message = tuple[tf.Tensor, tf.Tensor]


def join(parts: Sequence[Message]) -> Message:
    """Joins several messages. Each rank's block holds its blocks of all messages, in their order.

    Args:
      parts: For each lookup <int64>[P_i], blocks of [counts[S_i] | ids] as ops.rank_partition makes them. Entries
        behind the last block are padding.

    Returns:
      <int64>[P], padded to a bucketed size, and the entries of each block <int32>[R].
    """
    if len(parts) == 1:
        return parts[0]
    return ops.join_messages(*zip(*parts))


def split(message: tf.Tensor, splits: tf.Tensor, segments: Sequence[int]) -> list[Message]:
    """Splits a received message into those that `join` joined. Headers of counts give the length of each block.

    Args:
      message: <int64>, blocks of all sources, not padded.
      splits: <int32>[R], entries of each source's block.
      segments: S_i of each message.

    Returns:
      For each message <int64>[V_i + R * S_i], not padded, and the entries of each block <int32>[R].

    Raises:
      InvalidArgumentError: several messages, of which a header does not agree with its block.
    """
    if len(segments) == 1:
        return [(message, splits)]
    return list(zip(*ops.split_messages(message, splits, segments=segments)))


def all_to_each(tensor: tf.Tensor, *, name: str, ranks: collectives.Ranks) -> tuple[tf.Tensor, tf.Tensor]:
    """Gathers tensors, whose first dimensions may differ, on all of `ranks`, in rank order. Collective.

    An all-to-all of equal parts returns the lengths, and its padding does not travel. The padding of an all-gather
    would travel, and a copy as large as the copies here would cut it out again. Without padding, a tensor of another
    size in every step misses Horovod's response cache, and all ranks negotiate anew. It also needs a second collective
    for the lengths.

    Args:
      tensor: [n, ...].
      name: Name of the collective, see collectives.all_to_all.
      ranks: The R ranks that take part.

    Returns:
      The gathered tensor [sum of all n, ...] and each n, <int32>[R].
    """
    length = tf.shape(tensor)[0]
    if ranks.size == 1:
        return tensor, tf.reshape(length, [1])
    total = ranks.size * length
    padding = tf.zeros(tf.concat([[bucketed(total) - total], tf.shape(tensor)[1:]], axis=0), tensor.dtype)
    copies = tf.concat([*[tensor] * ranks.size, padding], axis=0)
    return collectives.all_to_all(copies, tf.fill([ranks.size], length), name=name, ranks=ranks)


def bucketed(n: tf.Tensor) -> tf.Tensor:
    """<int32>[] >= n, one of few sizes; see custom_ops/common/bucket.h."""
    quarters = tf.math.log(tf.cast(tf.maximum(n, 1024), tf.float64) / 1024) / tf.math.log(tf.constant(2.0, tf.float64))
    step = 256 * 2 ** tf.cast(tf.math.floor(quarters), tf.int32)
    return -(-tf.maximum(n, 1) // step) * step
