"""Step 5 of 7 (docs/concepts.md), for TFRA: gives new rows their initial value, a pure function of (seed, id)."""

from collections.abc import Sequence

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


def initial_rows(
    rows: tf.Tensor,
    exists: tf.Tensor,
    ids: tf.Tensor,
    segment_splits: tf.Tensor,
    *,
    seeds: Sequence[int],
    distribution: str,
    a: float,
    b: float = 0.0,
) -> tf.Tensor:
    """Replaces the rows that do not exist by their initial value.

    Numbers come from Philox4x32-10 (Salmon et al., SC 2011), keyed by the table's seed and counted by id and column.
    The row is the same on every rank, at every step, after eviction and return.

    Args:
      rows: <float32, float16 or bfloat16>[W, D], anything where exists is false.
      exists: <bool>[W].
      ids: <int64>[W], grouped by segment (= table).
      segment_splits: <int64>[S+1].
      seeds: one int64 per table.
      distribution: "constant" (a), "uniform" on [a, b), "normal" (mean a, standard deviation b) or
        "truncated_normal" (the same, given that it lies inside two standard deviations).
      a, b: Parameters of the distribution.

    Returns:
      [W, D].

    Raises:
      InvalidArgumentError: Shapes disagree.
    """
    return library.fusedrec_initial_rows(
        rows=rows, exists=exists, ids=ids, segment_splits=segment_splits,
        seeds=list(seeds), distribution=distribution, a=a, b=b,
    )  # fmt: skip


tf.no_gradient("Fusedrec>InitialRows")
