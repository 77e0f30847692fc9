"""Question: what does it cost to join the ids of many features in one flat tensor?

    python -m benchmarks.fuse_ids [--quick] [--json FILE]

The peer is tf.concat with tf.size and tf.cumsum. Our op also checks the row_splits of ragged features and returns the
bags of the ids. The peer does neither.
"""

import itertools
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.op_case import measure_case
from benchmarks.harness.synthetic import ZipfIds
from tests.oracles.fuse_ids import fuse_ids_oracle
from tf_fusedrec import ops, tf


def concatenated(ids: list[tf.Tensor], segments: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns fused ids and segment splits, in plain TensorFlow."""
    lengths = tf.stack([tf.size(i, out_type=tf.int64) for i in ids])
    ends = tf.cumsum(tf.math.segment_sum(lengths, segments))
    return tf.concat(ids, axis=0), tf.concat([[0], ends], axis=0)


def measure(quick: bool) -> list[dict[str, Any]]:
    """Returns one record per case."""
    bandwidth = harness.memcpy_bytes_per_s()
    axes = itertools.product([50_000] if quick else [50_000, 1_000_000], [26] if quick else [26, 200])
    return [_case(*case, bandwidth, quick) for case in axes]


def _case(n_ids: int, features: int, bandwidth: float, quick: bool) -> dict[str, Any]:
    random, zipf = np.random.default_rng(0), ZipfIds(10**6, 1.05)
    row_splits = np.linspace(0, n_ids // features, 513).astype(np.int64)
    arrays = [zipf.draw(random, (int(row_splits[-1]),)) for _ in range(features)]
    segments = [f // 2 for f in range(features)]  # two features to a table
    names = [f"f{f}" for f in range(features)]
    ids, splits = [tf.constant(a) for a in arrays], tf.constant(row_splits)

    @tf.function
    def ours() -> ops.FusedIds:
        ragged = dict.fromkeys(range(0, features, 2), splits)  # every other feature is ragged
        return ops.fuse_ids(
            ids, ragged, segments=segments, num_segments=segments[-1] + 1, feature_names=names,
            bag_sizes=[0 if f in ragged else 1 for f in range(features)], combiners=["sum"] * features,
        )  # fmt: skip

    @tf.function
    def peer() -> tuple[tf.Tensor, tf.Tensor]:
        return concatenated(ids, segments)

    want = fuse_ids_oracle(arrays, segments, segments[-1] + 1)
    for who, call in (("ours", ours), ("tf.concat", peer)):
        for what, g, w in zip(("ids", "segment splits"), call(), want):
            harness.check_equal(f"{what} of {who}, {features} features", g, w)
    total = len(want[0])
    return measure_case(
        {"n_ids": total, "features": features, "segments": segments[-1] + 1},
        ours=ours,
        peer=peer,
        peer_name="tf.concat, tf.cumsum",
        ids=total,
        bytes_moved=16 * total,
        memory_bytes_per_s=bandwidth,
        quick=quick,
    )


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.report("fuse_ids against tf.concat", measure(arguments.quick), arguments)


if __name__ == "__main__":
    harness.run(main)
