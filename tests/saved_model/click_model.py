"""A small functional model that uses features in every form, with batches for it and for its servers."""

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, tf

LIMITS = np.iinfo(np.int64)


def make_model(backend="native"):
    """Unknown items get their initial rows, unknown users zeros."""
    optimizer = fr.optimizers.Adagrad(0.1) if backend == "native" else keras.optimizers.Adagrad(0.1)
    dtype = "bfloat16" if backend == "native" else "float32"
    embedding = fr.FusedEmbedding(
        tables=[
            fr.TableConfig("item", 8, optimizer, fr.Uniform(-1.0, 1.0)),
            fr.TableConfig("user", 4, optimizer, fr.Normal(0.0, 1.0), dtype=dtype, unknown="zeros"),
        ],
        features=[
            fr.FeatureConfig("shown", "item"),
            fr.FeatureConfig("history", "item", "mean"),
            fr.FeatureConfig("liked", "item", "sqrtn"),
            fr.FeatureConfig("user", "user"),
        ],
        backend=backend,
        **({"key_encoding": "hash"} if backend == "tfra" else {}),
    )
    inputs = {
        "shown": keras.Input([2], dtype=tf.int64, name="shown"),
        "history": keras.Input([None], ragged=True, dtype=tf.int64, name="history"),
        "liked": keras.Input([None], sparse=True, dtype=tf.int64, name="liked"),
        "user": keras.Input([], dtype=tf.int64, name="user"),
    }
    rows = embedding(inputs)
    parts = [keras.layers.Flatten()(rows["shown"]), rows["history"], rows["liked"], rows["user"]]
    hidden = keras.layers.Concatenate()(parts)
    outputs = {"click": keras.layers.Dense(1, name="click")(hidden), "like": keras.layers.Dense(2, name="like")(hidden)}
    model = fr.schedules.PipelinedModel(inputs, outputs)
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


def batch(seed=0, samples=6):
    """Returns the ids of a batch, with the ends of int64."""
    random = np.random.default_rng(seed)
    ids = np.array([LIMITS.min, LIMITS.max, -1, *range(20)])
    lengths = random.integers(0, 4, samples)
    liked = [[s, 0] for s in range(0, samples, 2)]
    return {
        "shown": tf.constant(random.choice(ids, [samples, 2])),
        "history": tf.RaggedTensor.from_row_lengths(random.choice(ids, lengths.sum()), lengths),
        "liked": tf.SparseTensor(liked, random.choice(ids, len(liked)), [samples, 3]),
        "user": tf.constant(random.choice(ids, samples)),
    }


def train(model, seeds=(0, 1, 2)):
    for seed in seeds:
        samples = 6
        labels = {"click": tf.fill([samples, 1], 1.0), "like": tf.fill([samples, 2], -1.0)}
        model.fit(tf.data.Dataset.from_tensors((batch(seed, samples), labels)), verbose=0)


def served(inputs):
    """Returns a batch in a server's form, by input of the signature."""
    return {
        "shown": inputs["shown"],
        "history": inputs["history"].values,
        "history_row_splits": inputs["history"].row_splits,
        "liked": inputs["liked"].values,
        "liked_indices": inputs["liked"].indices,
        "liked_dense_shape": inputs["liked"].dense_shape,
        "user": inputs["user"],
    }


def export_flat(folder):
    """Exports a model of one table whose output "y" is the rows of the input "x", <int64>[B, 3]."""
    embedding = fr.FusedEmbedding([fr.FeatureConfig("x", "t")], [fr.TableConfig("t", 2, fr.optimizers.SGD(1.0))])
    inputs = {"x": keras.Input([3], dtype=tf.int64, name="x")}
    fr.export(keras.Model(inputs, keras.layers.Flatten(name="y")(embedding(inputs)["x"])), folder)
    return folder
