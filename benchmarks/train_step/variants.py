"""The variants of benchmarks.train_step: one click model with four kinds of embedding layers.

All train the same weights on the mean over ranks of each rank's mean loss. TFRA sums over ranks, so that its variants
divide the loss by the number of ranks. tf_fusedrec averages.
"""

import abc
from collections.abc import Mapping, Sequence

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange.collectives import all_to_all
from tf_fusedrec.tfra.tfra_library import de

DIM = 16
LEARNING_RATE = 0.05
INITIAL_VALUE = 0.05
HIDDEN_UNITS = 64
ROWS_PER_FEATURE = 1 << 16  # allocated at once by all variants, so that no table grows during the measurement
# Multiplication by an odd number is a bijection, so that two keys of one feature never collide.
_MIX = np.int64(-7046029254386353131)


def _optimizer() -> keras.optimizers.legacy.Optimizer:
    return keras.optimizers.legacy.Adagrad(LEARNING_RATE)


def _tower(features: int) -> keras.Sequential:
    """Returns the dense layers, with the same weights for all variants and ranks."""
    tower = keras.Sequential([keras.layers.Dense(HIDDEN_UNITS, activation="relu"), keras.layers.Dense(1)])
    tower.build((None, features * DIM))
    random = np.random.default_rng(0)
    tower.set_weights([random.normal(0, 0.1, w.shape).astype(np.float32) for w in tower.get_weights()])
    return tower


class Variant(abc.ABC):
    """A model and its step(ids, labels), with ids <int64>[B, L] by feature and labels <float>[B]."""

    name: str

    def __init__(self, features: Sequence[str]):
        self.tower = _tower(len(features))
        # No variant needs AutoGraph, which takes half a minute to convert TFRA's code.
        self.step = tf.function(tf.autograph.experimental.do_not_convert(self.plain_step), autograph=False)

    @abc.abstractmethod
    def pooled(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns <float32>[B, F * D], the mean row of every feature."""

    @abc.abstractmethod
    def train(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        """Updates the dense weights and the rows."""

    def loss(self, ids: Mapping[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        """Returns the mean loss of the batch, <float32>[]."""
        logits = tf.squeeze(self.tower(self.pooled(ids)), axis=1)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))

    def plain_step(self, ids: Mapping[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        with tf.name_scope(self.name):
            with tf.GradientTape() as tape:
                loss = self.loss(ids, labels)
            self.train(tape, loss)
        return loss


class _Tfra(Variant):
    """Base of the TFRA variants, with its layer and its optimizer in synchronous mode."""

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        self.optimizer = de.DynamicEmbeddingOptimizer(_optimizer(), synchronous=True)
        self.layers: list[keras.layers.Layer] = []

    def _add_layer(self, name: str, capacity: int) -> keras.layers.Layer:
        layer = de.keras.layers.HvdAllToAllEmbedding(
            embedding_size=DIM, key_dtype=tf.int64, value_dtype=tf.float32, devices=["/CPU:0"], init_capacity=capacity,
            initializer=keras.initializers.Constant(INITIAL_VALUE), name=name,
        )  # fmt: skip
        self.layers.append(layer)
        return layer

    def train(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        variables = [*self.tower.trainable_variables, *[v for layer in self.layers for v in layer.trainable_variables]]
        share = tf.constant(1.0 / fr.size())
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables, output_gradients=share), variables))


class Tfra(_Tfra):
    """TFRA as its users write it: one HvdAllToAllEmbedding per feature."""

    name = "tfra"

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        self._layer_of = {feature: self._add_layer(f"tfra_{feature}", ROWS_PER_FEATURE) for feature in features}

    def pooled(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return tf.concat([tf.reduce_mean(self._layer_of[f](ids[f]), axis=1) for f in ids], axis=1)


class TfraFused(_Tfra):
    """TFRA-fused (FusedRec section 4), from TFRA's own parts: one layer for all features.

    The source hashes the category into the key, so that one tf.unique removes the duplicates of all features. A hash
    has no inverse. So one more all-to-all sends each owner the number of its keys by category, and the owner adds them
    to its category statistics.
    """

    name = "tfra_fused"

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        self._layer = self._add_layer("tfra_fused", ROWS_PER_FEATURE * len(features))
        self._salts = np.random.default_rng(0).integers(0, 1 << 62, len(features), np.int64)
        self.category_counts = tf.Variable(tf.zeros([len(features)], tf.int64), trainable=False)

    def pooled(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        stacked = tf.stack(list(ids.values()))  # [F, B, L]
        mixed = tf.bitwise.bitwise_xor(stacked, self._salts[:, np.newaxis, np.newaxis]) * _MIX
        # TFRA chooses the owner by the low bits of a key, which a product mixes least.
        merged = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, tf.constant(32, tf.int64)))
        keys, index = tf.unique(tf.reshape(merged, [-1]))
        self._send_categories(keys, tf.reshape(index, [len(ids), -1]))
        rows = tf.gather(self._layer.hvd_variable.embedding_lookup(keys)[0], index)
        by_sample = tf.reshape(rows, tf.concat([tf.shape(stacked), [DIM]], axis=0))
        pooled = tf.transpose(tf.reduce_mean(by_sample, axis=2), [1, 0, 2])  # [B, F, D]
        return tf.reshape(pooled, [-1, len(ids) * DIM])

    def _send_categories(self, keys: tf.Tensor, index: tf.Tensor) -> None:
        """Sends each owner its counts [F]. `keys` are in the order of first occurrence, hence grouped by category."""
        ranks, categories = fr.size(), index.shape[0]
        ends = tf.reduce_max(index, axis=1) + 1
        category = tf.repeat(tf.range(categories), ends - tf.concat([[0], ends[:-1]], axis=0))
        owner = self._layer.params.partition_fn(keys, ranks)
        counts = tf.math.bincount(owner * categories + category, minlength=ranks * categories, dtype=tf.int64)
        splits = tf.fill([ranks], categories)
        received, _ = all_to_all(counts, splits, name=f"{self.name}/categories")
        self.category_counts.assign_add(tf.reduce_sum(tf.reshape(received, [ranks, categories]), axis=0))


class Fused(Variant):
    """FusedEmbedding over native tables, which are its default."""

    name = "ours"
    backend = "native"

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        self.embedding = fr.FusedEmbedding(
            tables=[
                fr.TableConfig(name=f, dim=DIM, optimizer=_optimizer(), initializer=fr.Constant(value=INITIAL_VALUE))
                for f in features
            ],
            features=[fr.FeatureConfig(name=f, table=f, combiner="mean") for f in features],
            backend=self.backend,
            init_capacity=ROWS_PER_FEATURE * len(features),
            name=f"benchmark_{self.backend}",
        )
        self.optimizer = fr.collectives.distributed_optimizer(_optimizer())

    def pooled(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        rows = self.embedding(ids)
        return tf.concat([rows[f] for f in ids], axis=1)

    def train(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        variables = [*self.tower.trainable_variables, *self.embedding.trainable_variables]
        self.optimizer.minimize(loss, variables, tape=tape)


class FusedOverTfra(Fused):
    """FusedEmbedding over a TFRA variable, with the same exchange and another table."""

    name = "ours_tfra"
    backend = "tfra"


VARIANTS = (Tfra, TfraFused, FusedOverTfra, Fused)
