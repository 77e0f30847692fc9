"""Our own step on the workers that two papers state, by the cost model of tf_fusedrec/schedules/planning.

The step has 128 users of 512 tokens with rows of 128 columns, and MTGRBoost's 4 GFLOP forward for a user. The costs of
our ops per id or row are measured on this machine.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.synthetic import ZipfIds
from tf_fusedrec import ops, tf
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync
from tf_fusedrec.schedules.planning.cluster import Cluster
from tf_fusedrec.schedules.planning.forecast import Workload
from tf_fusedrec.schedules.planning.measure import Lookup, Measured
from tf_fusedrec.schedules.planning.replay import shares
from tf_fusedrec.tables import NativeTable

WORKERS = (128, 256, 512, 1024, 2048, 4096)
GROUP = 128  # workers per group in the rows with groups
USERS, TOKENS, DIM, FLOPS = 128, 512, 128, 4e9
DENSE_BYTES = 50e6  # assumed: about 12 million dense weights
VOCABULARY, ZIPF_ALPHA = 10**6, 0.8
MESSAGE_S = 5e-6  # assumed, since no paper states the cost of one message of an all-to-all
SCHEDULES = {
    "sync": Sync(), "frozen_window(4)": FrozenWindow(4), "dual_buffer": DualBuffer(), "nested(4)": Nested(4),
    "nested(8)": Nested(8), "semi_async": SemiAsync(), "pipelined(6)": Pipelined(6),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A worker as a paper states it. The rate of dense compute is assumed: 40 % of the data sheet's."""

    name: str
    per_host: int
    inside_bytes_per_s: float  # per worker
    between_bytes_per_s: float  # per host
    flops_per_s: float

    def cluster(self, workers: int) -> Cluster:
        per_host = min(self.per_host, workers)
        return Cluster(
            workers, 80e9, per_host, self.inside_bytes_per_s, self.between_bytes_per_s, latency_s=MESSAGE_S
        )  # fmt: skip


A100 = Hardware("MTGRBoost: 8 A100 share 200 GB/s between nodes", 8, 600e9, 200e9, 0.4 * 156e12)
H20 = Hardware("FusedRec: 8 H20 of 400 Gb/s each", 8, 900e9, 8 * 400e9 / 8, 0.4 * 74e12)
HARDWARE = (A100, H20)


@functools.cache
def chances(part: float) -> np.ndarray:
    """Returns <float64>[VOCABULARY], the chance that a part of a batch holds an id, in the order of frequency."""
    weights = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -ZIPF_ALPHA
    return -np.expm1(part * USERS * TOKENS * np.log1p(-weights / weights.sum()))


@functools.cache
def owner_imbalance(workers: int) -> float:
    """Returns the busiest owner's received rows over the mean. Ids follow a Zipf law and are hashed to owners."""
    owners = np.random.default_rng(0).integers(0, workers, VOCABULARY)
    rows = np.bincount(owners, chances(1.0), workers)
    return float(rows.max() / rows.mean())


def lookups(dim: int) -> dict[int, list[Lookup]]:
    """Returns the one lookup of a step by number of micro-batches, with the expected number of distinct ids."""
    found = {}
    for count in (1, 2, 4, 8):
        parts = shares(USERS, count)
        unique = tuple(round(float(chances(part).sum())) for part in parts)
        so_far = [round(float(chances(part).sum())) for part in np.cumsum(parts)]
        new = tuple(np.diff(so_far, prepend=0).tolist())
        # Pieces are as large from the end as from the beginning, so are the ids that no later piece holds.
        found[count] = [Lookup(unique, new, new[::-1], 1, dim, 4, 8 * dim)]
    return found


def workload(costs: OpCosts, flops_per_s: float, *, imbalance: float, dim: int = DIM, flops: float = FLOPS) -> Workload:
    """Returns one worker's step, with the busiest owner's lookups. `flops` counts a user's forward pass."""
    ids, rows = USERS * TOKENS, float(chances(1.0).sum())
    compute = 3 * USERS * flops / flops_per_s + ids * (costs.recover + costs.recover_grad)
    measured = Measured(
        samples=USERS,
        prepare=ids * costs.unique + rows * costs.partition,
        lookup=rows * costs.lookup * imbalance,
        update=rows * costs.update * imbalance,
        compute=compute,
        half_compute=compute / 2,
        dense_bytes=int(DENSE_BYTES),
    )
    return Workload(measured, lookups(dim), table_bytes=0.0)


