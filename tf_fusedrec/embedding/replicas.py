"""The rule weight_sync: replicas of a shard train apart, and become their mean every few steps.

    w = (w_1 + ... + w_M) / M = w_sync + (sum of changes since the last synchronisation) / M,   moments too

(2D-SP, Algorithm 1, lines 9 and 10). Only rows that a replica has trained since then travel: all others are equal. An
id without a row in a replica counts as its initial row, and gets a row there. A row that left one replica leaves all,
unless another one has trained it since. Afterwards replicas are equal bit by bit, and every counter for eviction is the
largest among the replicas that have trained the row since. A lookup that waits for its gradients, as under
SemiAsync, is no part of that: it counts on its own replica at most, until the average after its update, and keeps
its rows there.

With Topology.average_late, the mean of the rows after update t is merged after update t + 1. It travels while batch
t + 1 computes:

    step t + 1    lookup ─▶ rows after update t: ids, mean over replicas ─────────────────┐
                       └──▶ forward, backward ─▶ gradients ─▶ update t + 1 ─▶ merge ◀──────┘

    w = mean of all w_r(t) + (w_own(t + 1) - w_own(t))

So every row of a replica is the common mean and the replica's own last change, which the next mean divides among all.
Rows without such a change are equal bit by bit. A second moment that decays (Adam's v) gets at least the smaller of the
mean and its own number, because a decay of a large number must not make a small mean negative. A row that leaves by the
mean stays if the replica has looked it up since. Nothing of a mean outlives its step, so that a step that begins after
`average` or a checkpoint misses nothing. After a step that failed, go on from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.routing import Message, all_to_each
from tf_fusedrec.exchange.topology import RankLayout
from tf_fusedrec.tables import NativeTable


class Unequal(NamedTuple):
    """Rows in which replicas may differ, as one replica has them. All but `numbers` is equal in all replicas."""

    left: tf.Tensor  # <int64>[m], ids whose rows left a replica, grouped by segment
    left_splits: tf.Tensor  # <int64>[S+1]
    ids: tf.Tensor  # <int64>[n], ids that a replica has trained, grouped by segment
    segment_splits: tf.Tensor  # <int64>[S+1]
    headers: tf.Tensor  # <int64>[n], last << 32 | count, the largest of all replicas
    numbers: tf.Tensor  # <float>[P, k], as of ops.table_read_numbers for `ids`


class Begun(NamedTuple):
    """A mean that is merged after the next update."""

    due: tf.Tensor  # <bool>[]; False: there is none
    unequal: Unequal
    mean: tf.Tensor  # <float>[P, k]


class Replica:
    """One of the replicas of a shard that train apart. `name` is the prefix of the collectives' names."""

    def __init__(self, table: NativeTable, layout: RankLayout, name: str):
        self._table, self._layout, self._name = table, layout, name

    def begin(self) -> Begun | None:
        """Before an update: begins the mean of the rows after the last one, if it is late. Collective then.

        The update waits for the ids of the rows and for their numbers in this table, and for no other replica's.
        """
        if not self._layout.topology.average_late:
            return None
        due = self._table.updates_make_a_multiple_of(self._layout.topology.sync_every)
        # Two conditions, because the update waits for all of the one that reads the table.
        unequal = tf.cond(due, self._read, self._nothing)
        mean = tf.cond(due, lambda: self._mean(unequal.numbers), lambda: unequal.numbers)
        return Begun(due, unequal, mean)

    def note_update(self, looked_up: Sequence[Message], begun: Begun | None) -> None:
        """Notes which rows an update has trained; every `sync_every` updates, averages. Collective then.

        looked_up: the lookups of the update. begun: the result of `begin` before it.
        """
        for message, splits in looked_up:
            self._table.note_trained(message, splits)
        if begun is not None:
            tf.cond(begun.due, lambda: self._merge_late(begun), lambda: None)
            return
        every = self._layout.topology.sync_every
        tf.cond(self._table.updates_make_a_multiple_of(every), self.average, lambda: None)

    def average(self) -> None:
        """Makes this replica the mean of all. Collective among the replicas of the shard."""
        unequal = self._read()
        self._merge(unequal, self._mean(unequal.numbers))

    def _read(self) -> Unequal:
        """The rows in which replicas may differ, as this one has them. From now on they count as equal."""
        mine = self._table.take_unsynced()
        message, entries = all_to_each(mine.message, name=f"{self._name}.ids", ranks=self._layout.replicas)
        headers, _ = all_to_each(mine.headers, name=f"{self._name}.headers", ranks=self._layout.replicas)
        segments = len(self._table.names)
        received = ops.unpack_message(message, entries, num_segments=2 * segments)
        union = ops.segment_unique(received.ids, received.segment_splits)
        number = tf.gather(union.inverse, received.position)  # of each received id, in the order of the headers
        # A replica that has not trained a row takes these counters. If a lookup under way is later, `merge` keeps its
        # clock and the larger count.
        shift, low = tf.constant(32, tf.int64), tf.constant(0xFFFFFFFF, tf.int64)
        parts = tf.bitwise.right_shift(headers, shift), tf.bitwise.bitwise_and(headers, low)
        last, count = (tf.math.unsorted_segment_max(part, number, tf.size(union.ids)) for part in parts)
        trained = union.splits[segments]
        ids, splits = union.ids[:trained], union.splits[: segments + 1]
        return Unequal(
            left=union.ids[trained:],
            left_splits=union.splits[segments:] - trained,
            ids=ids,
            segment_splits=splits,
            headers=(tf.bitwise.left_shift(last, shift) + count)[:trained],
            numbers=self._table.read_numbers(ids, splits),
        )

    def _nothing(self) -> Unequal:
        none, splits = tf.zeros([0], tf.int64), tf.zeros([len(self._table.names) + 1], tf.int64)
        return Unequal(none, splits, none, splits, none, tf.zeros([0, 0]))

    def _mean(self, numbers: tf.Tensor) -> tf.Tensor:
        total = collectives.all_reduce_sum(numbers, name=f"{self._name}.rows", ranks=self._layout.replicas)
        return total / self._layout.replicas.size

    def _merge(self, unequal: Unequal, numbers: tf.Tensor) -> None:
        self._table.merge(**unequal._replace(numbers=numbers)._asdict())

    def _merge_late(self, begun: Begun) -> None:
        """Merges a mean, and keeps what this replica has changed since it was begun."""
        own = self._table.read_numbers(begun.unequal.ids, begun.unequal.segment_splits)
        numbers = begun.mean + (own - begun.unequal.numbers)
        moments = self._table.second_moments
        if moments.any():
            numbers = tf.where(moments, tf.maximum(numbers, tf.minimum(begun.mean, own)), numbers)
        self._merge(begun.unequal, numbers)
