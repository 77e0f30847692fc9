"""One all-to-all for several tensors: messages joined and split again, and copies of a tensor for each rank.

Buffers are padded to few sizes, see custom_ops/common/bucket.h.

Two ranks on a quiet loop-back of two cores needed this many ms (median) from ids to routes, joined : apart:

    ids of each lookup and rank      1,000         10,000        100,000
    2 lookups                        1.9 : 1.9     3.6 : 3.7     16 : 13
    8 lookups                        2.1 : 4.7     5.0 : 8.2     53 : 41

Joining saves the fixed cost of an all-to-all and copies the ids twice more, which costs more than it saves for very
many ids. A loop-back has less latency than any network, so joining pays more elsewhere. Its loss is small beside the
rows: 3 ms for 2 x 100,000 ids, whose rows and gradients (64 columns of float32, half of them for the other rank) take
41 ms at 10 Gbit/s. So the ids of all lookups always travel in one all-to-all. Apart, the ids of micro-batches would
also overtake each other, and rows of the first would wait for ids of the last.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    entries = tf.stack([splits for _, splits in parts], axis=1)  # [R, lookups]
    base = tf.cumsum(tf.stack([tf.size(message) for message, _ in parts]), exclusive=True)
    begins = base + tf.cumsum(entries, axis=0, exclusive=True)
    total = tf.reduce_sum(entries)
    padding = tf.zeros([bucketed(total) - total], tf.int32)
    order = tf.concat([_ranges(begins, entries), padding], axis=0)
    return tf.gather(tf.concat([message for message, _ in parts], axis=0), order), tf.reduce_sum(entries, axis=1)


def split(message: tf.Tensor, splits: tf.Tensor, segments: Sequence[int]) -> list[Message]:
    """Splits a received message into those that `join` joined. Headers of counts give the length of each block.

    Args:
      message: <int64>, blocks of all sources, not padded.
      splits: <int32>[R], entries of each source's block.
      segments: S_i of each message.

    Returns:
      For each message <int64>[V_i + R * S_i], not padded, and the entries of each block <int32>[R].
    """
    if len(segments) == 1:
        return [(message, splits)]
    begins, left = tf.cumsum(splits, exclusive=True), splits
    parts = []
    for i, count in enumerate(segments):
        entries = left  # ops.unpack_message checks the header of the last one
        if i + 1 < len(segments):
            header = tf.gather(message, begins[:, tf.newaxis] + tf.range(count))
            entries = count + tf.cast(tf.reduce_sum(header, axis=1), tf.int32)
        parts.append((tf.gather(message, _ranges(begins, entries)), entries))
        begins, left = begins + entries, left - entries
    return parts


def _ranges(begins: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """The concatenated ranges [begin, begin + length), <int32>."""
    begins, lengths = tf.reshape(begins, [-1]), tf.reshape(lengths, [-1])
    return tf.ragged.range(begins, begins + lengths).values


def all_to_each(tensor: tf.Tensor, *, name: str, ranks: collectives.Ranks) -> tuple[tf.Tensor, tf.Tensor]:
    """Gathers tensors, whose first dimensions may differ, on all of `ranks`, in rank order. Collective.

    An all-to-all of equal parts gives the number of rows from each rank and takes padded buffers. Horovod's own gather
    does neither.

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
