"""Counts the ids, rows and bytes of ranks in groups, without ranks: in NumPy, by the library's owners of ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.synthetic import ZipfIds
from tf_fusedrec import Topology
from tf_fusedrec.exchange.gradient_sync import by_ranges
from tf_fusedrec.tables.hash_order import hash_range_owner

DIM = 64
REAL_GROUPS = (1, 2, 4)  # numbers of groups of the real ranks
VOCABULARY, ALPHA = 10**6, 1.1
ROW_BYTES = 4 * 2 * DIM + 16  # a row with the slot of Adagrad and its header
KEY_BYTES = 13  # bytes per id in the index, at its usual load


class Counts(NamedTuple):
    """Counts of R ranks over some steps."""

    received: np.ndarray  # <int64>[steps, R] ids that a rank receives from its group
    distinct: np.ndarray  # <int64>[steps, R] distinct ones among them
    distinct_of_all: np.ndarray  # <int64>[steps, R] distinct ids of its shard in all groups
    rows: np.ndarray  # <int64>[R] rows of its table after the last step, with rows that other groups trained


def batches(ranks: int, steps: int, ids_per_rank: int) -> list[list[np.ndarray]]:
    """Returns the distinct ids <int64>[U] that a rank sends, by [step][rank]."""
    stream = ZipfIds(VOCABULARY, ALPHA)
    return [
        [np.unique(stream.draw(np.random.default_rng((step, rank)), (ids_per_rank,))) for rank in range(ranks)]
        for step in range(steps)
    ]


def count(sent: list[list[np.ndarray]], groups: int) -> Counts:
    """Counts the result of `batches` by the library's owners of ids."""
    ranks = len(sent[0])
    shards = ranks // groups
    received, distinct, distinct_of_all = (np.zeros([len(sent), ranks], np.int64) for _ in range(3))
    layout = Topology(groups).sets(ranks)
    seen: list[list[np.ndarray]] = [[] for _ in range(shards)]
    for step, of_step in enumerate(sent):
        of_shards: list[list[np.ndarray]] = [[] for _ in range(shards)]
        for group in layout[0]:
            ids = np.concatenate([of_step[rank] for rank in group])
            owners = hash_range_owner(ids, shards)
            for shard, rank in enumerate(group):
                mine = ids[owners == shard]
                received[step, rank] = len(mine)
                of_shards[shard].append(np.unique(mine))
                distinct[step, rank] = len(of_shards[shard][-1])
        for shard, parts in enumerate(of_shards):
            seen[shard].append(np.unique(np.concatenate(parts)))
            distinct_of_all[step, [group[shard] for group in layout[0]]] = len(seen[shard][-1])
    rows = np.zeros(ranks, np.int64)
    for group in layout[0]:
        rows[list(group)] = [len(np.unique(np.concatenate(parts))) for parts in seen]
    return Counts(received, distinct, distinct_of_all, rows)


def imbalance(of_ranks: np.ndarray) -> float:
    """Returns the largest value over the mean of the last axis, averaged over the other axes."""
    return float((of_ranks.max(axis=-1) / of_ranks.mean(axis=-1)).mean())


def counted(sent: list[list[np.ndarray]], groups: int) -> dict[str, Any]:
    """Returns one line of the table of many ranks."""
    found, ranks = count(sent, groups), len(sent[0])
    # A lookup holds the received ids, their rows and their gradients.
    memory = found.rows * (ROW_BYTES + KEY_BYTES) + found.received.max(axis=0) * (8 + 2 * 4 * DIM)
    # A rank owns 1 / shards of its ids, which do not travel.
    to_group = found.received.mean() * (1 - groups / ranks)
    to_replicas = (groups - 1) * found.distinct.mean()
    if by_ranges(groups):
        to_replicas = (groups - 1) / groups * (found.distinct.mean() + found.distinct_of_all.mean())
    return {
        "ranks": ranks,
        "groups": groups,
        "id_imbalance": imbalance(found.received),
        "row_imbalance": imbalance(found.rows),
        "peak_mb": float(memory.max() / 1e6),
        "mean_mb": float(memory.mean() / 1e6),
        "all_to_all_peers": ranks // groups - 1,
        "ids_kb": float(8e-3 * (to_group + to_replicas)),
        "float32_kb": float(4e-3 * DIM * (2 * to_group + to_replicas)),
        "bfloat16_kb": float(2e-3 * DIM * (2 * to_group + to_replicas)),
        "of_which_to_replicas": float(to_replicas / max(2 * to_group + to_replicas, 1)),
    }
