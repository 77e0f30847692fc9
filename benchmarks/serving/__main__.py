"""Question: how long does a served GRM take for 1 and for 64 users, and how much larger than its rows is it on disk?

    python -m benchmarks.serving [--quick] [--json FILE]

The GRM has the size of configs/grm_tiny.yaml and a large item table. It is exported with stock ops and with ours. One
process loads both and answers requests in turns. A user has a history of mean length 100, at most 200, and 32
exposures. A check comes first: both must give the same answers. The times cover the signature, without a
network.

Fields, by ops ("stock", "ours") and number of users ("1", "64"): p50_ms, p99_ms. size_over_rows is the size of the
SavedModel over the size of its rows. speedup_state: the median time of one request of one user with 4,096 + 128 events
and 256 candidates, over that with a kept state of the 4,096; speedup_state_processor: the same of the processor time of
all threads. Pairs of tokens alone allow 6.2 times, dense layers 11.7 times. Fields that end with _4g are of MTGRBoost's
GRM 4G, in which dense layers weigh more.

Under open-loop load (load.py), for that request ("long") and one with 96 + 8 events and 32 candidates ("short"), for
stock operations, ours, and ours with kept states: load_long and load_short hold by kind the rate per second (half of
what it answers one after another), p50_ms, p99_ms, p99.9_ms, the number of requests, and max_rate, the highest rate at
which p99 is at most 80 ms, 0 for none. p99_ms_state, p99_ms_stock,
max_rate_state, max_rate_stock, cache_bytes_per_user and max_difference_state are those of the long request.

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
import time
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes
from benchmarks.serving.load import KINDS, Load, load_fields
from benchmarks.serving.parts import Catalogue, Clicks, Updates, retrieval_fields, row_fields, update_fields
from benchmarks.serving.state import Request, state_fields
from models.build import columns, make_embedding, make_model, no_rows
from models.experiment import Experiment, load
from models.experiment.ranking_config import RankingConfig
from models.export import export
from tf_fusedrec import tf
from tf_fusedrec.saved_model.export import OPS

CONFIG = harness.ROOT / "configs" / "grm_tiny.yaml"
LARGE = harness.ROOT / "configs" / "grm_4g.yaml"
BATCHES = (1, 64)
HISTORY, LONGEST, EXPOSED = 100, 200, 32
DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of all parts."""

    items: int  # rows of the item table
    requests: int  # per kind of ops and number of users
    load: Load = Load()
    long: Request = Request()
    large: Request = Request(rounds=6)  # of the model LARGE
    others: tuple[tuple[str, Request], ...] = (("short", Request(events=96, new=8, candidates=32)),)  # under load
    updates: Updates = Updates()
    clicks: Clicks = Clicks()
    catalogue: Catalogue = Catalogue()


FULL = Size(2_000_000, 1_000)
QUICK = Size(
    items=200_000,
    requests=80,
    load=Load(requests=150, seconds=3.0, trials=4),
    updates=Updates(windows=2),
    catalogue=Catalogue(items=20_000, users=2_000, topics=200, steps=600),
)


def contextual(experiment: Experiment) -> tuple[str, ...]:
    """Returns the scalar features of a user."""
    assert isinstance(experiment.model, RankingConfig)
    return experiment.model.contextual


def trained(experiment: Experiment, items: int) -> tuple[Any, dict[str, int]]:
    """Returns a model with a row for every item, and the number of rows by table."""
    model = make_model(experiment, make_embedding(experiment), np.arange(1), np.ones(1, np.int64))
    model(no_rows(columns(experiment.model, "train")))
    random, dim = np.random.default_rng(0), experiment.model.dim
    rows = {"item": items, "action": 4, **dict.fromkeys(contextual(experiment), 1000)}
    for table, count in rows.items():
        values = random.normal(0, 0.1, [count, dim]).astype(np.float32)
        fr.checkpoint.warm_start(model, table, np.arange(count), values)
    return model, rows


