"""With every optimizer that TFRA accepts, rows train as a plain variable whose every row is touched."""

import functools

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.layers import layer_of, train
from tf_fusedrec import keras, tf

pytestmark = pytest.mark.legacy
legacy, new, v1 = keras.optimizers.legacy, keras.optimizers, tf.compat.v1.train
NAMES = {
    "legacy": (legacy, ["SGD", "Adagrad", "Adam", "RMSprop", "Adadelta", "Adamax", "Nadam"]),
    "new": (new, ["SGD", "Adam", "AdamW", "RMSprop", "Lion", "Adamax", "Nadam", "Adadelta", "Adagrad", "Ftrl"]),
    "v1": (v1, ["GradientDescent", "Adagrad", "Adam", "Ftrl", "RMSProp", "Adadelta", "ProximalAdagrad"]),
}
OPTIMIZERS = {
    **{
        f"{kind}.{name}": functools.partial(getattr(module, name + "Optimizer" * (kind == "v1")), 0.1)
        for kind, (module, names) in NAMES.items()
        for name in names
    },
    "legacy.Momentum": lambda: legacy.SGD(0.1, momentum=0.9),
    "legacy.Ftrl": lambda: legacy.Ftrl(0.1, l2_regularization_strength=0.1),
    "legacy.Adam.schedule": lambda: legacy.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "Momentum": lambda: new.SGD(0.1, momentum=0.9),
    "Adam.amsgrad": lambda: new.Adam(0.1, amsgrad=True),
    "v1.Momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
}
TARGET = np.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_train_like_a_plain_variable(name):
    make = OPTIMIZERS[name]
    config = fr.TableConfig("t", 3, make(), fr.Constant(value=0.7))
    emb = layer_of(config, backend="tfra", name=f"optimizer.{name}")
    plain, optimizer = tf.Variable(tf.fill([2, 3], 0.7)), make()
    if isinstance(optimizer, new.Optimizer):
        optimizer.build([plain])  # Nadam, built while tracing, starts its product of momenta at 0

    def loss_of(rows):
        return tf.reduce_sum((rows - TARGET) ** 4)

    step = tf.function(lambda: train(emb, {"t": tf.constant([1, 2])}, loss_of))

    @tf.function
    def plain_step():
        with tf.GradientTape() as tape:
            loss = loss_of(plain)
        optimizer.apply_gradients([(tape.gradient(loss, plain), plain)])

    for _ in range(4):
        step()
        plain_step()
        # The same float32 formulas on the same numbers; kernels for dense rows may contract a product and a sum.
        np.testing.assert_allclose(emb.export_table("t")[1], plain, rtol=1e-5, atol=1e-6)


def test_a_tf1_optimizer_cannot_serve_two_groups():
    """A TF1 optimizer has one state (Adam's powers of beta), which two groups would advance twice a step."""
    optimizer = v1.AdamOptimizer(0.1)
    with pytest.raises(ValueError, match="AdamOptimizer of table 'a' also serves table 'b', which is in another group"):
        layer_of(*(fr.TableConfig(name, dim, optimizer) for name, dim in (("a", 2), ("b", 3))), backend="tfra")


def test_optimizers_that_cannot_train_rows_are_refused():
    class Stranger:
        def apply_gradients(self, pairs):
            raise AssertionError("never called")

    for optimizer, words in (
        (new.Adam(0.1, use_ema=True), "Adam must not use_ema"),
        (Stranger(), "must be a tf_keras or TF1 optimizer, got .*Stranger"),
        (fr.optimizers.Adam(0.1), "'t' has optimizers.Adam of tf_fusedrec, which needs backend='native'"),
    ):
        with pytest.raises(ValueError, match=words):
            layer_of(fr.TableConfig("t", 2, optimizer), backend="tfra")
