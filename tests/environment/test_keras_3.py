"""Keras 3 beside legacy Keras in one process: both train, and parts of one in a model of the other are refused."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import optimizers, tf

import keras as keras_3  # isort: skip  (TensorFlow's Keras is chosen by the import of tf_fusedrec)

pytestmark = pytest.mark.legacy
REMEDY = "which comes from Keras 3. Use its counterpart in tf_fusedrec.keras"
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


def test_the_layer_inside_keras_3_is_refused(embedding):
    class Wrapped(keras_3.Model):
        def call(self, ids):
            return embedding({"item": ids})["item"]

    with pytest.raises(ValueError, match=r"is called inside 'wrapped'.*: it comes from Keras 3. Use its counterpart"):
        Wrapped()(IDS)
    assert len(embedding({"item": IDS})) == 1  # the refused call has ended
    with pytest.raises(ValueError, match=f"feature 'item' must be .*, got KerasTensor, {REMEDY}"):
        embedding({"item": keras_3.Input([], dtype="int64")})


@pytest.mark.parametrize("kind", ["layer", "model"])
def test_a_layer_of_keras_3_on_rows_of_a_functional_model_is_refused(embedding, kind):
    rows = embedding({"item": fr.keras.Input([], dtype=tf.int64)})["item"]
    part = keras_3_model() if kind == "model" else keras_3.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    with pytest.raises(
        ValueError, match=f"layer '{part.name}' got a tensor of .*It is a {type(part).__name__}, {REMEDY}"
    ):
        part(rows)
    assert fr.keras.layers.Dense(1)(tf.nn.relu(rows)).shape == (None, 1)  # the refused call has ended


@pytest.mark.parametrize(
    "given",
    [
        lambda: {"optimizer": keras_3.optimizers.SGD(0.1)},
        lambda: {"loss": keras_3.losses.MeanSquaredError()},
        lambda: {"metrics": ["mae", keras_3.metrics.MeanSquaredError()]},
    ],
)
def test_what_compile_gets_of_keras_3_is_refused(embedding, given):
    with pytest.raises(ValueError, match=rf"compile got (SGD|MeanSquaredError), {REMEDY}"):
        legacy_model(embedding).compile(**{"optimizer": "sgd", "loss": "mse", **given()})
    plain = legacy_model(embedding)
    with pytest.raises(ValueError, match=rf"compile got (SGD|MeanSquaredError), {REMEDY}"):
        fr.keras.Model(plain.inputs, plain.outputs).compile(**{"optimizer": "sgd", "loss": "mse", **given()})


@pytest.mark.parametrize("held", [keras_3.layers.Dense(1), [keras_3.layers.Dense(1)], {"a": [keras_3.layers.Dense(1)]}])
def test_layers_of_keras_3_inside_a_model_are_refused(embedding, held):
    model = fr.schedules.PipelinedModel()
    model.embedding, model.head = embedding, held
    with pytest.raises(ValueError, match=f"attribute 'head' is or holds Dense, {REMEDY}"):
        model.compile("sgd", "mse")


def test_files_of_a_model_of_keras_3_are_refused(tmp_path):
    with pytest.raises(TypeError, match=f"model must be .*, got Sequential, {REMEDY}"):
        fr.checkpoint.save(tmp_path / "checkpoint", keras_3_model())
    with pytest.raises(ValueError, match=f"export got 'sequential.*', {REMEDY}"):
        fr.export(keras_3_model(), tmp_path / "served")
