"""Small models for the tests of plans."""

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, tf

SAMPLES = 64


def make_model(seed=0, schedule="sync", topology=None, wire_dtype=None, **table):
    """Two tables of equal spec and one of another, with dropout and batch normalization."""
    keras.utils.set_random_seed(1)
    adagrad = fr.optimizers.Adagrad(0.1)
    embedding = fr.FusedEmbedding(
        tables=[
            fr.TableConfig("item", 16, adagrad, **table),
            fr.TableConfig("user", 16, adagrad, **table),
            fr.TableConfig("tag", 8, fr.optimizers.SGD(0.1)),
        ],
        features=[
            fr.FeatureConfig("history", "item", combiner="mean"),
            fr.FeatureConfig("user", "user"),
            fr.FeatureConfig("tag", "tag", output_dtype="bfloat16"),
        ],
        topology=topology,
        wire_dtype=wire_dtype,
        seed=seed,
    )
    inputs = {
        "history": keras.Input([None], dtype=tf.int64, ragged=True, name="history"),
        "user": keras.Input([], dtype=tf.int64, name="user"),
        "tag": keras.Input([], dtype=tf.int64, name="tag"),
    }
    rows = embedding(inputs)
    joined = keras.layers.Concatenate()([rows["history"], rows["user"], rows["tag"]])
    hidden = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(joined))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(32, activation="relu")(hidden))
    model = fr.schedules.PipelinedModel(inputs, outputs, schedule=schedule)
    adam = keras.optimizers.Adam(0.01)
    mae = keras.metrics.MeanAbsoluteError("mae")  # has its variables; those of the first trace would cost a second one
    model.compile(fr.collectives.distributed_optimizer(adam), loss="mse", metrics=[mae])
    return model, embedding


def make_batch(seed=0, samples=SAMPLES):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 9, samples)
    history = random.zipf(1.5, lengths.sum()) % 300
    features = {
        "history": tf.RaggedTensor.from_row_lengths(tf.constant(history, tf.int64), lengths),
        "user": tf.constant(random.integers(0, 40, samples)),
        "tag": tf.constant(random.integers(0, 20, samples)),
    }
    return features, tf.constant(random.normal(size=[samples, 1]), tf.float32)
