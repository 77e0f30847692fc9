"""fr.Embedding is FusedEmbedding for one feature: rows, training, padding, schedules, configs and refusals."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY


@pytest.mark.parametrize("combiner", [None, "mean"])
def test_rows_and_training_are_those_of_the_fused_layer(combiner):
    single = fr.Embedding(4, fr.optimizers.SGD(0.5), combiner, name=f"item_{combiner}")
    table = fr.TableConfig(f"item_{combiner}", 4, fr.optimizers.SGD(0.5))
    fused = fr.FusedEmbedding([fr.FeatureConfig("f", table, combiner)])
    ids = tf.ragged.constant([[3, 5], [], [3, 3]], dtype=tf.int64)
    results = []
    for layer, call in ((single, single), (fused, lambda ids: fused({"f": ids})["f"])):
        with tf.GradientTape() as tape:
            rows = call(ids)
            loss = tf.reduce_sum((rows if combiner else rows.values) ** 2)
        tape.gradient(loss, layer.trainable_variables)
        results.append((rows, *layer.export_table(table.name)))
    for mine, theirs in zip(*results):
        assert np.array_equal(mine.values if hasattr(mine, "values") else mine, getattr(theirs, "values", theirs))
    single(tf.ragged.constant([[99]], dtype=tf.int64), training=False)
    assert 99 not in single.export_table(table.name)[0]
    rows = single(ids, training=False)
    assert type(rows) is type(results[0][0]) and rows.shape.as_list() == results[0][0].shape.as_list()


def test_arguments_of_keras_embedding_and_wrong_ones_of_tables_are_refused():
    with pytest.raises(ValueError, match=r"TableConfig.dim of table 'item' must be"):
        fr.Embedding(0, "adagrad", name="item")
    with pytest.raises(TypeError, match=r"got \['mask_zero'\]. Use padding_id for mask_zero"):
        fr.Embedding(2, "adagrad", mask_zero=True)
    with pytest.raises(ValueError, match="Ids of feature 'ids' must be int32 or int64, got float32. Use keras.Input"):
        fr.Embedding(2, "adagrad")(keras.Input([5]))  # a floating dtype is Keras' default


def scaling(**options):
    return keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1, **options))


def several(**options):
    parts = {".*kernel": keras.optimizers.SGD(0.1, **options)}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), parts))


AVERAGES = (keras.optimizers.SGD, {"use_ema": True}, "has use_ema=True.*Use use_ema=False")
OF_KERAS_3 = [
    (keras.optimizers.SGD, {"gradient_accumulation_steps": 2}, "accumulation_steps 2, .*Use .*accumulate_steps=2"),
    (keras.optimizers.SGD, {"loss_scale_factor": 8.0}, "SGD has loss_scale_factor=8.0, .*Use loss_scale_factor=None"),
]
OF_MULTI_OPTIMIZER = [
    (several, {"use_ema": True}, "the optimizer SGD has use_ema=True"),
    (several, {"gradient_accumulation_steps": 2}, "accumulation_steps 1 and 2, .*Use .*accumulate_steps=2"),
]
OF_BOTH_MODELS = [
    AVERAGES,
    *([] if KERAS_IS_LEGACY else OF_KERAS_3),
    *(OF_MULTI_OPTIMIZER if hasattr(keras.optimizers, "MultiOptimizer") else []),
]


@pytest.mark.parametrize(
    ("model_type", "make", "options", "words"),
    [
        *((model_type, *row) for model_type in (keras.Model, fr.schedules.PipelinedModel) for row in OF_BOTH_MODELS),
        (keras.Model, scaling, {}, "cannot train under a LossScaleOptimizer here.*Use PipelinedModel"),
        (fr.schedules.PipelinedModel, scaling, {"use_ema": True}, "has use_ema=True"),
    ],
)
def test_optimizers_that_would_train_weights_unlike_rows_are_refused(model_type, make, options, words):
    ids = keras.Input([], dtype="int64")
    model = model_type(ids, keras.layers.Dense(1)(fr.Embedding(2, "sgd")(ids)))
    with pytest.raises(ValueError, match=words):
        model.compile(make(**options), "mse")
        model.fit(np.arange(4), np.ones(4), verbose=0)


def test_an_optimizer_may_assign_the_weight_of_the_layer_in_a_graph():
    (anchor,) = fr.Embedding(2, "sgd").trainable_variables

    @tf.function
    def decay():  # as Muon does
        anchor.assign(anchor * 0.5)

    decay()
    assert float(anchor) == 0


def test_padding_reaches_later_layers_as_a_mask():
    layer = fr.Embedding(2, "adagrad", padding_id=-1, initializer="ones")
    rows = layer(tf.constant([[3, 5, -1], [7, -1, -1]]))
    assert keras.layers.GlobalAveragePooling1D()(rows).numpy().tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert layer.compute_mask(tf.constant([[3, -1]])).numpy().tolist() == [[True, False]]


@pytest.mark.parametrize("schedule", ["sync", "nested(2)"])
def test_two_of_them_train_in_a_model_whose_config_rebuilds_them(schedule):
    inputs = [keras.Input([], dtype=tf.int64, name=name) for name in ("user", "item")]
    options = {"limits": fr.Limits(max_rows_per_rank=100, eviction="lru"), "initializer": "zeros"}
    layers = [fr.Embedding(4, fr.optimizers.Adagrad(0.5), name=f"{i.name}_{schedule[:4]}", **options) for i in inputs]
    score = keras.layers.Dense(1)(keras.layers.Concatenate()([layer(i) for layer, i in zip(layers, inputs)]))
    model = fr.schedules.PipelinedModel(inputs, score, schedule=schedule)
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.1)), loss="mse")
    ids = np.arange(64)
    history = model.fit([ids % 8, ids % 4], (ids % 4).astype(np.float32), batch_size=16, epochs=20, verbose=0).history
    assert history["loss"][-1] < 0.2 * history["loss"][0]
    assert [len(layer.export_table(layer.name)[0]) for layer in layers] == [8, 4]
    for layer in layers:
        again = fr.Embedding.from_config(layer.get_config())
        assert again.get_config() == layer.get_config() and again.tables == layer.tables


def test_weights_and_masks_are_those_of_the_ids():
    layer, ids = fr.Embedding(2, "adagrad", "sum", initializer="ones"), tf.constant([[3, 5]])
    assert layer(ids, weights=tf.constant([[2.0, 3.0]])).numpy().tolist() == [[5.0, 5.0]]
    assert layer(ids, mask=tf.constant([[True, False]])).numpy().tolist() == [[1.0, 1.0]]


def test_a_config_has_every_option():
    layer = fr.Embedding(4, "adagrad", "mean", -1, name="all", seed=7)
    layer.trainable = False
    again = fr.Embedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config() and not again.trainable
    assert {"combiner": "mean", "padding_id": -1, "seed": 7}.items() <= again.get_config().items()
