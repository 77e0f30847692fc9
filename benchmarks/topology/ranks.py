"""One rank of benchmarks.topology, which trains a layer on the same batches under every number of groups."""

from __future__ import annotations

from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import children
from benchmarks.topology.counts import DIM, REAL_GROUPS, batches
from tf_fusedrec import ops, tf
from tf_fusedrec.exchange import all_to_all
from tf_fusedrec.tables import NativeTable


def topology(groups: int) -> fr.Topology:
    return fr.Topology(groups, "weight_sync")


def train(groups: int, mine: list[np.ndarray]) -> dict[str, Any]:
    """Returns the ids received in each step, the rows of the table after the last step, and its mapped bytes."""
    name = f"groups{groups}"
    layer = fr.FusedEmbedding(
        [fr.TableConfig("item", DIM, fr.optimizers.Adagrad(0.01, 0.1))],
        [fr.FeatureConfig("item", "item")],
        topology=topology(groups),
        name=name,
    )
    table, layout = layer.lookups[0].table, layer.layout
    assert isinstance(table, NativeTable)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer({"item": ids})["item"]))
        tape.gradient(loss, layer.trainable_variables)
        size = tf.size(ids, tf.int64)
        unique = ops.UniqueIds(ids, tf.stack([0, size]), tf.range(tf.size(ids)))  # a batch has no duplicates
        outgoing = all_to_all.OutgoingIds(unique, f"{name}.count", table.owner, table.id_bits, table.names)
        route = all_to_all.route_ids([outgoing], layout)[0]
        return tf.reduce_sum(route.received_splits)

    received = [int(step(tf.constant(ids))) for ids in mine]
    memory = table.memory
    return {
        "received": received,
        "rows": table.size("item"),
        "table_bytes": memory["key_bytes"] + memory["row_bytes"],
    }


def main(steps: int, ids_per_rank: int) -> dict[str, Any] | None:
    """Returns, on rank 0, the answers of `train` on each rank for every number of groups."""
    fr.init(*map(topology, REAL_GROUPS))
    rank, ranks = fr.collectives.rank(), fr.collectives.size()
    mine = [of_step[rank] for of_step in batches(ranks, steps, ids_per_rank)]
    found = {}
    for groups in REAL_GROUPS:
        answers = fr.collectives.all_gather_object(train(groups, mine))
        found[str(groups)] = {name: [answer[name] for answer in answers] for name in answers[0]}
        if rank == 0:
            print(f"{groups} groups: {found[str(groups)]['rows']} rows", flush=True)
    return found if rank == 0 else None


if __name__ == "__main__":
    children.answer(main)
