"""The model of benchmarks.overlap on an accelerator: real tables and exchanges, a dense part on the device stream.

The dense part is a chain of layers, whose weights are averaged over ranks as in a real model. Their gradients
come one layer after another. A layer takes a fixed time and a time per token, forward and backward (compute_times.py).
The table may lie behind a slow memory: each id of a lookup then takes a time, in which no core works.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness.synthetic import ZipfIds, id_of
from benchmarks.overlap import device_stream
from models.base import Batch, SequenceModel
from tf_fusedrec import keras, tf
from tf_fusedrec.data import cluster_samples


@dataclasses.dataclass(frozen=True)
class DeviceSize:
    """Size of one rank's step."""

    users: int
    tokens_per_user: int
    dim: int
    layers: int = 4
    weights: int = 400_000  # of all layers
    batches: int = 4  # repeated for ever, so that their rows exist after the first round
    vocabulary: int = 200_000
    topics: int = 8  # a user has one; users of a topic share ids, which clustering brings together
    ids_of_topic: int = 400
    topical: float = 0.3  # part of a user's ids that come from its topic

    @property
    def tokens(self) -> int:
        return self.users * self.tokens_per_user


class Compute(NamedTuple):
    """Seconds of the dense part of n tokens: fixed + per_token * n, for the forward and for the backward pass."""

    fixed: tuple[float, float]
    per_token: tuple[float, float]

    def seconds(self, tokens: int, micro_batches: int = 1) -> float:
        """Returns the time of a batch, forward and backward."""
        return micro_batches * sum(self.fixed) + tokens * sum(self.per_token)


class Pace:
    """The times of a step's parts. They may change between two steps of a traced function."""

    def __init__(self) -> None:
        self.device = tf.Variable(0.0, dtype=tf.float64, trainable=False)  # factor of all times of Compute
        self.memory = tf.Variable(0.0, dtype=tf.float64, trainable=False)  # seconds per id that a lookup reads

    def set(self, *, device: float, memory: float) -> None:
        self.device.assign(device)
        self.memory.assign(memory)


class SlowMemory:
    """A table whose lookups wait for their rows, on a stream of their own. No core works meanwhile.

    A refresh does not wait: it reads only rows that were updated since the look-ahead, and those are in memory.
    """

    def __init__(self, table: Any, pace: Pace):
        self._table, self._pace = table, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def lookup(self, message: tf.Tensor, splits: tf.Tensor, **options: Any) -> Any:
        return self._table.lookup(self._read(message), splits, **options)

    def look_ahead(self, message: tf.Tensor, splits: tf.Tensor, **options: Any) -> Any:
        return self._table.look_ahead(self._read(message), splits, **options)

    def _read(self, message: tf.Tensor) -> tf.Tensor:
        seconds = self._pace.memory * tf.cast(tf.size(message), tf.float64)
        return device_stream.wait(message, seconds, device_stream.MEMORY)


