"""Question: how fast are ids put in the order of their owners, beside TFRA's partition?

    python -m benchmarks.rank_partition [--quick] [--json FILE]

TFRA applies its partition function, TFRA>DynamicPartition of ids and of positions, and a concat. Both return a send
buffer in rank order, its splits and the inverse order. Our op also packs the counts of every segment.
"""

import itertools
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.op_case import measure_case
from benchmarks.harness.synthetic import segment_ids
from tests.oracles.rank_partition import rank_partition_oracle
from tests.oracles.segment_unique import segment_unique_oracle
from tf_fusedrec import ops, tf
from tf_fusedrec.tables.hash_order import tfra_owner
from tf_fusedrec.tables.tfra_library import de


def tfra_partition(ids: tf.Tensor, ranks: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns ids in rank order, ids per rank and their positions, as HvdAllToAllEmbedding computes them."""
    owner = tf.cast(tf.math.floormod(tf.cast(tf.bitwise.bitwise_and(ids, 0x7FFFFFFF), tf.int32), ranks), tf.int32)
    parts = de.data_flow.dynamic_partition(ids, owner, ranks)
    positions = de.data_flow.dynamic_partition(tf.range(tf.shape(ids)[0]), owner, ranks)
    return tf.concat(parts, axis=0), tf.stack([tf.size(p) for p in parts]), tf.concat(positions, axis=0)


def _check(ids: np.ndarray, splits: np.ndarray, ranks: int, ours: ops.RankedIds, theirs) -> None:
    message, send_splits, id_splits, restore = rank_partition_oracle(ids, splits, ranks, "tfra")
    harness.check_equal("message of ours", ours.message[: len(message)], message)
    harness.check_equal("send splits of ours", ours.send_splits, send_splits)
    harness.check_equal("id splits of ours", ours.id_splits, id_splits)
    harness.check_equal("restore of ours", ours.restore, restore)
    order = np.argsort(tfra_owner(ids, ranks), kind="stable")
    harness.check_equal("ids of TFRA", theirs[0], ids[order])
    harness.check_equal("splits of TFRA", theirs[1], id_splits)
    harness.check_equal("positions of TFRA", theirs[2], order)


def measure(quick: bool) -> list[dict[str, Any]]:
    """Returns one record per case."""
    bandwidth = harness.memcpy_bytes_per_s()
    axes = itertools.product([50_000] if quick else [50_000, 1_000_000], [2] if quick else [2, 8, 64])
    return [_case(*case, bandwidth, quick) for case in axes]


def _case(n_ids: int, ranks: int, bandwidth: float, quick: bool) -> dict[str, Any]:
    ids, splits, _ = segment_unique_oracle(*segment_ids(0, n_ids=n_ids, zipf_alpha=1.05, segments=26))
    ids_tensor, splits_tensor = tf.constant(ids), tf.constant(splits)
    ours = tf.function(lambda i, s: ops.rank_partition(i, s, num_ranks=ranks, owner="tfra"))
    peer = tf.function(lambda i: tfra_partition(i, ranks))
    _check(ids, splits, ranks, ours(ids_tensor, splits_tensor), peer(ids_tensor))
    unique, segments = len(ids), len(splits) - 1
    return measure_case(
        {"n_ids": unique, "segments": segments, "ranks": ranks},
        ours=lambda: ours(ids_tensor, splits_tensor),
        peer=lambda: peer(ids_tensor),
        peer_name="TFRA>DynamicPartition",
        ids=unique,
        bytes_moved=8 * unique + 8 * (unique + ranks * segments) + 4 * unique,
        memory_bytes_per_s=bandwidth,
        quick=quick,
    )


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.report("rank_partition against TFRA's partition", measure(arguments.quick), arguments)


if __name__ == "__main__":
    harness.run(main)
