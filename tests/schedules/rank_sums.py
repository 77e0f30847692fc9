"""Oracle of micro-batches that share rows: gradients are summed per rank over micro-batches, then at the owner.

A rank sends its sum with the last micro-batch that holds the id. The owner adds sums that come with one micro-batch,
by rank, and then adds these totals in the order of micro-batches. All sums are NumPy's, in float32, and the table sees
one gradient per id. Nothing of this knows messages.
"""

import contextlib
import functools

import numpy as np

from tests.oracles.rank_partition import owner_oracle


class RankSums:
    """The gradients of one step of a layer whose gradient_op is "sum".

    Args:
      embedding: The layer.
      scale: Factor of every gradient.
    """

    def __init__(self, embedding, scale):
        self._embedding, self._scale = embedding, np.float32(scale)
        self._calls = []  # by call of the layer's group: (number of the group, {(segment, id): gradient})

    @contextlib.contextmanager
    def collecting(self):
        """Calls inside, one per micro-batch, hand their gradients over instead of training."""
        from tf_fusedrec.embedding import CallHooks

        hooks = CallHooks()
        hooks.train = self._collect
        with self._embedding.internals.using(hooks):
            yield

    def _collect(self, step, gradients):
        from tf_fusedrec import ops, tf

        number = self._embedding.internals.groups.index(step.lookups[min(gradients)].group)
        noted = []
        for i, grads in gradients.items():
            fused = step.lookups[i].fused
            unique = ops.segment_unique(fused.ids, fused.segment_splits)
            bags, count = (fused.bag_splits, fused.bag_scale), tf.size(unique.ids, tf.int64)
            sums = ops.pooled_recover_grad(grads, unique.inverse, *bags, count)
            noted.append(tf.numpy_function(self._note, [number, unique.ids, unique.splits, sums], [], stateful=True))
        with tf.control_dependencies(noted):
            return tf.zeros([])

    def _note(self, number, ids, splits, sums):
        segments = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
        self._calls.append((int(number), dict(zip(zip(segments.tolist(), ids.tolist()), sums.copy()))))

    def update(self):
        """Trains the tables of this rank by the gradients of all ranks. Collective."""
        import horovod.tensorflow as hvd

        import tf_fusedrec as fr

        ranks, rank = fr.size(), fr.rank()
        mine, self._calls = self._calls, []
        everyone = hvd.allgather_object(mine) if ranks > 1 else [mine]
        for number, group in enumerate(self._embedding.internals.groups):
            of_ranks = [_summed([gradients for n, gradients in calls if n == number]) for calls in everyone]
            arriving = [(last, r, key) for r, sums in enumerate(of_ranks) for key, (last, _) in sums.items()]
            of_pieces = {}  # by id, then by micro-batch
            for last, r, key in sorted(arriving):
                if owner_oracle(key[1], ranks, "hash_range") == rank:
                    part, sums = of_ranks[r][key][1] * self._scale, of_pieces.setdefault(key, {})
                    sums[last] = sums[last] + part if last in sums else part
            totals = {key: functools.reduce(np.add, sums.values()) for key, sums in sorted(of_pieces.items())}
            _train(group.table, totals)


def _summed(calls):
    """{key: (last micro-batch, sum over micro-batches in their order)}"""
    sums = {}
    for i, gradients in enumerate(calls):
        for key, gradient in gradients.items():
            sums[key] = (i, sums[key][1] + gradient if key in sums else gradient)
    return sums


def _train(table, totals):
    from tf_fusedrec import tf
    from tf_fusedrec.exchange.routing import own_message

    counts = np.bincount([segment for segment, _ in totals], minlength=len(table.names))
    ids = tf.constant([one for _, one in totals], tf.int64)
    message = own_message(ids, tf.constant(np.cumsum([0, *counts]), tf.int64))
    rows = table.lookup(message)
    width = rows.rows.shape[1]
    grads = tf.constant(np.reshape(list(totals.values()), [-1, width]), tf.float32)
    table.update([(rows, grads)], 1.0)