class DeviceModel(SequenceModel):
    """Scores every token by its row and the weights of all layers."""

    def __init__(self, size: DeviceSize, compute: Compute, pace: Pace, embedding: fr.FusedEmbedding):
        super().__init__(embedding, f"model_of_{embedding.name}")
        each = size.weights // size.layers
        self._layer_weights = [self.add_weight(f"layer_{i}", [each], initializer="zeros") for i in range(size.layers)]
        self._compute, self._pace = compute, pace
        self.row_sums = keras.metrics.Sum(name="row_sums", dtype=tf.float64)  # of |sum of a row| over all tokens

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [*super().metrics, self.row_sums]

    def call(self, inputs: Batch, training: bool | None = None) -> dict[str, tf.Tensor]:
        hidden = self.embedding({"item": inputs["item"]})["item"].values
        tokens = tf.cast(tf.shape(hidden)[0], tf.float64)
        fixed, per_token = (tf.constant(part, tf.float64) for part in self._compute)
        seconds = self._pace.device * (fixed + per_token * tokens) / len(self._layer_weights)
        outputs = []
        for weight in self._layer_weights:
            hidden = device_stream.layer(hidden, weight, seconds)
            outputs.append(hidden)
            hidden = hidden[:, tf.newaxis]
        return {"of_rows": outputs[0], "logits": outputs[-1]}

    def position_losses(self, batch: Batch, outputs: dict[str, tf.Tensor]) -> tf.Tensor:
        self.row_sums.update_state(tf.reduce_sum(tf.abs(outputs["of_rows"])))
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=batch["click"].values, logits=outputs["logits"])

    def num_positions(self, batch: Batch) -> tf.Tensor:
        return tf.size(batch["item"].values, tf.int64)

    def counts(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        return batch["item"].nrows(), tf.size(batch["item"].values, tf.int64)

    def forward_flops(self, batch: Batch) -> tf.Tensor:
        return tf.zeros([], tf.float64)


def make_batch(size: DeviceSize, seed: int) -> dict[str, tf.RaggedTensor]:
    """Returns a batch of users with equally long sequences, a pure function of the seed and the rank."""
    random = np.random.default_rng([seed, fr.collectives.rank()])
    items = ZipfIds(size.vocabulary, 0.3).draw(random, (size.users, size.tokens_per_user))
    topics = random.integers(0, size.topics, [size.users, 1])
    of_topic = size.vocabulary + topics * size.ids_of_topic + random.integers(0, size.ids_of_topic, items.shape)
    items = np.where(random.random(items.shape) < size.topical, id_of(of_topic), items)
    clicks = (random.random(items.shape) < 0.3).astype(np.float32)
    splits = tf.range(size.users + 1, dtype=tf.int64) * size.tokens_per_user
    return {
        name: tf.RaggedTensor.from_row_splits(tf.constant(values.reshape(-1)), splits, validate=False)
        for name, values in (("item", items), ("click", clicks))
    }


def dataset(size: DeviceSize, clustered_for: int = 0) -> tf.data.Dataset:
    """Repeats the batches for ever, without any compute. Their samples are clustered once, for M micro-batches."""
    whole = tf.data.Dataset.from_tensors(make_batch(size, 0))
    for seed in range(1, size.batches):
        whole = whole.concatenate(tf.data.Dataset.from_tensors(make_batch(size, seed)))
    if clustered_for:
        whole = cluster_samples(whole, clustered_for, ids=lambda batch: {"item": batch["item"]})
    options = tf.data.Options()
    # An iterator with a tuner ends only when the tuner next wakes, up to a minute later.
    options.autotune.enabled = False
    return whole.cache().repeat().with_options(options)


def make_model(size: DeviceSize, compute: Compute, pace: Pace, name: str, schedule: Any, **layer: Any) -> DeviceModel:
    """Makes a model whose rows and weights begin the same each time. `layer` has options of FusedEmbedding."""
    # The first step of a row is as long as the learning rate, so that a missing update shows in the sums of rows.
    adagrad = fr.optimizers.Adagrad(3e-4, initial_accumulator_value=1e-12)
    table = fr.TableConfig("item", size.dim, adagrad, initializer=fr.TruncatedNormal(stddev=0.02))
    embedding = fr.FusedEmbedding([table], [fr.FeatureConfig("item", "item")], name=name, **layer)
    for lookup in embedding.lookups:
        lookup.table = SlowMemory(lookup.table, pace)  # type: ignore[assignment]
    model = DeviceModel(size, compute, pace, embedding)
    model.schedule = schedule
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(1e-3)))
    model(make_batch(size, 0), training=False)  # makes the weights' optimizer ready
    # The step needs no AutoGraph, whose conversion takes longer than the measurement.
    model.train_step = tf.autograph.experimental.do_not_convert(model.train_step)  # type: ignore[method-assign]
    return model
