"""Lookups of TFRA's layers and ours stay outside XLA clusters, and jit_compile=True is refused."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.ranks import run_ranks
from tests.tfra.models import OURS, layer_of
from tf_fusedrec import keras, tf
from tf_fusedrec.tfra import fuse
from tf_fusedrec.tfra.tfra_library import de

STEPS, ROWS = 6, 32


def batches(rank):
    """Yields STEPS batches with different numbers of distinct ids."""
    random = np.random.default_rng(rank)
    for step in range(STEPS):
        ids = random.integers(0, 10 + 20 * step, (4, ROWS, 3))
        yield {f"f{n}": part for n, part in enumerate(ids)}, random.random(ROWS).astype(np.float32)


def fused_model():
    """Layers of two sizes, so two groups, under a dense layer."""
    inputs = {f"f{n}": keras.Input([3], dtype=tf.int64, name=f"f{n}") for n in range(4)}
    layers = [layer_of(OURS, f"layer{n}", embedding_size=4 + 4 * (n % 2)) for n in range(4)]
    rows = [keras.layers.Flatten()(layer(inputs[f"f{n}"])) for n, layer in enumerate(layers)]
    hidden = keras.layers.Dense(8, "relu", kernel_initializer=keras.initializers.GlorotUniform(1))(tf.concat(rows, 1))
    head = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
    model = keras.Model(inputs, head(hidden)[:, 0])
    fuse(model)
    return model


def native_model():
    class Clicks(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = fr.FusedEmbedding(
                tables=[
                    fr.TableConfig(name=f"t{n}", dim=4 + 4 * (n % 2), optimizer=keras.optimizers.legacy.Adagrad(0.1))
                    for n in range(4)
                ],
                features=[
                    fr.FeatureConfig(name=f"f{n}", table=f"t{n}", combiner="sum" if n else None) for n in range(4)
                ],
            )
            self.head = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))

        def call(self, features):
            rows = self.embedding(features)
            rows["f0"] = tf.reshape(rows["f0"], [-1, 12])
            return self.head(tf.concat([rows[name] for name in sorted(rows)], axis=1))[:, 0]

    return Clicks()


MODELS = {"fused": fused_model, "native": native_model}


def fit(make, clustering):
    """Returns the losses of STEPS steps."""
    keras.backend.clear_session()
    tf.config.optimizer.set_jit("autoclustering" if clustering else False)
    model = make()
    if make is fused_model:
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adam(0.05), synchronous=fr.size() > 1)
    else:
        optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.05))
    model.compile(optimizer, loss="mse")
    return [model.train_on_batch(*batch) for batch in batches(fr.rank())]


def train_with_and_without_clusters():
    """Body: returns the losses without and with clusters, by model."""
    return {name: [fit(make, clustering) for clustering in (False, True)] for name, make in MODELS.items()}


def test_losses_with_auto_clustering_are_those_without(monkeypatch):
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit --tf_xla_min_cluster_size=2")
    for result in run_ranks(train_with_and_without_clusters, 2):
        for name, (plain, clustered) in result.items():
            # XLA sums float32 in another order, over 6 steps.
            np.testing.assert_allclose(clustered, plain, rtol=1e-4, err_msg=name)
            assert np.ptp(plain) > 0.01, name


def test_jit_compile_of_a_model_is_refused_with_the_remedy():
    sgd, (features, labels) = keras.optimizers.legacy.SGD(0.1), next(batches(0))
    for make in (*MODELS.values(), fr.schedules.PipelinedModel):
        model = make()
        with pytest.raises(ValueError, match=r"(?s)jit_compile=True.*model.compile\(..., jit_compile=False\)"):
            model.compile(sgd, loss="mse", jit_compile=True)
            model.train_on_batch(features, labels)
