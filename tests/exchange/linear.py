"""A linear model whose gradients NumPy can compute; see tests/oracles/weight_sync.py."""

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import losses, tf
from tf_fusedrec.embedding import Step

DIM = 4


def samples(ids, step):
    """Returns x <float32>[n, DIM] and y <float32>[n] of ids, a pure function of id and step."""
    phase = (np.asarray(ids, np.float64)[:, np.newaxis] * [1.0, 0.7, 0.3, 0.1] + step) % 7
    return np.cos(phase).astype(np.float32), np.sin(np.asarray(ids, np.float64) % 5).astype(np.float32)


def ids_of(steps, rank):
    """Returns the skewed ids of a rank's batches. One step has none on any rank, another has none on rank 1."""
    ids = [np.random.default_rng([step, rank]).zipf(1.2, 48) % 500 for step in range(steps)]
    for step in (7, 9) if rank == 1 else (7,):
        ids[step] = ids[step][:0]
    return ids


def make(name, optimizer, topology, table=None, **layer):
    item = fr.TableConfig("item", DIM, optimizer, initializer=fr.Uniform(-1, 1), **(table or {}))
    return fr.FusedEmbedding([fr.FeatureConfig("item", item)], topology=topology, name=name, **layer)


def step_function(embedding):
    signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM]), tf.TensorSpec([None])]

    @tf.function(input_signature=signature, autograph=False)
    def step(ids, x, y):
        with tf.GradientTape() as tape:
            error = tf.reduce_sum(embedding({"item": ids})["item"] * x, axis=1) - y
            loss = losses.global_mean(error**2, name=f"{embedding.name}.loss", layout=embedding.layout)
        tape.gradient(loss, embedding.trainable_variables)
        return loss

    return step


def train(ids, name, optimizer, topology, **options):
    """Returns the layer after a step on each of this rank's batches of ids."""
    embedding = make(name, optimizer, topology, **options)
    step = step_function(embedding)
    for n, mine in enumerate(ids):
        step(tf.constant(mine), *samples(mine, n))
    return embedding


def lookups_of(embedding, pieces, shares_rows=True, lookups_per_update=1):
    """A Step over inputs by feature, each a micro-batch of its own, or of the one batch without `shares_rows`."""
    lookups = []
    for number, piece in enumerate(pieces):
        inputs = {name: tf.constant(ids, tf.int64) for name, ids in piece.items()}
        features = embedding.internals.flat_features(inputs, None, None)
        lookups += embedding.internals.lookups_of(features, training=True, micro_batch=number if shares_rows else 0)
    return Step(tuple(lookup._replace(lookups_per_update=lookups_per_update) for lookup in lookups))


def records(embedding):
    """Returns this rank's ascending ids and records."""
    found, rows = embedding.internals.groups[0].table.snapshot("item")
    order = np.argsort(found)
    return found[order], rows[order]


def initial_rows(ids, optimizer):
    """Returns the rows of untrained ids."""
    embedding = make("initial", optimizer, fr.Topology())
    return embedding({"item": tf.constant(ids)}, training=False)["item"].numpy()
