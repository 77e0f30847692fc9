"""Predicts ratings with two towers, like TFRA's movielens-1m-keras-with-horovod demo.

This is a user's program with TFRA, Keras and Horovod and without this project. The tests run it unchanged, and again
with its last import changed.
"""

import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras as keras
from tensorflow_recommenders_addons import dynamic_embedding as de

BATCH_SIZE = 64


class Channel(keras.layers.Layer):
    """One tower: an embedding for sparse ids, an embedding for features with few values, and a dense layer."""

    def __init__(self, name, sparse, dense):
        super().__init__(name=name)
        self.sparse, self.dense = sparse, dense
        self.sparse_embedding = self.embedding(f"{name}_SparseUnifiedEmbeddingLayer", 16)
        self.dense_embedding = self.embedding(f"{name}_DenseUnifiedEmbeddingLayer", 8)
        self.dnn = keras.layers.Dense(32, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(1))

    def embedding(self, name, size):
        saver = de.FileSystemSaver(proc_size=hvd.size(), proc_rank=hvd.rank())
        return de.keras.layers.HvdAllToAllEmbedding(
            mpi_size=hvd.size(),
            embedding_size=size,
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            initializer=keras.initializers.Constant(0.05),
            devices=["/CPU:0"],
            name=name,
            init_capacity=8192,
            kv_creator=de.CuckooHashTableCreator(saver=saver),
        )

    def call(self, features):
        # Features of one tower share a table, so the high bits of an id hold the feature's number.
        parts = []
        for names, layer in ((self.sparse, self.sparse_embedding), (self.dense, self.dense_embedding)):
            ids = tf.stack([features[name] + (n << 40) for n, name in enumerate(names)], axis=1)
            parts.append(tf.reshape(layer(ids), [-1, len(names) * layer.embedding_size]))
        return self.dnn(tf.concat(parts, axis=1))


class DualChannelsModel(keras.Model):
    """Both towers and a dense head."""

    def __init__(self):
        super().__init__()
        self.user = Channel("user", ["user_id"], ["user_gender", "user_age", "user_occupation"])
        self.movie = Channel("movie", ["movie_id"], ["movie_id"])
        self.head = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))

    def call(self, features):
        return self.head(tf.concat([self.user(features), self.movie(features)], axis=1))[:, 0]


def main(ratings, model_dir, finish=lambda model: None):
    """Trains on this rank's share of the columns of ratings and saves. Returns the losses."""
    hvd.init()
    mine = {name: column[hvd.rank() :: hvd.size()] for name, column in ratings.items()}
    labels = mine.pop("user_rating")
    model = DualChannelsModel()
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adagrad(0.05), synchronous=True)
    model.compile(optimizer, loss="mse")
    finish(model)
    means = []  # since the epoch began
    callbacks = [
        de.keras.callbacks.DEHvdBroadcastGlobalVariablesCallback(root_rank=0),
        de.keras.callbacks.ModelCheckpoint(os.path.join(model_dir, "checkpoint"), verbose=0),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: means.append(logs["loss"])),
    ]
    dataset = tf.data.Dataset.from_tensor_slices((mine, labels)).batch(BATCH_SIZE)
    model.fit(dataset, callbacks=callbacks, verbose=0)
    de.keras.models.save_model(model, os.path.join(model_dir, "export"))
    means = np.array(means, np.float64)
    return np.diff(means * np.arange(1, len(means) + 1), prepend=0.0)
