"""Our own step on the workers that two papers state, by the cost model of tf_fusedrec/schedules/planning.

The step has 128 users of 512 tokens with rows of 128 columns, and MTGRBoost's 4 GFLOP forward for a user.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from benchmarks.scale.ops import OpCosts
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync
from tf_fusedrec.schedules.planning.cluster import Cluster
from tf_fusedrec.schedules.planning.forecast import Workload
from tf_fusedrec.schedules.planning.measure import Lookup, Measured
from tf_fusedrec.schedules.planning.replay import shares

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
