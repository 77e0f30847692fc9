"""Makes a user's TFRA partition function name the owners of ids in exchange/routing.py."""

from __future__ import annotations

from collections.abc import Callable

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange.routing import Partition


def partition_by(
    partitioner: Callable[[tf.Tensor, int], tf.Tensor], *, key_dtype: tf.DType, layer_name: str
) -> Partition:
    """Returns ops.rank_partition with the user's owners, and a message without padding.

    Args:
      partitioner: Function (keys <key dtype>[U], number of ranks R) -> owner ranks <integer>[U] in [0, R).
      key_dtype: dtype of the keys.
      layer_name: Name of the layer, for messages. Another rank fails the lookup with InvalidArgumentError.
    """

    def partition(ids: tf.Tensor, splits: tf.Tensor, ranks: int) -> ops.RankedIds:
        owner = tf.cast(partitioner(tf.cast(ids, key_dtype), ranks), tf.int32)
        requirement = f"partitioner of layer {layer_name!r} must give ranks in [0, {ranks})"
        in_range = tf.debugging.assert_non_negative(tf.minimum(owner, ranks - 1 - owner), message=requirement)
        with tf.control_dependencies([] if in_range is None else [in_range]):
            order = tf.argsort(owner, stable=True)
        segments = splits.shape[0] - 1
        cell = owner * segments + tf.repeat(tf.range(segments), splits[1:] - splits[:-1])
        counts = tf.math.bincount(cell, minlength=ranks * segments, maxlength=ranks * segments)
        headers = tf.reshape(counts, [ranks, segments])
        id_splits = tf.reduce_sum(headers, axis=1)
        blocks = tf.RaggedTensor.from_row_lengths(tf.gather(ids, order), id_splits, validate=False)
        message = tf.concat([tf.cast(headers, tf.int64), blocks], axis=1).flat_values
        return ops.RankedIds(message, id_splits + segments, id_splits, tf.math.invert_permutation(order))

    return partition
