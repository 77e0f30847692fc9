"""The rule weight_sync: replicas of a shard train apart, and become their mean every few steps.

    w = (w_1 + ... + w_M) / M = w_sync + (sum of changes since the last synchronisation) / M,   moments likewise

(2D-SP, Algorithm 1, lines 9 and 10). Only rows that a replica has trained since then travel: all others are
equal. An id without a row in a replica counts as its initial row, and gets a row there. A row that left one replica
leaves all, unless another one has trained it since. Afterwards replicas are equal bit by bit, and every counter for
eviction is the largest of the replicas' counters.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives, messages
from tf_fusedrec.exchange.messages import Message
from tf_fusedrec.exchange.topology import RankLayout
from tf_fusedrec.tables import NativeTable


class Replica:
    """One of the replicas of a shard that train apart.

    Args:
      table: A table made with `averaged`.
      layout: The position of this process among the ranks.
      name: Prefix of the collectives' names, the same on all ranks.
    """

    def __init__(self, table: NativeTable, layout: RankLayout, name: str):
        self._table, self._layout, self._name = table, layout, name

    def note_update(self, looked_up: Sequence[Message]) -> None:
        """Notes which rows an update has trained; every `sync_every` updates, averages. Collective then."""
        for message, splits in looked_up:
            self._table.note_trained(message, splits)
        every = self._layout.topology.sync_every
        tf.cond(self._table.updates_make_a_multiple_of(every), self.average, lambda: None)

    def average(self) -> None:
        """Makes this replica the mean of all. Collective among the replicas of the shard."""
        _average(self._table, self._layout, self._name)


def _average(table: NativeTable, layout: RankLayout, name: str) -> None:
    mine = table.take_unsynced()
    message, entries = messages.all_to_each(mine.message, name=f"{name}.ids", ranks=layout.replicas)
    headers, _ = messages.all_to_each(mine.headers, name=f"{name}.headers", ranks=layout.replicas)
    segments = len(table.names)
    received = ops.unpack_message(message, entries, num_segments=2 * segments)
    union = ops.segment_unique(received.ids, received.segment_splits)
    number = tf.gather(union.inverse, received.position)  # of each received id, in the order of the headers
    # A replica that has not touched a row has the counters of the last synchronisation, which others only raise.
    shift, low = tf.constant(32, tf.int64), tf.constant(0xFFFFFFFF, tf.int64)
    parts = tf.bitwise.right_shift(headers, shift), tf.bitwise.bitwise_and(headers, low)
    last, count = (tf.math.unsorted_segment_max(part, number, tf.size(union.ids)) for part in parts)
    trained = union.splits[segments]
    ids, splits = union.ids[:trained], union.splits[: segments + 1]
    numbers = table.read_numbers(ids, splits)
    total = collectives.all_reduce_sum(numbers, name=f"{name}.rows", ranks=layout.replicas)
    table.merge(
        left=union.ids[trained:],
        left_splits=union.splits[segments:] - trained,
        ids=ids,
        segment_splits=splits,
        numbers=total / layout.replicas.size,
        headers=(tf.bitwise.left_shift(last, shift) + count)[:trained],
    )
