"""Question: does one pass over a group of tables remove duplicates faster than a tf.unique per table?

    python -m benchmarks.segment_unique [--quick] [--json FILE]

Our op makes one pass over the ids of a group. The peer calls tf.unique once per segment and joins the results.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import harness
from benchmarks.harness.op_case import measure_case
from benchmarks.harness.synthetic import segment_ids
from tests.oracles.segment_unique import segment_unique_oracle
from tf_fusedrec import ops, tf


def unique_per_segment(ids: tf.Tensor, splits: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns unique ids, their splits and the inverse, with one tf.unique per segment."""
    unique, inverse, ends = [], [], [tf.constant(0)]
    for begin, end in zip(splits[:-1], splits[1:]):
        values, index = tf.unique(ids[begin:end])
        unique.append(values)
        inverse.append(index + ends[-1])
        ends.append(ends[-1] + tf.size(values))
    return tf.concat(unique, axis=0), tf.stack(ends), tf.concat(inverse, axis=0)


def measure(quick: bool) -> list[dict[str, Any]]:
    """Returns one record per case."""
    bandwidth = harness.memcpy_bytes_per_s()
    axes = itertools.product([50_000] if quick else [50_000, 1_000_000], [1.05] if quick else [0.8, 1.05, 1.3], [1, 26])
    return [_case(*case, bandwidth, quick) for case in axes]


def _case(n_ids: int, zipf_alpha: float, segments: int, bandwidth: float, quick: bool) -> dict[str, Any]:
    ids, splits = segment_ids(0, n_ids=n_ids, zipf_alpha=zipf_alpha, segments=segments)
    ids_tensor, splits_tensor = tf.constant(ids), tf.constant(splits)
    bounds = splits.tolist()
    ours = tf.function(ops.segment_unique)
    peer = tf.function(lambda x: unique_per_segment(x, bounds))
    want = segment_unique_oracle(ids, splits)
    for who, got in (("ours", ours(ids_tensor, splits_tensor)), ("tf.unique", peer(ids_tensor))):
        for what, g, w in zip(("unique ids", "unique splits", "inverse"), got, want):
            harness.check_equal(f"{what} of {who}, n_ids {n_ids}, {segments} segments", g, w)
    unique = len(want[0])
    return measure_case(
        {"n_ids": n_ids, "zipf_alpha": zipf_alpha, "segments": segments, "unique": unique},
        ours=lambda: ours(ids_tensor, splits_tensor),
        peer=lambda: peer(ids_tensor),
        peer_name="tf.unique per segment",
        ids=n_ids,
        bytes_moved=8 * n_ids + 8 * unique + 4 * n_ids,
        memory_bytes_per_s=bandwidth,
        quick=quick,
    )


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.report("segment_unique against tf.unique per segment", measure(arguments.quick), arguments)


if __name__ == "__main__":
    harness.run(main)
