"""The rule weight_sync: replicas of a shard train apart, and become their mean every few steps.

    w = (w_1 + ... + w_M) / M = w_sync + (sum of changes since the last synchronisation) / M,   moments likewise

(2D-SP, Algorithm 1, lines 9 and 10). Only rows that a replica has trained since travel: at all others replicas are
equal. What a replica does not have stands there for its initial row, and it gets it; what left one replica leaves all,
unless another has trained it since. So replicas are equal bit by bit afterwards, counters for eviction included: of
those the largest holds.
"""

from __future__ import annotations

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives, messages
from tf_fusedrec.exchange.topology import Place
from tf_fusedrec.tables import NativeTable


def average(table: NativeTable, place: Place, *, name: str) -> None:
    """Makes this replica of a shard the mean of all. Collective among place.replicas.

    Args:
      table: made with `averaged`.
      place: of this process among the ranks.
      name: of the collectives, the same on all ranks.
    """
    mine = table.take_unsynced()
    message, entries = messages.all_to_each(mine.message, name=f"{name}.ids", ranks=place.replicas)
    told, _ = messages.all_to_each(mine.headers, name=f"{name}.headers", ranks=place.replicas)
    segments = len(table.names)
    received = ops.unpack_message(message, entries, num_segments=2 * segments)
    union = ops.segment_unique(received.ids, received.segment_splits)
    number = tf.gather(union.inverse, received.position)  # of each id in the order of arrival, as headers came
    # A replica that has not touched a row has the counters of the last synchronisation, which others only raise.
    shift, low = tf.constant(32, tf.int64), tf.constant(0xFFFFFFFF, tf.int64)
    parts = tf.bitwise.right_shift(told, shift), tf.bitwise.bitwise_and(told, low)
    last, count = (tf.math.unsorted_segment_max(part, number, tf.size(union.ids)) for part in parts)
    trained = union.splits[segments]
    ids, splits = union.ids[:trained], union.splits[: segments + 1]
    numbers = table.read_numbers(ids, splits)
    total = collectives.all_reduce_sum(numbers, name=f"{name}.rows", ranks=place.replicas)
    table.merge(
        left=union.ids[trained:],
        left_splits=union.splits[segments:] - trained,
        ids=ids,
        segment_splits=splits,
        numbers=total / place.replicas.size,
        headers=(tf.bitwise.left_shift(last, shift) + count)[:trained],
    )
