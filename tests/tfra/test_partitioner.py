"""A user's partition function routes ids as ops.rank_partition does for the owners that it knows."""

import numpy as np
import pytest

from tf_fusedrec import ops, tf
from tf_fusedrec.files.hash_order import tfra_owner
from tf_fusedrec.tfra.row_lookup import partition_by


def test_a_partition_function_makes_the_message_of_the_op():
    ids, splits = tf.constant([7, -4, 3, 12, 3, 8], tf.int64), tf.constant([0, 3, 3, 6], tf.int64)
    partition = partition_by(lambda keys, n: tfra_owner(keys.numpy(), n), key_dtype=tf.int64, layer_name="layer")
    for ranks in (1, 2, 3):
        theirs = ops.rank_partition(ids, splits, num_ranks=ranks, owner="tfra")
        ours = partition(ids, splits, num_ranks=ranks)
        for field, value, wanted in zip(ours._fields, ours, theirs):
            np.testing.assert_array_equal(value, wanted[: len(value)], field)


def test_keys_have_the_type_of_the_layer_and_a_rank_that_is_none_is_refused():
    def beyond(keys, ranks):
        assert keys.dtype == tf.int32
        return keys + ranks

    partition = partition_by(beyond, key_dtype=tf.int32, layer_name="layer")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"partitioner of layer 'layer' must give ranks in \[0, 2"):
        partition(tf.constant([0, 1], tf.int64), tf.constant([0, 2], tf.int64), num_ranks=2)
