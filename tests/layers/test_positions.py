"""positions.py returns scaled embeddings plus the learned row of each position."""

import numpy as np
import pytest

from tests.layers.cases import ROW_LENGTHS, ragged
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import PositionEmbedding


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("with_targets", [False, True])
def test_each_token_gets_the_row_of_its_place_and_targets_share_one(lengths, with_targets):
    layer = PositionEmbedding(24)
    x, counts = ragged(lengths, 4), [n // 2 for n in lengths]
    out = layer(x, num_targets=tf.constant(counts, tf.int64) if with_targets else None)
    table = layer.positions.numpy()
    for row, length in enumerate(lengths):
        first_target = length - (counts[row] if with_targets else 0)
        for place in range(length):
            expected = x[row, place] * 2.0 + table[min(place, first_target)]  # sqrt(4) = 2
            np.testing.assert_array_equal(out[row, place], expected)


def test_the_gradient_of_the_table_is_dense_and_counts_tokens():
    layer = PositionEmbedding(4)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(ragged([3, 0, 2], 4)).values)
    gradient = tape.gradient(total, layer.positions)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_array_equal(gradient[:, 0], [2, 2, 1, 0])


def test_the_scale_of_the_table():
    layer = PositionEmbedding(2000)
    layer(ragged([5], 4))
    # A normal truncated at two deviations keeps 0.88 of its deviation, 1 / sqrt(D) = 0.5.
    assert abs(np.std(layer.positions) - 0.44) < 0.02
