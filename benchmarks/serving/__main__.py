"""Question: how long does a served GRM take for 1 and for 64 users, and how much larger than its rows is it on disk?

    python -m benchmarks.serving [--quick] [--json FILE]

The GRM has the size of configs/grm_tiny.yaml and a large item table. It is exported with stock ops and with ours. One
process loads both and answers requests in turns. A user has a history of mean length 100, at most 200, and 32
exposures. A check comes first: both must give the same answers. The times cover the signature, without a
network.

Fields: p50_ms by ops ("stock", "ours") and number of users ("1", "64"). size_over_rows is the size of the SavedModel
over the size of its rows. speedup_state: the median time of one request of one user with 4,096 + 128 events and 256
candidates, over that with a kept state of the 4,096; speedup_state_processor: the same of the processor time of all
threads. Pairs of tokens alone allow 6.2 times, dense layers 11.7 times. Fields that end with _4g are of MTGRBoost's
GRM 4G, in which dense layers weigh more.

`load` has, for that request under open-loop load (load.py), for stock operations, ours, and ours with kept states
("state"): the rate per second (half of what it answers one after another), p50_ms, p99_ms and the number of requests;
also cache_bytes_per_user and max_difference.

recall_at_100_ivf: share of the exact 100 items that an index finds with a tenth of the products.
int8_bytes_ratio: bytes of rows in int8 over float32; auc_difference_int8: of a trained model of users and items.
p99_ratio_with_delta_every_10s: p99 of one user's requests to the stock export in windows of 10 s that begin with a
delta of 1 % of the rows, over that in windows without; delta_visible_s: the longest time from the call of
"apply_delta" to the end of a request that began after it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes
from benchmarks.serving.load import (
    IDS,
    KINDS,
    Load,
    Request,
    Server,
    asking,
    batch_of,
    fill,
    flat,
    load_fields,
    state_fields,
)
from tf_fusedrec import keras, tf
from tf_fusedrec.metrics import exact
from tf_fusedrec.models.build import columns, make_embedding, make_model, no_rows
from tf_fusedrec.models.experiment import Experiment, load
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.export import export
from tf_fusedrec.models.item_index import IndexOptions, ItemIndex
from tf_fusedrec.models.top_k import best_of_all, best_of_lists
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.export import OPS


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
        fr.export(model, path, row_dtype=form)
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
        [fr.FeatureConfig(name, name) for name in ("user", "item")],
        [fr.TableConfig(name, dim, rule, fr.Normal(0.0, 0.05)) for name in ("user", "item")],
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
    optimizer = keras.optimizers.Adam(0.01)

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


CONFIG = harness.ROOT / "configs" / "grm_tiny.yaml"
LARGE = harness.ROOT / "configs" / "grm_4g.yaml"
BATCHES = (1, 64)
HISTORY, LONGEST, EXPOSED = 100, 200, 32


class Size(NamedTuple):
    items: int = 2_000_000  # rows of the item table
    requests: int = 1_000  # per kind of ops and number of users
    load: Load = Load()
    long: Request = Request()
    large: Request = Request(rounds=6)  # of the model LARGE
    updates: Updates = Updates()
    clicks: Clicks = Clicks()
    catalogue: Catalogue = Catalogue()


QUICK = Size(
    items=200_000, requests=80, load=Load(requests=150, seconds=3.0), updates=Updates(windows=2),
    catalogue=Catalogue(items=20_000, users=2_000, topics=200, steps=600),
)  # fmt: skip


def trained(experiment: Experiment, items: int) -> tuple[Any, dict[str, int]]:
    """Returns a model with a row for every item, and the number of rows by table."""
    model = make_model(experiment, make_embedding(experiment), np.arange(1), np.ones(1, np.int64))
    model(no_rows(columns(experiment.model, "train")))
    random = np.random.default_rng(0)
    assert isinstance(model.config, RankingConfig)
    rows = {"item": items, "action": 4, **dict.fromkeys(model.config.contextual, IDS)}
    for table, count in rows.items():
        fill(model, table, np.arange(count), random)
    return model, rows


def requests_of(config: RankingConfig, users: int, items: int) -> list[dict[str, tf.Tensor]]:
    random = np.random.default_rng(users)
    lengths = [np.minimum(random.geometric(1 / HISTORY, users), LONGEST) for _ in range(32)]
    return [flat(batch_of(config, of_users, EXPOSED, items, random)) for of_users in lengths]


def medians_ms(servers: dict[str, Server], requests: list[dict[str, tf.Tensor]], repeats: int) -> dict[str, float]:
    """Returns the median of every server in ms. The servers take turns with the same requests."""
    for inputs in requests[:4]:
        stock, ours = (server(**inputs) for server in servers.values())
        for task in stock:
            harness.check_close(task, ours[task], stock[task], relative=1e-4, reason="sums in another order")

    calls = {name: asking(server, requests) for name, server in servers.items()}
    times = harness.measure(calls, warmup=4, repeats=repeats)
    return {name: 1e3 * timing.median_s for name, timing in times.items()}


def served_fields(experiment: Experiment, folder: pathlib.Path, size: Size) -> dict[str, Any]:
    """Returns the times and sizes of both exports, and the fields of deltas."""
    model, rows_of = trained(experiment, size.items)
    bytes_of_rows = 4 * experiment.model.dim * sum(rows_of.values())
    fields: dict[str, Any] = {"p50_ms": {ops: {} for ops in OPS}, "size_over_rows": {}}
    servers = {}
    for ops in OPS:
        export(model, folder / ops, ops)
        servers[ops] = tf.saved_model.load(str(folder / ops)).signatures["serving_default"]
        bytes_of_export = sum(file.stat().st_size for file in (folder / ops).rglob("*") if file.is_file())
        fields["size_over_rows"][ops] = bytes_of_export / bytes_of_rows
    for users in BATCHES:
        requests = requests_of(model.config, users, size.items)
        for ops, median_ms in medians_ms(servers, requests, size.requests).items():
            fields["p50_ms"][ops][str(users)] = median_ms
    requests = requests_of(model.config, 1, size.items)
    return fields | update_fields(model, folder / "stock", rows_of, requests, size.updates)


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    size = QUICK if arguments.quick else Size()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        fields = served_fields(load(str(CONFIG), []), folder / "served", size)
        fields |= state_fields(str(CONFIG), size.long)
        fields |= {f"{field}_4g": value for field, value in state_fields(str(LARGE), size.large).items()}
        fields["load"] = load_fields(str(CONFIG), size.long, folder / "load", size.load)
        fields |= row_fields(folder / "rows", size.clicks)
    fields |= retrieval_fields(size.catalogue)
    rows = [{"ops": ops, **fields["p50_ms"][ops]} for ops in OPS]
    harness.print_table(f"a served GRM, {size.items} items, {EXPOSED} exposures per user; median ms by users", rows)
    rows = [{"kind": kind, **fields["load"][kind]} for kind in KINDS]
    harness.print_table("open-loop load", rows)
    harness.print_fields("the other fields", fields)
    harness.write_json(arguments.json, fields)


if __name__ == "__main__":
    processes.program(main)
