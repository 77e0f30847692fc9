"""Question: what does an initial row cost that depends on its id alone?

    python -m benchmarks.initial_rows [--quick] [--json FILE]

The peer, tf.random.stateless_normal, draws one matrix from one seed. Its rows depend on their places in the batch,
which is less work but wrong for a table. Both variants keep the rows that exist already.
"""

import itertools
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.op_case import measure_case
from benchmarks.harness.synthetic import segment_ids
from tests.oracles.initial_rows import initial_row_oracle
from tf_fusedrec import ops, tf

SEED, STDDEV = 7, 0.05
_CHECKED_ROWS = 200  # new rows, few because the oracle is slow Python


@tf.function
def ours(rows: tf.Tensor, exists: tf.Tensor, ids: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
    """Returns rows [W, D]. New rows are normal, drawn by seed and id."""
    return ops.initial_rows(rows, exists, ids, splits, seeds=[SEED], distribution="normal", a=0.0, b=STDDEV)


@tf.function
def peer(rows: tf.Tensor, exists: tf.Tensor) -> tf.Tensor:
    """Returns rows [W, D]. New rows are normal, drawn by place."""
    drawn = tf.random.stateless_normal(tf.shape(rows), seed=[SEED, 0], stddev=STDDEV)
    return tf.where(exists[:, tf.newaxis], rows, drawn)


def _check(got: np.ndarray, rows: np.ndarray, exists: np.ndarray, ids: np.ndarray) -> None:
    harness.check_equal("rows that exist", got[exists], rows[exists])
    new = np.flatnonzero(~exists)[:_CHECKED_ROWS]
    if new.size:
        want = [initial_row_oracle("normal", 0.0, STDDEV, SEED, int(ids[n]), rows.shape[1]) for n in new]
        harness.check_close(
            "new rows", got[new], want, relative=1e-6, reason="log, sin and cos in float32 against Python's float64"
        )


def measure(quick: bool) -> list[dict[str, Any]]:
    """Returns one record per case. The oracle checks our rows only, since the peer draws other numbers."""
    bandwidth = harness.memcpy_bytes_per_s()
    axes = itertools.product([20_000] if quick else [20_000, 200_000], [16] if quick else [16, 64], [0.0, 0.5, 1.0])
    return [_case(*case, bandwidth, quick) for case in axes]


def _case(n_ids: int, dim: int, exists_share: float, bandwidth: float, quick: bool) -> dict[str, Any]:
    ids, splits = segment_ids(0, n_ids=n_ids, zipf_alpha=1.05, segments=1)
    random = np.random.default_rng(0)
    rows, exists = random.random((n_ids, dim), np.float32), random.random(n_ids) < exists_share
    t_rows, t_exists, t_ids, t_splits = (tf.constant(a) for a in (rows, exists, ids, splits))
    _check(ours(t_rows, t_exists, t_ids, t_splits).numpy(), rows, exists, ids)
    return measure_case(
        {"n_ids": n_ids, "dim": dim, "exists_share": exists_share},
        ours=lambda: ours(t_rows, t_exists, t_ids, t_splits),
        peer=lambda: peer(t_rows, t_exists),
        peer_name="tf.random.stateless_normal",
        ids=n_ids,
        bytes_moved=9 * n_ids + 2 * 4 * dim * n_ids,
        memory_bytes_per_s=bandwidth,
        quick=quick,
    )


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.report("initial_rows against tf.random.stateless_normal", measure(arguments.quick), arguments)


if __name__ == "__main__":
    harness.run(main)
