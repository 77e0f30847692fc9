"""Question: how do C groups of R ranks change the busiest owner, the memory and the bytes that travel?

    python -m benchmarks.papers.topology [--quick] [--json FILE]

The benchmark repeats Table 1 of 2D-SP for this library. Imbalance is the busiest rank's count over the mean. Peak is
the memory of the fullest rank. First 4 real ranks run as 1, 2 and 4 groups with the rule weight_sync. They report the
ids that a rank receives, its rows, and the bytes that its table has mapped. A count without ranks (`count`) must
agree. The same count then covers as many ranks as a cluster has. Ids are a Zipf stream.

2D-SP counts seconds of lookups instead of ids, and places whole tables instead of hashed ids. Its figures at C = 1 are
therefore larger.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes
from benchmarks.harness.ranks import print_on_rank_0
from benchmarks.harness.synthetic import ZipfIds
from tf_fusedrec import Topology, ops, tf
from tf_fusedrec.exchange import routing
from tf_fusedrec.exchange.routing import by_ranges
from tf_fusedrec.files.hash_order import hash_range_owner
from tf_fusedrec.tables import NativeTable

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
    # A rank owns 1 / shards of its ids, whose rows and gradients do not travel.
    to_group = found.received.mean() * (1 - groups / ranks)
    to_replicas = (groups - 1) * found.distinct.mean()
    if by_ranges(groups):
        to_replicas = (groups - 1) / groups * (found.distinct.mean() + found.distinct_of_all.mean())
    return {
        "ranks": ranks, "groups": groups, "id_imbalance": imbalance(found.received),
        "row_imbalance": imbalance(found.rows), "peak_mb": float(memory.max() / 1e6),
        "mean_mb": float(memory.mean() / 1e6), "float32_kb": float(4e-3 * DIM * (2 * to_group + to_replicas)),
    }  # fmt: skip


def train(groups: int, mine: list[np.ndarray]) -> dict[str, Any]:
    """Returns the ids received in each step, the rows of the table after the last step, and its mapped bytes."""
    name = f"groups{groups}"
    layer = fr.FusedEmbedding(
        [fr.TableConfig("item", DIM, fr.optimizers.Adagrad(0.01, 0.1))],
        [fr.FeatureConfig("item", "item")],
        topology=Topology(groups, "weight_sync"),
        name=name,
    )
    table, layout = layer.internals.groups[0].table, layer.layout
    assert isinstance(table, NativeTable)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer({"item": ids})["item"]))
        tape.gradient(loss, layer.trainable_variables)
        size = tf.size(ids, tf.int64)
        unique = ops.UniqueIds(ids, tf.stack([0, size]), tf.range(tf.size(ids)))  # a batch has no duplicates
        outgoing = routing.Outgoing(f"{name}.count", unique, table.partition, len(table.names))
        route = routing.send_ids([outgoing], layout)[0]
        return tf.reduce_sum(route.row_splits)

    received = [int(step(tf.constant(ids))) for ids in mine]
    memory = table.memory
    return {
        "received": received,
        "rows": table.size("item"),
        "table_bytes": memory["key_bytes"] + memory["row_bytes"],
    }


def on_rank(steps: int, ids_per_rank: int) -> dict[str, Any]:
    """Returns the answers of `train` on each rank for every number of groups."""
    fr.init(*(Topology(groups, "weight_sync") for groups in REAL_GROUPS))
    rank, ranks = fr.rank(), fr.size()
    mine = [of_step[rank] for of_step in batches(ranks, steps, ids_per_rank)]
    found = {}
    for groups in REAL_GROUPS:
        answers = fr.collectives.all_gather_object(train(groups, mine))
        found[str(groups)] = {name: [answer[name] for answer in answers] for name in answers[0]}
        print_on_rank_0(f"{groups} groups: {found[str(groups)]['rows']} rows")
    return found


REAL_RANKS = 4
TIMEOUT_S = 300


def measured(steps: int, ids_per_rank: int) -> list[dict[str, Any]]:
    """Returns the lines of the 4 real ranks, checked against `count`."""
    answers = processes.ask_ranks(on_rank, REAL_RANKS, timeout_s=TIMEOUT_S, steps=steps, ids_per_rank=ids_per_rank)
    sent, lines = batches(REAL_RANKS, steps, ids_per_rank), []
    for groups in REAL_GROUPS:
        want, got = count(sent, groups), answers[str(groups)]
        harness.check_equal(f"ids received, {groups} groups", np.transpose(got["received"]), want.received)
        harness.check_equal(f"rows of each rank, {groups} groups", got["rows"], want.rows)
        megabytes = np.array(got["table_bytes"]) / 1e6
        lines.append({
            "ranks": REAL_RANKS, "groups": groups, "id_imbalance": imbalance(want.received),
            "row_imbalance": imbalance(want.rows), "peak_table_mb": float(megabytes.max()),
            "mean_table_mb": float(megabytes.mean()),
        })  # fmt: skip
    return lines


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    real = measured(steps=4 if arguments.quick else 24, ids_per_rank=32_768)
    harness.print_table("measured on real ranks, weight_sync: ids that a rank receives, and memory of its table", real)
    ranks, steps = (64, 2) if arguments.quick else (256, 4)
    sent = batches(ranks, steps, ids_per_rank=8_192)
    many = [counted(sent, groups) for groups in (1, 2, 4, 8, 16, ranks)]
    harness.print_table("counted: the same for many ranks, and kilobytes that a rank receives in a step", many)
    harness.write_json(arguments.json, {"measured": real, "counted": many})


if __name__ == "__main__":
    processes.program(main)
