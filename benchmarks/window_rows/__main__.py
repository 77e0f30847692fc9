"""Question: what does it cost to plan which rows and gradients travel with which micro-batch?

    python -m benchmarks.window_rows [--quick] [--json FILE]

Ours are window_unique and window_route for one table. The peer finds the same in TensorFlow, by tf.unique, segment
maxima and a stable sort, and makes no marks. Both get the ids already sorted by owner.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.op_case import measure_case
from tf_fusedrec import ops, tf


def planned_by_sort(pieces: list[tf.Tensor], restore: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the row of each id of each piece, and the terms of the gradients by last piece, in plain TensorFlow."""
    piece_of = tf.repeat(tf.range(len(pieces)), [tf.size(piece) for piece in pieces])
    ids, number = tf.unique(tf.concat(pieces, axis=0))
    last = tf.math.unsorted_segment_max(piece_of, number, tf.size(ids))
    begins = tf.cumsum([tf.size(part) for part in restore], exclusive=True)
    row_of = tf.concat([begin + part for begin, part in zip(tf.unstack(begins), restore)], axis=0)
    rows = tf.gather(row_of, number)
    by_last = tf.gather(last, number) * tf.size(ids) + rows
    return rows, tf.argsort(by_last, stable=True)


def measure(quick: bool) -> list[dict[str, Any]]:
    """Returns one record per case."""
    bandwidth = harness.memcpy_bytes_per_s()
    axes = itertools.product([50_000] if quick else [8_000, 50_000, 800_000], [8] if quick else [4, 8, 16], [1.1, 1.5])
    return [_case(*case, bandwidth, quick) for case in axes]


def _case(n_ids: int, pieces: int, alpha: float, bandwidth: float, quick: bool) -> dict[str, Any]:
    random = np.random.default_rng(0)
    drawn = np.minimum(random.zipf(alpha, n_ids), 2**40)
    parts = [tf.constant(list(dict.fromkeys(part.tolist())), tf.int64) for part in np.array_split(drawn, pieces)]
    unique = [ops.UniqueIds(part, tf.constant([0, len(part)], tf.int64), None) for part in parts]
    # One owner: the order by owner is the order of segments, in which the peer's terms come.
    ranked = [ops.rank_partition(*new, num_ranks=1) for new in ops.window_unique(unique).new]
    restore = [one.restore for one in ranked]

    @tf.function
    def ours() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        route = ops.window_route(ops.window_unique(unique), ranked, num_segments=1)
        return route.rows, route.term_index

    @tf.function
    def peer() -> tuple[tf.Tensor, tf.Tensor]:
        return planned_by_sort(parts, restore)

    for name, got, wanted in zip(("rows", "terms"), ours(), peer()):
        harness.check_equal(name, tf.concat(got, axis=0), wanted)
    held = sum(len(part) for part in parts)
    return measure_case(
        {"n_ids": n_ids, "pieces": pieces, "zipf_alpha": alpha},
        ours=ours,
        peer=peer,
        peer_name="tf.unique, tf.argsort",
        ids=held,
        bytes_moved=(8 + 4 + 4 + 4) * held,
        memory_bytes_per_s=bandwidth,
        quick=quick,
    )


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.report("window_unique and window_route against tf.argsort", measure(arguments.quick), arguments)


if __name__ == "__main__":
    harness.run(main)
