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

import pathlib
import tempfile
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import harness, processes
from benchmarks.serving.load import KINDS, Load, load_fields
from benchmarks.serving.parts import Catalogue, Clicks, Updates, retrieval_fields, row_fields, update_fields
from benchmarks.serving.state import IDS, Request, Server, asking, batch_of, fill, flat, state_fields
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


class Size(NamedTuple):
    """Sizes of all parts."""

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
    """Returns random inputs of the signature."""
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
