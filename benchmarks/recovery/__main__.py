"""Question: how fast are rows gathered into the order of the ids, and their gradients summed in a fixed order?

    python -m benchmarks.recovery [--quick] [--json FILE]

Our op gathers once, by a composed index. The time of the forward pass includes this composition. The forward peer is
two tf.gather, by restore and by inverse. The backward peer is tf.math.unsorted_segment_sum by inverse and a gather into
send order.
"""

import itertools
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.op_case import measure_case
from benchmarks.harness.synthetic import segment_ids
from tests.oracles.recovery import recover_grad_oracle, recover_oracle
from tests.oracles.segment_unique import segment_unique_oracle
from tf_fusedrec import ops, tf


def _inputs(n_ids: int, dim: int) -> dict[str, np.ndarray]:
    unique, _, inverse = segment_unique_oracle(*segment_ids(0, n_ids=n_ids, zipf_alpha=1.05, segments=26))
    random = np.random.default_rng(0)
    restore = random.permutation(len(unique)).astype(np.int32)
    return {
        "inverse": inverse.astype(np.int32),
        "restore": restore,
        "unrestore": np.argsort(restore).astype(np.int32),
        # Sums of small integers are exact in any order, so that all implementations agree in every bit.
        "rows": random.integers(-8, 8, (len(unique), dim)).astype(np.float32),
        "grads": random.integers(-8, 8, (n_ids, dim)).astype(np.float32),
    }


@tf.function
def recover_ours(rows: tf.Tensor, restore: tf.Tensor, inverse: tf.Tensor) -> tf.Tensor:
    """Returns rows [N, D] by one gather."""
    return ops.recover(rows, tf.gather(restore, inverse))


@tf.function
def recover_peer(rows: tf.Tensor, restore: tf.Tensor, inverse: tf.Tensor) -> tf.Tensor:
    """Returns rows [N, D] by two gathers."""
    return tf.gather(tf.gather(rows, restore), inverse)


@tf.function
def recover_grad_ours(grads: tf.Tensor, index: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
    """Returns gradients [U, D] in send order, by the composed index."""
    return ops.recover_grad(grads, index, num_rows)


@tf.function
def recover_grad_peer(grads: tf.Tensor, inverse: tf.Tensor, unrestore: tf.Tensor) -> tf.Tensor:
    """Returns gradients [U, D] in send order: sums by unique id, then a gather."""
    return tf.gather(tf.math.unsorted_segment_sum(grads, inverse, tf.size(unrestore)), unrestore)


def measure(quick: bool) -> list[dict[str, Any]]:
    """Returns one record per case."""
    bandwidth = harness.memcpy_bytes_per_s()
    axes = itertools.product([50_000] if quick else [50_000, 500_000], [16] if quick else [16, 64])
    return [case for n_ids, dim in axes for case in _cases(n_ids, dim, bandwidth, quick)]


def _cases(n_ids: int, dim: int, bandwidth: float, quick: bool) -> list[dict[str, Any]]:
    arrays = _inputs(n_ids, dim)
    t = {name: tf.constant(array) for name, array in arrays.items()}
    index, unique = arrays["restore"][arrays["inverse"]], len(arrays["rows"])
    composed, num_rows = tf.constant(index), tf.constant(unique, tf.int64)
    directions = {
        "forward": (
            lambda: recover_ours(t["rows"], t["restore"], t["inverse"]),
            lambda: recover_peer(t["rows"], t["restore"], t["inverse"]),
            "tf.gather twice",
            recover_oracle(arrays["rows"], index),
        ),
        "backward": (
            lambda: recover_grad_ours(t["grads"], composed, num_rows),
            lambda: recover_grad_peer(t["grads"], t["inverse"], t["unrestore"]),
            "tf.math.unsorted_segment_sum",
            recover_grad_oracle(arrays["grads"], index, unique),
        ),
    }
    cases = []
    for direction, (ours, peer, peer_name, want) in directions.items():
        for who, call in (("ours", ours), (peer_name, peer)):
            harness.check_equal(f"{direction} of {who}, n_ids {n_ids}, dim {dim}", call(), want)
        cases.append(
            measure_case(
                {"direction": direction, "n_ids": n_ids, "unique": unique, "dim": dim},
                ours=ours,
                peer=peer,
                peer_name=peer_name,
                ids=n_ids,
                bytes_moved=4 * n_ids + 4 * dim * (n_ids + unique),
                memory_bytes_per_s=bandwidth,
                quick=quick,
            )
        )
    return cases


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.report("recovery against tf.gather and tf.math.unsorted_segment_sum", measure(arguments.quick), arguments)


if __name__ == "__main__":
    harness.run(main)
