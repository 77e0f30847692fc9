"""Keras 3 beside legacy Keras in one process: both train. tests/keras_3/test_choice.py has what is refused."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import optimizers, tf

import keras as keras_3  # isort: skip  (TensorFlow's Keras is chosen by the import of tf_fusedrec)

pytestmark = pytest.mark.legacy
IDS = np.arange(8)
LABELS = np.linspace(0, 1, 8, dtype=np.float32)


@pytest.fixture
def embedding():
    table = fr.TableConfig("item", 4, optimizers.Adagrad(0.5))
    return fr.FusedEmbedding([fr.FeatureConfig("item", "item")], [table])


def legacy_model(embedding):
    ids = fr.keras.Input([], dtype=tf.int64, name="item")
    return fr.schedules.PipelinedModel(ids, fr.keras.layers.Dense(1)(embedding({"item": ids})["item"]))


def keras_3_model():
    # TFRA, which other tests load, replaces the function of the default initializer.
    return keras_3.Sequential([keras_3.Input([4]), keras_3.layers.Dense(1, kernel_initializer="ones")])


def trained(model, inputs):
    model.compile("sgd", "mse")
    losses = model.fit(inputs, LABELS, batch_size=8, epochs=20, verbose=0, shuffle=False).history["loss"]
    return losses[-1] < losses[0]


def test_models_of_both_train_in_one_process(embedding):
    assert keras_3.__version__.startswith("3.") and fr.keras.__version__.startswith("2.")
    assert trained(legacy_model(embedding), IDS)
    assert trained(keras_3_model(), np.eye(8, 4, dtype=np.float32))
    assert len(embedding.export_table("item")[0]) == 8


def test_a_loop_trains_rows_below_a_model_of_keras_3(embedding):
    """The page's way for a Keras 3 model: the loop calls the layer and gives both their gradients."""
    model, losses = keras_3_model(), []
    optimizer = keras_3.optimizers.SGD(0.1)
    embedding({"item": IDS})
    before = embedding.export_table("item")[1]
    for _ in range(20):
        with tf.GradientTape() as tape:
            output = model(embedding({"item": IDS})["item"])
            loss = tf.reduce_mean((output[:, 0] - LABELS) ** 2)
        dense = model.trainable_variables
        gradients = tape.gradient(loss, [*(v.value for v in dense), *embedding.trainable_variables])
        optimizer.apply(gradients[: len(dense)], dense)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert np.all(np.any(embedding.export_table("item")[1] != before, axis=1))
