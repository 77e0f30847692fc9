"""Question: what does it cost to join the ids of several lookups for one all-to-all, and to split them again?

    python -m benchmarks.join_messages [--quick] [--json FILE]

The peer computes the index of every entry in TensorFlow, by ragged ranges, and gathers. It checks nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.op_case import measure_case
from tests.oracles.join_messages import join_oracle, split_oracle
from tf_fusedrec import ops, tf

SEGMENTS = 4  # tables of each lookup


def _ranges(begins: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    begins, lengths = tf.reshape(begins, [-1]), tf.reshape(lengths, [-1])
    return tf.ragged.range(begins, begins + lengths).values


def joined_by_gather(messages: Sequence[tf.Tensor], splits: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the joined message and its splits, in plain TensorFlow."""
    entries = tf.stack(splits, axis=1)
    base = tf.cumsum(tf.stack([tf.size(message) for message in messages]), exclusive=True)
    begins = base + tf.cumsum(entries, axis=0, exclusive=True)
    return tf.gather(tf.concat(messages, axis=0), _ranges(begins, entries)), tf.reduce_sum(entries, axis=1)


def split_by_gather(message: tf.Tensor, splits: tf.Tensor, segments: Sequence[int]) -> list[tf.Tensor]:
    """Returns the message of each lookup, in plain TensorFlow."""
    begins, parts = tf.cumsum(splits, exclusive=True), []
    for count in segments:
        header = tf.gather(message, begins[:, tf.newaxis] + tf.range(count))
        entries = count + tf.cast(tf.reduce_sum(header, axis=1), tf.int32)
        parts.append(tf.gather(message, _ranges(begins, entries)))
        begins += entries
    return parts


def measure(quick: bool) -> list[dict[str, Any]]:
    """Returns one record per case."""
    bandwidth = harness.memcpy_bytes_per_s()
    axes = itertools.product([50_000] if quick else [8_000, 50_000, 800_000], [8] if quick else [2, 8], [2, 8])
    return [_case(*case, bandwidth, quick) for case in axes]


def _case(n_ids: int, lookups: int, ranks: int, bandwidth: float, quick: bool) -> dict[str, Any]:
    random = np.random.default_rng(0)
    segments = [SEGMENTS] * lookups
    arrays, sizes = [], []
    for _ in segments:
        counts = random.multinomial(n_ids // lookups, np.full(ranks * SEGMENTS, 1 / (ranks * SEGMENTS)))
        blocks = [[*row, *random.integers(0, 2**40, row.sum())] for row in counts.reshape(ranks, SEGMENTS)]
        arrays.append(np.concatenate(blocks).astype(np.int64))
        sizes.append(np.array([len(block) for block in blocks], np.int32))
    messages, splits = [tf.constant(a) for a in arrays], [tf.constant(s) for s in sizes]

    @tf.function
    def ours() -> list[tf.Tensor]:
        joined, joined_splits = ops.join_messages(messages, splits)
        return ops.split_messages(joined[: tf.reduce_sum(joined_splits)], joined_splits, segments=segments)[0]

    @tf.function
    def peer() -> list[tf.Tensor]:
        return split_by_gather(*joined_by_gather(messages, splits), segments)

    joined, joined_splits = join_oracle([a.tolist() for a in arrays], [s.tolist() for s in sizes])
    want = split_oracle(joined, joined_splits, segments)
    for who, call in (("ours", ours), ("gather", peer)):
        for part, (entries, _) in zip(call(), want):
            harness.check_equal(f"message of {who}", part, np.array(entries))
    entries = len(joined)
    return measure_case(
        {"n_ids": n_ids, "lookups": lookups, "ranks": ranks},
        ours=ours,
        peer=peer,
        peer_name="tf.ragged.range, tf.gather",
        ids=n_ids,
        bytes_moved=4 * 8 * entries,
        memory_bytes_per_s=bandwidth,
        quick=quick,
    )


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.report("join_messages and split_messages against tf.gather", measure(arguments.quick), arguments)


if __name__ == "__main__":
    harness.run(main)
