"""Parts of benchmarks.serving beside the model's time: deltas under load, rows of fewer bytes, the item index."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from collections.abc import Sequence

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.serving.state import asking, fill
from models.export import export
from models.item_index import IndexOptions, ItemIndex
from models.top_k import best_of_all, best_of_lists
from tf_fusedrec import keras, tf
from tf_fusedrec.metrics import exact
from tf_fusedrec.saved_model import applying


@dataclasses.dataclass(frozen=True)
class Updates:
    """Windows with and without a delta, in turns."""

    windows: int = 6  # of each kind
    every: float = 10.0  # seconds of a window; a delta comes at its start
    changed: float = 0.01  # share of a table's rows that a delta changes


def update_fields(
    model: keras.Model,
    served: pathlib.Path,
    rows: dict[str, int],
    requests: Sequence[dict[str, tf.Tensor]],
    size: Updates,
) -> dict[str, float]:
    """Returns p99_ratio_with_delta_every_10s and delta_visible_s, the longest time from a call to a new answer."""
    deltas = _write_deltas(model, served, rows, size)
    loaded = tf.saved_model.load(str(served))
    server, apply = loaded.signatures["serving_default"], loaded.signatures["apply_delta"]
    ask = asking(server, requests)
    for _ in range(4):
        ask()
    visible: list[float] = []

    def bring(delta: pathlib.Path) -> None:
        begin = time.perf_counter()
        apply(path=tf.constant(str(delta)))
        asking(server, requests)()
        visible.append(time.perf_counter() - begin)

    bring(deltas[0])  # The first delta optimizes the signature's graph.
    visible.clear()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for window in range(2 * size.windows):
        with_delta = window % 2 == 1
        end = time.perf_counter() + size.every
        update = threading.Thread(target=bring if with_delta else lambda _: None, args=[deltas[1 + window // 2]])
        update.start()
        while (begin := time.perf_counter()) < end:
            ask()
            seconds[with_delta].append(time.perf_counter() - begin)
        update.join()
    p99 = {with_delta: float(np.percentile(values, 99)) for with_delta, values in seconds.items()}
    return {"p99_ratio_with_delta_every_10s": p99[True] / p99[False], "delta_visible_s": max(visible)}


def _write_deltas(
    model: keras.Model, base: pathlib.Path, rows: dict[str, int], size: Updates
) -> Sequence[pathlib.Path]:  # fmt: skip
    """Writes a chain of deltas to the export `base`, each with new values of random rows."""
    random, deltas = np.random.default_rng(0), []
    for number in range(size.windows + 1):
        for table, count in rows.items():
            fill(model, table, random.choice(count, max(1, int(size.changed * count)), replace=False), random)
        deltas.append(base.with_name(f"delta-{number}"))
        export(model, deltas[-1], base=base)
        after = base.with_name(f"export-{number}")
        fr.apply_delta(base, deltas[-1], after)
        base = after
    return deltas


FORMS = (None, "int8")


@dataclasses.dataclass(frozen=True)
class Clicks:
    """A task with hidden factors of users and items."""

    users: int = 2000
    items: int = 2000
    dim: int = 64
    samples: int = 400_000  # of an epoch
    held_out: int = 200_000
    epochs: int = 2


def row_fields(folder: pathlib.Path, size: Clicks) -> dict[str, float]:
    """Returns int8_bytes_ratio (rows with their scales over float32 rows), and the difference of AUC.

    The AUC covers the held-out samples. Most of their users and items occur in training.
    """
    random = np.random.default_rng(0)
    hidden = [random.normal(0, 1, [count, 8]) for count in (size.users, size.items)]

    def draw(samples: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        ids = {"user": random.integers(0, size.users, samples), "item": random.integers(0, size.items, samples)}
        logits = (hidden[0][ids["user"]] * hidden[1][ids["item"]]).sum(axis=1)
        return ids, (random.random(samples) < 1 / (1 + np.exp(-logits))).astype(np.float32)

    model = _clicks_model(size.dim)
    model.fit(*draw(size.samples), batch_size=1024, epochs=size.epochs, verbose=0)
    asked, labels = draw(size.held_out)
    auc, size_of_rows = {}, {}
    for form in FORMS:
        path = folder / f"rows-{form}"
        fr.export(model, path, rows=form)
        answers = tf.saved_model.load(str(path)).signatures["serving_default"](**asked)
        auc[form] = exact.auc(labels, answers["click"].numpy()[:, 0])
        size_of_rows[form] = sum(rows.nbytes for _, rows in applying.read_tables(path).values())
    return {
        "auc": auc[None],
        "auc_difference_int8": abs(auc["int8"] - auc[None]),
        "int8_bytes_ratio": size_of_rows["int8"] / size_of_rows[None],
    }


def _clicks_model(dim: int) -> keras.Model:
    rule = fr.optimizers.Adam(0.003)
    embedding = fr.FusedEmbedding(
        [fr.TableConfig(name, dim, rule, fr.Normal(0.0, 0.05)) for name in ("user", "item")],
        [fr.FeatureConfig(name, name) for name in ("user", "item")],
    )
    inputs = {name: keras.Input([], dtype=tf.int64, name=name) for name in ("user", "item")}
    rows = embedding(inputs)
    product = keras.layers.Dense(1, "sigmoid", name="click")(rows["user"] * rows["item"])
    model = keras.Model(inputs, product)
    model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy")
    return model


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

    def of_all(asked: tf.Tensor, seen: tf.RaggedTensor) -> tf.Tensor:
        return best_of_all(asked, seen, tf.constant(K), size.items, embed)[0]

    def of_lists(asked: tf.Tensor, seen: tf.RaggedTensor) -> tf.Tensor:
        return best_of_lists(asked, seen, tf.constant(K), index, embed)[0]

    searches = [tf.function(search, reduce_retracing=True, autograph=False) for search in (of_all, of_lists)]
    asked = tf.constant(users[: size.asked])
    none = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), tf.zeros([size.asked + 1], tf.int64))
    found = [search(asked, none).numpy() for search in searches]
    recall = np.mean([len(np.intersect1d(*both)) / K for both in zip(*found)])
    turns = [tf.constant(users[turn : turn + 1]) for turn in range(size.rounds)]
    calls = [(lambda search=search: [search(one, nothing).numpy() for one in turns]) for search in searches]
    times = harness.measure({"exact_ms": calls[0], "ivf_ms": calls[1]}, warmup=1, repeats=3)
    return {"recall_at_100_ivf": float(recall), **{name: 1e3 * t.median_s / size.rounds for name, t in times.items()}}


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