def request(experiment: Experiment, users: int, items: int, random: np.random.Generator) -> dict[str, tf.Tensor]:
    """Returns random inputs of the signature."""
    lengths = np.minimum(random.geometric(1 / HISTORY, users), LONGEST)
    history, exposed = int(lengths.sum()), users * EXPOSED
    arrays = {
        "history_item": random.zipf(1.2, history) % items,
        "history_action": random.integers(0, 4, history),
        "history_time": np.sort(random.integers(0, 30 * DAY, history)),
        "history_row_splits": np.concatenate([[0], np.cumsum(lengths)]),
        "exposed_item": random.integers(0, items, exposed),
        "exposed_time": np.full(exposed, 31 * DAY),
        "exposed_row_splits": np.arange(users + 1) * EXPOSED,
        **{name: random.integers(0, 1000, users) for name in contextual(experiment)},
    }
    return {name: tf.constant(value, tf.int64) for name, value in arrays.items()}


def percentiles(
    servers: dict[str, Any], experiment: Experiment, users: int, size: Size
) -> dict[str, tuple[float, float]]:
    """Returns p50 and p99 of every server in ms. The servers take turns with the same requests."""
    random = np.random.default_rng(users)
    requests = [request(experiment, users, size.items, random) for _ in range(32)]
    for inputs in requests[:4]:
        stock, ours = (server(**inputs) for server in servers.values())
        for task in stock:
            harness.check_close(task, ours[task], stock[task], relative=1e-4, reason="sums in another order")
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(size.requests):
        inputs = requests[turn % len(requests)]
        for name in list(servers) if turn % 2 else reversed(list(servers)):
            begin = time.perf_counter()
            for output in servers[name](**inputs).values():
                output.numpy()
            seconds[name].append(time.perf_counter() - begin)
    return {name: tuple(1e3 * np.percentile(values, [50, 99])) for name, values in seconds.items()}


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    size = QUICK if arguments.quick else FULL
    experiment = load(str(CONFIG), [])
    model, rows_of = trained(experiment, size.items)
    bytes_of_rows = 4 * experiment.model.dim * sum(rows_of.values())
    fields: dict[str, Any] = {"p50_ms": {ops: {} for ops in OPS}, "p99_ms": {ops: {} for ops in OPS}}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {ops: pathlib.Path(temporary) / ops for ops in OPS}
        servers = {}
        for ops, folder in folders.items():
            export(model, folder, ops)
            servers[ops] = tf.saved_model.load(str(folder)).signatures["serving_default"]
        for users in BATCHES:
            for ops, (median, tail) in percentiles(servers, experiment, users, size).items():
                fields["p50_ms"][ops][str(users)], fields["p99_ms"][ops][str(users)] = median, tail
        fields["size_over_rows"] = {
            ops: sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / bytes_of_rows
            for ops, folder in folders.items()
        }
        random = np.random.default_rng(0)
        requests = [request(experiment, 1, size.items, random) for _ in range(32)]

        def ask(server: Any, number: int) -> None:
            for output in server(**requests[number % len(requests)]).values():
                output.numpy()

        fields |= update_fields(model, folders["stock"], rows_of, ask, size.updates)
    fields |= state_fields(str(CONFIG), size.long)
    fields |= {f"{field}_4g": value for field, value in state_fields(str(LARGE), size.large).items()}
    for name, request_size in (("long", size.long), *size.others):
        with tempfile.TemporaryDirectory() as temporary:
            loads = fields[f"load_{name}"] = load_fields(str(CONFIG), request_size, pathlib.Path(temporary), size.load)
        rows = [{"kind": kind, **loads[kind]} for kind in KINDS]
        harness.print_table(f"open-loop load, {name} requests", rows)
    for kind in ("state", "stock"):
        fields |= {f"{field}_{kind}": fields["load_long"][kind][field] for field in ("p99_ms", "max_rate")}
    fields["cache_bytes_per_user"] = fields["load_long"]["cache_bytes_per_user"]
    with tempfile.TemporaryDirectory() as temporary:
        fields |= row_fields(pathlib.Path(temporary), size.clicks)
    fields |= retrieval_fields(size.catalogue)
    rows = [{"ops": ops, **fields["p50_ms"][ops]} for ops in OPS]
    harness.print_table(f"a served GRM, {size.items} items, {EXPOSED} exposures per user; median ms by users", rows)
    harness.print_fields("the other fields", fields)
    harness.write_json(arguments.json, fields)


if __name__ == "__main__":
    processes.program(main)
