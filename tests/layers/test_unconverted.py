"""AutoGraph, which takes seconds per process, leaves this package's layers as they are, but not a user's layer."""

import pathlib
import traceback

import numpy as np
import pytest

from tf_fusedrec import keras, layers, tf

pytestmark = pytest.mark.legacy


class Branching(keras.layers.Layer):
    def call(self, x):
        if tf.reduce_sum(x) > 0:
            return x + 1.0
        else:
            return x


def test_the_first_trace_rewrites_a_users_layer_alone(monkeypatch):
    callers, matmul = set(), tf.matmul

    def recorded(*args, **kwargs):
        caller = traceback.extract_stack()[-2]
        callers.add((pathlib.Path(caller.filename).name, caller.name))
        return matmul(*args, **kwargs)

    x, layer, branching = tf.ones([3, 4]), layers.MMoE(2, 4, 1, 2), Branching()
    wanted = layer(x + 1.0)
    monkeypatch.setattr(tf, "matmul", recorded)
    np.testing.assert_allclose(tf.function(lambda x: layer(branching(x)))(x), wanted, rtol=1e-6)
    assert callers == {("mmoe.py", "call")}
