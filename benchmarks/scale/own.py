"""Our own step on the workers that two papers state, by the cost model of tf_fusedrec/schedules/planning.

The step has 128 users of 512 tokens with rows of 128 columns, and MTGRBoost's 4 GFLOP forward for a user. It is dense
compute and exchanges; lookups and updates of tables take no time here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, Schedule, SemiAsync, Sync
from tf_fusedrec.schedules.planning.cluster import Cluster
from tf_fusedrec.schedules.planning.forecast import Workload
from tf_fusedrec.schedules.planning.measure import Lookup, Measured
from tf_fusedrec.schedules.planning.replay import shares

WORKERS = (128, 256, 512, 1024, 2048, 4096)
GROUP = 128  # workers per group in the rows with groups
USERS, TOKENS, DIM, FLOPS = 128, 512, 128, 4e9
DENSE_BYTES = 50_000_000  # assumed: about 12 million dense weights
VOCABULARY, ZIPF_ALPHA = 10**6, 0.8
MESSAGE_S = 5e-6  # assumed, since no paper states the cost of one message of an all-to-all
SCHEDULES = {
    "sync": Sync(), "frozen_window(4)": FrozenWindow(4), "dual_buffer": DualBuffer(), "nested(4)": Nested(4),
    "nested(8)": Nested(8), "semi_async": SemiAsync(), "pipelined(6)": Pipelined(6),
}  # fmt: skip


class Hardware(NamedTuple):
    """A worker as a paper states it. The rate of dense compute is assumed: 40 % of the data sheet's."""

    name: str
    per_host: int
    inside_bytes_per_s: float  # per worker
    between_bytes_per_s: float  # per host
    flops_per_s: float


A100 = Hardware("MTGRBoost: 8 A100 share 200 GB/s between nodes", 8, 600e9, 200e9, 0.4 * 156e12)
H20 = Hardware("FusedRec: 8 H20 of 400 Gb/s each", 8, 900e9, 8 * 400e9 / 8, 0.4 * 74e12)


@functools.cache
def distinct_ids(part: float) -> int:
    """Returns the expected number of distinct ids in a part of a batch."""
    weights = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -ZIPF_ALPHA
    chances = -np.expm1(part * USERS * TOKENS * np.log1p(-weights / weights.sum()))
    return round(float(chances.sum()))


def lookups(dim: int) -> dict[int, list[Lookup]]:
    """Returns the one lookup of a step by number of micro-batches, with the expected number of distinct ids."""
    by_count = {}
    for count in (1, 2, 4, 8):
        parts = shares(USERS, count)
        unique = tuple(distinct_ids(part) for part in parts)
        new = tuple(np.diff([distinct_ids(part) for part in np.cumsum(parts)], prepend=0).tolist())
        # Pieces are as large from the end as from the beginning, so are the ids that no later piece holds.
        by_count[count] = [Lookup(unique, new, new[::-1], 1, dim, 4, 8 * dim)]
    return by_count


def step_seconds(
    hardware: Hardware, workers: int, topology: Topology, schedule: Schedule, *, dim: int = DIM, flops: float = FLOPS
) -> float:
    """Returns the seconds of a step. `flops` counts a user's forward pass."""
    compute = 3 * USERS * flops / hardware.flops_per_s
    measured = Measured(
        samples=USERS, prepare=0.0, lookup=0.0, update=0.0, compute=compute, half_compute=compute / 2,
        dense_bytes=DENSE_BYTES,
    )  # fmt: skip
    cluster = Cluster(
        workers, 80e9, min(hardware.per_host, workers), hardware.inside_bytes_per_s, hardware.between_bytes_per_s,
        latency_s=MESSAGE_S,
    )  # fmt: skip
    forecast = Workload(measured, lookups(dim), table_bytes=0.0).forecast(cluster, topology, schedule, None)
    assert forecast is not None, "tables of no bytes fit"
    return forecast.step_s


def table(hardware: Hardware) -> list[dict[str, Any]]:
    """Returns the step of every schedule in ms. The scaling belongs to nested(4), from 128 workers on."""
    rows: list[dict[str, Any]] = []
    for workers in WORKERS:
        groups = workers // GROUP
        topologies = [Topology(), Topology(groups), Topology(groups, "weight_sync", sync_every=8)]
        for topology in topologies if groups > 1 else topologies[:1]:
            ms = {
                f"{name} ms": 1e3 * step_seconds(hardware, workers, topology, schedule)
                for name, schedule in SCHEDULES.items()
            }
            rule = topology.rule if topology.groups > 1 else "-"
            rows.append({"workers": workers, "groups": topology.groups, "rule": rule, **ms})
    alone = rows[0]["nested(4) ms"]
    return [{**row, "nested scaling %": 100 * alone / row["nested(4) ms"]} for row in rows]
