"""Question: what does cutting R ranks into G groups do to the busiest owner, to memory and to what travels?

    python -m benchmarks.topology [--quick] [--json FILE]

The table of 2D-SP (Table 1), of this library: imbalance is what the busiest rank has over the mean of all, peak is the
rank with the most. First on 4 real ranks as 1, 2 and 4 groups with the rule weight_sync: ids that a rank is asked for,
its rows, and the bytes that its table has mapped. What the four count is held against counting without ranks
(tf_fusedrec's owners, in NumPy); then as many ranks as a cluster has are counted so. Ids are a Zipf stream. 2D-SP has
seconds of lookups in the place of ids and lays out whole tables, not hashes of ids, so its figures at G = 1 are larger.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks import children, harness
from benchmarks.synthetic import ZipfIds
from tf_fusedrec import Topology
from tf_fusedrec.tables.hash_order import hash_range_owner

DIM = 64
REAL_RANKS, REAL_GROUPS = 4, (1, 2, 4)
VOCABULARY, ALPHA = 10**6, 1.1
ROW_BYTES = 4 * 2 * DIM + 16  # a row with the slot of Adagrad and its header
KEY_BYTES = 13  # of an id in the index, at its usual load
TIMEOUT_S = 300


class Counts(NamedTuple):
    """What R ranks do in some steps."""

    received: np.ndarray  # <int64>[steps, R] ids that a rank is asked for by its group
    distinct: np.ndarray  # <int64>[steps, R] of them, without what several ranks ask for
    rows: np.ndarray  # <int64>[R] of its table after the last step, those of other groups among them


def batches(ranks: int, steps: int, ids_per_rank: int) -> list[list[np.ndarray]]:
    """[steps][ranks] distinct ids <int64>[U] of a batch: what a rank asks for."""
    stream = ZipfIds(VOCABULARY, ALPHA)
    return [
        [np.unique(stream.draw(np.random.default_rng((step, rank)), (ids_per_rank,))) for rank in range(ranks)]
        for step in range(steps)
    ]


def count(asked: list[list[np.ndarray]], groups: int) -> Counts:
    """Of `batches`, by the owners that the library gives ids."""
    ranks = len(asked[0])
    shards = ranks // groups
    received, distinct = (np.zeros([len(asked), ranks], np.int64) for _ in range(2))
    seen: list[list[np.ndarray]] = [[] for _ in range(shards)]
    for step, of_step in enumerate(asked):
        for group in Topology(groups).sets(ranks)[0]:
            ids = np.concatenate([of_step[rank] for rank in group])
            owners = hash_range_owner(ids, shards)
            for shard, rank in enumerate(group):
                mine = ids[owners == shard]
                received[step, rank] = len(mine)
                seen[shard].append(np.unique(mine))
                distinct[step, rank] = len(seen[shard][-1])
    rows = np.zeros(ranks, np.int64)
    for group in Topology(groups).sets(ranks)[0]:
        rows[list(group)] = [len(np.unique(np.concatenate(parts))) for parts in seen]
    return Counts(received, distinct, rows)


def imbalance(of_ranks: np.ndarray) -> float:
    """Largest over mean of the last axis, mean over the others."""
    return float((of_ranks.max(axis=-1) / of_ranks.mean(axis=-1)).mean())


def counted(asked: list[list[np.ndarray]], groups: int) -> dict[str, Any]:
    """One line of the table of many ranks."""
    found, ranks = count(asked, groups), len(asked[0])
    # Ids and rows that a lookup has in hand: asked for, answered, gradients.
    memory = found.rows * (ROW_BYTES + KEY_BYTES) + found.received.max(axis=0) * (8 + 2 * 4 * DIM)
    # A rank keeps 1 / shards of what it asks for to itself.
    to_group = found.received.mean() * (1 - groups / ranks)
    to_replicas = (groups - 1) * found.distinct.mean()
    return {
        "ranks": ranks,
        "groups": groups,
        "id_imbalance": imbalance(found.received),
        "row_imbalance": imbalance(found.rows),
        "peak_mb": float(memory.max() / 1e6),
        "mean_mb": float(memory.mean() / 1e6),
        "alltoall_peers": ranks // groups - 1,
        "ids_kb": float(8e-3 * (to_group + to_replicas)),
        "float32_kb": float(4e-3 * DIM * (2 * to_group + to_replicas)),
        "bfloat16_kb": float(2e-3 * DIM * (2 * to_group + to_replicas)),
        "of_which_to_replicas": float(to_replicas / max(2 * to_group + to_replicas, 1)),
    }


def measured(steps: int, ids_per_rank: int) -> list[dict[str, Any]]:
    """The lines of the 4 real ranks, checked against `count`."""
    told = children.ask_ranks(
        "benchmarks.topology_ranks", REAL_RANKS, timeout_s=TIMEOUT_S, steps=steps, ids_per_rank=ids_per_rank
    )
    asked, lines = batches(REAL_RANKS, steps, ids_per_rank), []
    for groups in REAL_GROUPS:
        want, got = count(asked, groups), told[str(groups)]
        harness.check_equal(f"ids received, {groups} groups", np.transpose(got["received"]), want.received)
        harness.check_equal(f"rows of each rank, {groups} groups", got["rows"], want.rows)
        megabytes = np.array(got["table_bytes"]) / 1e6
        lines.append(
            {
                "ranks": REAL_RANKS,
                "groups": groups,
                "id_imbalance": imbalance(want.received),
                "row_imbalance": imbalance(want.rows),
                "peak_table_mb": float(megabytes.max()),
                "mean_table_mb": float(megabytes.mean()),
            }
        )
    return lines


def main() -> None:
    arguments = harness.parse_arguments(__doc__.splitlines()[0])
    real = measured(steps=4 if arguments.quick else 24, ids_per_rank=32_768)
    harness.print_table("measured on real ranks, weight_sync: what a rank is asked for, and memory of its table", real)
    ranks, steps = (64, 2) if arguments.quick else (256, 4)
    asked = batches(ranks, steps, ids_per_rank=8_192)
    many = [counted(asked, groups) for groups in (1, 2, 4, 8, 16, ranks)]
    harness.print_table("counted: the same of many ranks, and kilobytes that a rank gets in a step", many)
    harness.write_json(arguments.json, {"measured": real, "counted": many})


if __name__ == "__main__":
    harness.run(main)
