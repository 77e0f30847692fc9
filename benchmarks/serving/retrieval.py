"""Recall and time of the search by an index, for vectors of users and items that a sampled softmax trained."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from models.item_index import IndexOptions, ItemIndex
from models.top_k import best_of_all, best_of_lists
from tf_fusedrec import tf

K = 100


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """A task whose users like a few of many topics."""

    items: int = 50_000
    users: int = 5_000
    topics: int = 300
    dim: int = 64
    batch: int = 1024
    steps: int = 3_000
    asked: int = 256  # users of the measurement
    rounds: int = 20  # timed requests of one user


def retrieval_fields(size: Catalogue) -> dict[str, float]:
    """Returns recall_at_100_ivf at a tenth of the products, and the median times of both searches of one user."""
    users, items = _trained(size)
    index = ItemIndex(size.items, size.dim, IndexOptions(share=0.1))
    index.build(items)
    vectors, nothing = tf.constant(items), tf.ragged.constant([[]], dtype=tf.int64, ragged_rank=1)

    def embed(positions: tf.Tensor) -> tf.Tensor:
        return tf.gather(vectors, positions)

    def exact(asked: tf.Tensor, seen: tf.RaggedTensor) -> tf.Tensor:
        return best_of_all(asked, seen, tf.constant(K), size.items, embed)[0]

    def of_lists(asked: tf.Tensor, seen: tf.RaggedTensor) -> tf.Tensor:
        return best_of_lists(asked, seen, tf.constant(K), index, embed)[0]

    searches = [tf.function(search, reduce_retracing=True, autograph=False) for search in (exact, of_lists)]
    asked = tf.constant(users[: size.asked])
    none = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), tf.zeros([size.asked + 1], tf.int64))
    found = [search(asked, none).numpy() for search in searches]
    recall = np.mean([len(np.intersect1d(*both)) / K for both in zip(*found)])
    exact_ms, ivf_ms = (_median_ms(search, asked, nothing, size.rounds) for search in searches)
    return {"recall_at_100_ivf": float(recall), "exact_ms": exact_ms, "ivf_ms": ivf_ms}


def _median_ms(search: Callable[..., tf.Tensor], asked: tf.Tensor, seen: tf.RaggedTensor, rounds: int) -> float:
    seconds = []
    for turn in range(rounds + 1):
        begin = time.perf_counter()
        search(asked[turn : turn + 1], seen).numpy()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(seconds[1:]))


def _trained(size: Catalogue) -> tuple[np.ndarray, np.ndarray]:
    """Trains unit vectors of users and items by the softmax over the other items of a batch."""
    random = np.random.default_rng(0)
    liked = random.integers(0, size.topics, [size.users, 4])
    per_topic = size.items // size.topics
    tables = [
        tf.Variable(random.normal(0, 0.1, [count, size.dim]), dtype=tf.float32) for count in (size.users, size.items)
    ]
    optimizer = tf.keras.optimizers.legacy.Adam(0.01)

    @tf.function(autograph=False)
    def step(users: tf.Tensor, items: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            of_users, of_items = (
                tf.math.l2_normalize(tf.gather(table, ids), axis=1) for table, ids in zip(tables, (users, items))
            )
            logits = tf.matmul(of_users, of_items, transpose_b=True) / 0.1
            own = tf.range(size.batch)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))

    for _ in range(size.steps):
        users = random.integers(0, size.users, size.batch)
        topics = liked[users, random.integers(0, 4, size.batch)]
        # Some items of a topic are popular, and one event in ten is of any item.
        items = topics * per_topic + random.zipf(1.3, size.batch) % per_topic
        items = np.where(random.random(size.batch) < 0.1, random.integers(0, size.items, size.batch), items)
        step(users, items)
    users, items = (tf.math.l2_normalize(table, axis=1).numpy() for table in tables)
    return users, items
