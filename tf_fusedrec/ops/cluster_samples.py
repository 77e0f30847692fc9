"""Orders the samples of a batch so that its micro-batches share few ids. Part of the input pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


def cluster_samples(
    ids: Sequence[tf.Tensor], row_splits: Sequence[tf.Tensor], sizes: tf.Tensor, *, tables: Sequence[int]
) -> tf.Tensor:
    """Orders samples, micro-batch by micro-batch (NestPipe, section V.C; custom_ops/cluster_samples says how).

    Each micro-batch has nearly its share of the ids, and few ids are in several micro-batches. The order is a function
    of the arguments alone, the same on every machine.

    Args:
      ids: F tensors <int64>[n_f], any values, sample by sample.
      row_splits: F tensors <int64>[B+1]. Sample b holds ids[row_splits[b]:row_splits[b+1]].
      sizes: <int64>[M], samples of each micro-batch, >= 0, with sum B.
      tables: [F] numbers. Equal ids of features with equal numbers mean one row.

    Returns:
      order: <int64>[B], numbers of the samples. They ascend within a micro-batch.

    Raises:
      InvalidArgumentError: row_splits do not describe their ids; features differ in their number of samples; sizes do
        not sum to it; the ids are too many.

    Example, M = 2:
      ids [[1 2] [7 8] [1 2] [7 8]], sizes [2 2]  ->  order 0 2 1 3 or 1 3 0 2
    """
    return library.fusedrec_cluster_samples(
        ids=list(ids), row_splits=list(row_splits), sizes=sizes, tables=list(tables)
    )


tf.no_gradient("Fusedrec>ClusterSamples")
