"""The layer and the data of tests/gpu/tensorflow_steps.py.

Gradients are small integers, whose sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import tf

DIM = 8
CPU = "/CPU:0"


def layer(device: str, name: str, table: dict | None = None) -> Any:
    """A layer of a plain and a pooled feature, with its table on the device."""
    with tf.device(device):
        options = {"initializer": fr.Uniform(-1, 1), **(table or {})}
        config = fr.TableConfig("item", DIM, fr.optimizers.Adam(0.1), **options)
        features = [fr.FeatureConfig("item", "item"), fr.FeatureConfig("past", "item", combiner="sum")]
        return fr.FusedEmbedding(features, [config], name=name)


def step_of(embedding: Any, device: str) -> Callable[[Any, Any], Any]:
    """A compiled training step on ids <int64>[B] and past <int64>[B, L], whose gradients are small integers."""

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, None], tf.int64)], autograph=False
    )
    def step(item: Any, past: Any) -> Any:
        with tf.device(device), tf.GradientTape() as tape:
            rows = embedding({"item": item, "past": past})
            weights = tf.cast(item % 5 - 2, tf.float32)[:, tf.newaxis]
            loss = tf.reduce_sum(rows["item"] * weights) + tf.reduce_sum(rows["past"] * weights)
        tape.gradient(loss, embedding.trainable_variables)
        return rows["item"], rows["past"]

    return step


def batches(seed: int, count: int = 12) -> Iterator[tuple[Any, Any]]:
    random = np.random.default_rng(seed)
    for n in range(count):
        size = int(random.integers(0, 40)) if n else 0
        yield tf.constant(random.integers(-9, 300, size)), tf.constant(random.integers(-9, 300, [size, 3]))


def records_of(embedding: Any) -> list[np.ndarray]:
    """Ascending ids and records of the one table."""
    ids, records = embedding.internals.groups[0].table.snapshot("item")
    order = np.argsort(ids)
    return [ids[order], records[order]]
