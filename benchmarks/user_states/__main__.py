"""Question: what does it cost to read a user's state from the cache and to write new tokens?

    python -m benchmarks.user_states [--quick] [--json FILE]

A state has keys and values of several blocks. The peer is a program that keeps the state in its own tensors: it
concatenates them with the new tokens, which copies the state, too.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.op_case import measure_case
from tf_fusedrec import ops, tf

NEW = 32  # tokens that a request writes
COLUMNS = 64  # of the keys of a block, and of its values


def measure(quick: bool) -> list[dict[str, Any]]:
    """Returns one record per case."""
    bandwidth = harness.memcpy_bytes_per_s()
    axes = itertools.product([1024] if quick else [256, 4096], [4] if quick else [2, 8], ["float32", "bfloat16"])
    return [_case(*case, bandwidth, quick) for case in axes]


def _case(tokens: int, blocks: int, dtype: str, bandwidth: float, quick: bool) -> dict[str, Any]:
    parts = ops.StateParts(((tf.as_dtype(dtype), COLUMNS),) * 2 * blocks, ())
    random = np.random.default_rng(0)
    state, new = (
        [tf.cast(random.normal(size=[length, columns]), kind) for kind, columns in parts.of_token]
        for length in (tokens, NEW)
    )
    cache = ops.user_states(parts, max_bytes=2**30, anonymous=True)
    version = now = tf.constant(0, tf.int64)

    def write(user: int, of_tokens: list[tf.Tensor]) -> tf.Tensor:
        splits = tf.stack([0, tf.shape(of_tokens[0], tf.int64)[0]])
        users, revisions = tf.constant([user], tf.int64), tf.constant([0], tf.int64)
        return ops.user_states_write(
            cache, users, version, now, revisions=revisions, row_splits=splits, of_tokens=of_tokens, of_users=[]
        )

    write(1, state)

    @tf.function
    def ours() -> list[tf.Tensor]:
        found = ops.user_states_find(cache, tf.constant([1], tf.int64), version, now, parts=parts)
        write(2, new)  # A put of a small state costs what an append costs, and the state keeps its length.
        return found.of_tokens

    @tf.function
    def peer() -> list[tf.Tensor]:
        return [tf.concat([before, of_part], axis=0) for before, of_part in zip(state, new)]

    for number, (got, joined, wanted) in enumerate(zip(ours(), peer(), state)):
        harness.check_equal(f"part {number} of ours", got, wanted)
        harness.check_equal(f"part {number} of the peer", joined[:tokens], wanted)
    return measure_case(
        {"tokens": tokens, "blocks": blocks, "dtype": dtype},
        ours=ours,
        peer=peer,
        peer_name="tf.concat",
        ids=tokens,
        bytes_moved=2 * (tokens + NEW) * 2 * blocks * COLUMNS * tf.as_dtype(dtype).size,
        memory_bytes_per_s=bandwidth,
        quick=quick,
    )


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.report("find and write of user states against tf.concat", measure(arguments.quick), arguments)


if __name__ == "__main__":
    harness.run(main)
