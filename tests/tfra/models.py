"""Models with a few TFRA layers for the tests of the swap, and their training steps."""

import numpy as np

from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.tfra_library import de

UPSTREAM, OURS = de.keras.layers.HvdAllToAllEmbedding, FusedTfraEmbedding
legacy = keras.optimizers.legacy


def file_system_creator():
    saver = de.FileSystemSaver(proc_size=collectives.size(), proc_rank=collectives.rank())
    return de.CuckooHashTableCreator(saver=saver)


def layer_of(kind, name, **arguments):
    """Makes a layer with 4 columns whose initial values are 0.1."""
    defaults = {
        "embedding_size": 4,
        "initializer": keras.initializers.Constant(0.1),
        "devices": ["/CPU:0"],
        "mpi_size": collectives.size(),
        "kv_creator": file_system_creator(),
    }
    return kind(name=name, **{**defaults, **arguments})


class SumOfRows(keras.Model):
    """Weighted sum of the mean rows of one layer per feature. The weights differ, so no two rows can be confused."""

    def __init__(self, layers):
        super().__init__()
        self.embeddings = list(layers)

    def call(self, ids):
        total = 0.0
        for n, (layer, part) in enumerate(zip(self.embeddings, ids)):
            rows = layer(part)
            weights = tf.cast(tf.range(1, 5), rows.dtype) * (n + 1)
            total += tf.cast(tf.reduce_sum(tf.reduce_mean(rows, axis=1) * weights, axis=-1), tf.float32)
        return total


def training_step(model, optimizer):
    """Returns step(ids, labels) -> loss, which trains a model in one graph with TFRA's synchronous optimizer."""
    optimizer = de.DynamicEmbeddingOptimizer(optimizer, synchronous=collectives.size() > 1)

    @tf.function(reduce_retracing=True)
    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids) - labels) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return step


def upstream_export(layer):
    """Returns the ascending keys and the rows of an upstream layer."""
    keys, rows = (tensor.numpy() for tensor in layer.params.export())
    order = np.argsort(keys)
    return keys[order], rows[order]


def exported(layer):
    return layer.export() if isinstance(layer, FusedTfraEmbedding) else upstream_export(layer)
