"""DotInteraction and FeatureCross against NumPy."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import tf

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("with_itself", [False, True])
def test_dot_interaction_has_each_pair_once(with_itself):
    vectors = [RANDOM.normal(size=(3, 5)).astype(np.float32) for _ in range(4)]
    pairs = [(a, b) for a in range(4) for b in range(a + with_itself)]
    want = np.stack([np.sum(vectors[a] * vectors[b], axis=1) for a, b in pairs], axis=1)
    layer = fr.layers.DotInteraction(self_interaction=with_itself)
    np.testing.assert_allclose(layer([tf.constant(v) for v in vectors]), want, rtol=1e-5)
    with pytest.raises(ValueError, match="needs a list of at least two vectors .*, got list of 1"):
        layer([tf.constant(vectors[0])])
    with pytest.raises(ValueError, match="got EagerTensor. Use tf.unstack"):
        layer(tf.zeros([3, 4, 5]))


@pytest.mark.parametrize("rank", [None, 2])
def test_feature_cross_is_equation_1(rank):
    layer = fr.layers.FeatureCross(rank)
    x_0, x = (tf.constant(RANDOM.normal(size=(3, 5)), tf.float32) for _ in range(2))
    layer(x_0)
    layer.set_weights([RANDOM.normal(size=weight.shape) for weight in layer.get_weights()])
    crossed = layer(x_0, x)
    *narrow, wide, bias = (np.asarray(weight) for weight in layer.weights)
    assert [part.shape for part in narrow] == ([] if rank is None else [(5, 2)])
    product = np.linalg.multi_dot([x, *narrow, wide]) if narrow else x @ wide
    np.testing.assert_allclose(crossed, x_0 * (product + bias) + x, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(layer(x_0), layer(x_0, x_0))
    with pytest.raises(ValueError, match="projection_dim must be >= 1, got 0"):
        fr.layers.FeatureCross(0)