def step_seconds(work: Workload, hardware: Hardware, workers: int, topology: Topology, schedule: Any) -> float:
    """Returns the seconds of a step."""
    forecast = work.forecast(hardware.cluster(workers), topology, schedule, None)
    assert forecast is not None, "tables of no bytes fit"
    return forecast.step_s


def table(costs: OpCosts, hardware: Hardware) -> list[dict[str, Any]]:
    """Returns the step of every schedule in ms. The scaling belongs to nested(4), from 128 workers on."""
    rows: list[dict[str, Any]] = []
    for workers in WORKERS:
        topologies = [Topology()]
        if workers > GROUP:
            topologies += [Topology(workers // GROUP), Topology(workers // GROUP, "weight_sync", sync_every=8)]
        for topology in topologies:
            imbalance = owner_imbalance(workers // topology.groups)
            work = workload(costs, hardware.flops_per_s, imbalance=imbalance)
            rule = topology.rule if topology.groups > 1 else "-"
            row: dict[str, Any] = {"workers": workers, "groups": topology.groups, "rule": rule, "imbalance": imbalance}
            for name, schedule in SCHEDULES.items():
                row[f"{name} ms"] = 1e3 * step_seconds(work, hardware, workers, topology, schedule)
            first = rows[0] if rows else row
            row["nested scaling %"] = 100 * first["nested(4) ms"] / row["nested(4) ms"]
            rows.append(row)
    return rows


class OpCosts(NamedTuple):
    """Seconds per id or row, and the rate of a matrix product."""

    unique: float  # per id: segment_unique
    partition: float  # per unique id: rank_partition
    lookup: float  # per row at its owner: find, and copy to the answer
    update: float  # per row at its owner: sum over sources, optimizer
    recover: float  # per id: rows in the order of ids
    recover_grad: float  # per id: gradients summed by unique id
    flops_per_s: float


def measure_ops(dim: int, ids: int, quick: bool) -> OpCosts:
    """Times every op on `ids` ids of a Zipf law over a million ids, with rows of `dim` columns."""
    drawn = ZipfIds(10**6, 0.8).draw(np.random.default_rng(0), (ids,))
    splits = tf.constant([0, ids], tf.int64)
    unique = ops.segment_unique(tf.constant(drawn), splits)
    harness.check_equal("segment_unique", tf.gather(unique.ids, unique.inverse), drawn)
    rows = int(tf.size(unique.ids))
    embedding = fr.FusedEmbedding(
        [fr.TableConfig(name="t", dim=dim, optimizer=fr.optimizers.Adagrad(0.01, 0.1))],
        [fr.FeatureConfig(name="f", table="t")],
        name="scale",
    )
    table = embedding.lookups[0].table
    assert isinstance(table, NativeTable)
    message = tf.concat([[tf.constant(rows, tf.int64)], unique.ids], 0)
    message_splits = tf.constant([rows + 1], tf.int32)
    found = table.lookup(message, message_splits, training=True)
    again = table.lookup(message, message_splits, training=True)
    harness.check_equal("rows of a second lookup", again.rows, found.rows)
    gradients = tf.random.stateless_normal([rows, dim], [1, 2])
    gathered = tf.gather(found.rows[:rows], unique.inverse)
    index = tf.cast(unique.inverse, tf.int32)
    side = 512
    square = tf.random.stateless_normal([side, side], [3, 4])

    def update() -> None:
        rows = table.lookup(message, message_splits, training=True)
        assert isinstance(rows, ops.TableRows)
        table.apply_gradients([(rows, gradients)], 1.0)

    variants = {
        "unique": lambda: ops.segment_unique(tf.constant(drawn), splits),
        "partition": lambda: ops.rank_partition(
            unique.ids, unique.splits, num_ranks=128, owner=table.owner, id_bits=table.id_bits, segment_names=["t"]
        ),
        "lookup": lambda: table.lookup(message, message_splits, training=True),
        "update": update,
        "recover": lambda: ops.recover(found.rows, index),
        "recover_grad": lambda: ops.recover_grad(gathered, index, tf.constant(rows, tf.int64)),
        "matmul": lambda: tf.linalg.matmul(square, square),
    }
    seconds = harness.measure(variants, warmup=3, repeats=5 if quick else 30)
    median = {name: timing.median_s for name, timing in seconds.items()}
    return OpCosts(
        unique=median["unique"] / ids,
        partition=median["partition"] / rows,
        lookup=median["lookup"] / rows,
        update=max(median["update"] - median["lookup"], 0.0) / rows,
        recover=median["recover"] / ids,
        recover_grad=median["recover_grad"] / ids,
        flops_per_s=2 * side**3 / median["matmul"],
    )
