"""The real model of benchmarks.overlap: a GRM with wide rows, its batches, its dense part and its exchange alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness.synthetic import ZipfIds
from models.experiment.model_config import GRMConfig
from models.grm import GRM
from tf_fusedrec import keras, tf

FEATURES = ("history_item", "history_action", "exposed_item")
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of one rank's step."""

    users: int
    history: int  # tokens per user
    exposures: int  # tokens per user after the history
    dim: int
    heads: int  # of 32 columns; they scale a block's compute without more ops
    blocks: int = 1
    batches: int = 4  # repeated for ever, so that their rows exist after the first round
    vocabulary: int = 200_000
    zipf_alpha: float = 0.3

    @property
    def tokens(self) -> int:
        return self.users * (self.history + self.exposures)


SIZE = Size(users=64, history=120, exposures=8, dim=512, heads=6)


def config(size: Size) -> GRMConfig:
    return GRMConfig(
        max_history=size.history, max_exposures=size.exposures, dim=size.dim, num_blocks=size.blocks,
        num_heads=size.heads, qk_dim=32, value_dim=32, time_buckets=0, num_experts=2, expert_units=32, top_k=1,
    )  # fmt: skip


def make_batch(size: Size, seed: int) -> dict[str, Any]:
    """Returns a batch of users with equally long sequences, a pure function of the seed and the rank."""
    random = np.random.default_rng([seed, fr.collectives.rank()])
    items = ZipfIds(size.vocabulary, size.zipf_alpha)

    def ragged(length: int, values: np.ndarray) -> tf.RaggedTensor:
        splits = np.arange(size.users + 1, dtype=np.int64) * length
        return tf.RaggedTensor.from_row_splits(tf.constant(values), tf.constant(splits), validate=False)

    def times(length: int, begin: int) -> np.ndarray:
        return begin + np.sort(random.integers(0, 10**6, (size.users, length))).reshape(-1)

    past, shown = size.users * size.history, size.users * size.exposures
    return {
        "user_id": tf.constant(random.integers(0, 10**6, size.users)),
        "history_item": ragged(size.history, items.draw(random, (past,))),
        "history_action": ragged(size.history, random.integers(0, 4, past)),
        "history_time": ragged(size.history, times(size.history, 0)),
        "exposed_item": ragged(size.exposures, items.draw(random, (shown,))),
        "exposed_time": ragged(size.exposures, times(size.exposures, 2 * 10**6)),
        "exposed_click": ragged(size.exposures, random.integers(0, 2, shown).astype(np.float32)),
        "exposed_conversion": ragged(size.exposures, random.integers(0, 2, shown).astype(np.float32)),
    }


def dataset(size: Size) -> tf.data.Dataset:
    """Repeats the batches for ever, without any compute."""
    parts = [tf.data.Dataset.from_tensors(make_batch(size, seed)) for seed in range(size.batches)]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.concatenate(part)
    options = tf.data.Options()
    # An iterator with a tuner ends only when the tuner next wakes, up to a minute later.
    options.autotune.enabled = False
    return whole.repeat().with_options(options)


def make_embedding(size: Size, name: str) -> fr.FusedEmbedding:
    spec: dict[str, Any] = {
        "dim": size.dim,
        "optimizer": fr.optimizers.Adagrad(0.01, 0.1),
        "initializer": fr.TruncatedNormal(stddev=0.02),
    }
    table_of = {"history_item": "item", "exposed_item": "item", "history_action": "action"}
    return fr.FusedEmbedding(
        [fr.TableConfig(name=one, **spec) for one in ("item", "action")],
        [fr.FeatureConfig(name=feature, table=table_of[feature]) for feature in FEATURES],
        name=name,
    )


def make_model(size: Size, embedding: keras.layers.Layer, schedule: Any, *, reduce: bool = True) -> GRM:
    """Makes a model with the same dense weights each time. `reduce` averages their gradients over ranks."""
    keras.utils.set_random_seed(1)
    model = GRM(config(size), embedding, np.arange(1), np.ones(1, np.int64))
    model.schedule = schedule
    adam = keras.optimizers.legacy.Adam(1e-3)
    model.compile(fr.collectives.distributed_optimizer(adam) if reduce else adam)
    model(make_batch(size, 0), training=False)  # draws the weights
    # The step needs no AutoGraph, whose conversion takes longer than the measurement.
    model.train_step = tf.autograph.experimental.do_not_convert(model.train_step)  # type: ignore[method-assign]
    return model


def training(model: GRM, batches: tf.data.Dataset) -> Step:
    """Returns a step as `fit` runs it."""
    function, iterator = model.make_train_function(), iter(batches)
    return lambda: function(iterator)


class LocalRows(keras.layers.Layer):
    """Replaces an embedding: every batch reads the same variable, and the gradients of its rows are dropped."""

    def __init__(self, size: Size):
        super().__init__(name="local_rows")
        self._rows = tf.Variable(tf.random.stateless_normal([size.tokens, size.dim], [1, 2]), trainable=False)
        self._anchor = self.add_weight(name="anchor", shape=())

    def call(self, inputs: dict[str, tf.RaggedTensor]) -> dict[str, tf.RaggedTensor]:
        @tf.custom_gradient
        def rows(anchor: tf.Tensor) -> Any:
            def take(*gradients: tf.Tensor) -> tf.Tensor:
                # TensorFlow removes an op whose results nothing reads, so a value of each is read.
                return tf.add_n([tf.reduce_sum(one[:1]) for one in gradients])

            return [self._rows[: tf.size(ids.values)] for ids in inputs.values()], take

        return {name: ids.with_values(values) for (name, ids), values in zip(inputs.items(), rows(self._anchor))}


def dense_only(size: Size, batches: tf.data.Dataset, *, reduce: bool) -> Step:
    """Returns a step without tables and without exchange of rows. `reduce` adds the all-reduces of dense gradients."""
    model = make_model(size, LocalRows(size), "sync", reduce=reduce)
    iterator = iter(batches)
    return tf.function(lambda: model.train_step(next(iterator)), autograph=False)


def exchange_only(size: Size, batches: tf.data.Dataset) -> Step:
    """Returns a step of lookup and update with their three all-to-alls, without a model."""
    embedding = make_embedding(size, "exchange_only")
    iterator = iter(batches)

    @tf.function(autograph=False)
    def step() -> Any:
        batch = next(iterator)
        with tf.GradientTape() as tape:
            rows = embedding({name: batch[name] for name in FEATURES})
            loss = tf.add_n([1e-6 * tf.reduce_sum(row.values) for row in rows.values()])
        return tape.gradient(loss, embedding.trainable_variables)

    return step
