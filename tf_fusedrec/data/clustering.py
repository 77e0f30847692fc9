"""Key-centric sample clustering: puts samples that share ids into the same micro-batch (NestPipe, section V.C).

dataset = cluster_samples(dataset, 8, ids=lambda batch: {"video": [batch["history_item"], batch["exposed_item"]]})

FrozenWindow sends an id once for every micro-batch that holds it. The input pipeline may reorder samples freely: loss
and gradients of a batch are sums over its samples, so they change by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data.sample_partition import partition_samples

IdsOfTables = Mapping[str, Union[Any, Sequence[Any]]]


def cluster_samples(dataset: tf.data.Dataset, micro_batches: int, ids: Callable[..., IdsOfTables]) -> tf.data.Dataset:
    """Orders the samples of every batch so that the micro-batches of schedules.cut have few ids in common.

    Each micro-batch keeps its number of samples and has nearly that share of the tokens, the ids given here. Samples of
    a micro-batch keep their order. The new order is a function of the batch and of M. The CPU computes it a batch or
    two ahead of training; benchmarks/clustering measures the time and the saved bytes.

    Args:
      dataset: Dataset of batches, nested structures of tensors, RaggedTensors and SparseTensors, samples first.
      micro_batches: Number of micro-batches of the schedule, M.
      ids: Function from a batch to its ids by table: int32 or int64 [B, ...], ragged or sparse, or a sequence of such.
        A batch that is a tuple is passed as several arguments.

    Returns:
      Dataset of the same batches, with their samples in another order.

    Raises:
      ValueError: micro_batches is not an int >= 1; `ids` returns no ids, no integers, or ids not by sample.
      InvalidArgumentError: while reading, parts of a batch differ in their number of samples.
    """
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
        raise ValueError(f"micro_batches must be an int >= 1, got {micro_batches!r}.")

    def clustered(*parts: Any) -> Any:
        batch = parts if len(parts) > 1 else parts[0]
        order = tf.numpy_function(_order, [micro_batches, *_features(ids(*parts))], tf.int64, stateful=False)
        order.set_shape([None])
        return tf.nest.map_structure(lambda leaf: _reordered(leaf, order), batch)

    return dataset.map(clustered).prefetch(2)


def _features(ids: IdsOfTables) -> list[Any]:
    """A flat list with three entries per feature: table number, ids <int64>[n], splits by sample <int64>[B+1]."""
    if not isinstance(ids, Mapping) or not ids:
        raise ValueError(f"ids must return a dict from table names to tensors of ids, got {ids!r}.")
    features: list[Any] = []
    for number, (table, given) in enumerate(sorted(ids.items())):
        for feature in given if isinstance(given, (list, tuple)) else [given]:
            features += [number, *_flat(table, feature)]
    return features


def _flat(table: str, feature: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Ids <int64>[n] of one feature, and their splits by sample <int64>[B+1]."""
    if not isinstance(feature, (tf.RaggedTensor, tf.SparseTensor)):
        feature = tf.convert_to_tensor(feature)
    if feature.dtype not in (tf.int32, tf.int64) or not feature.shape.rank:
        raise ValueError(
            f"ids of table {table!r} must be int32 or int64 with a first dimension of samples, got "
            f"{feature.dtype.name} of shape {feature.shape}."
        )
    if isinstance(feature, tf.SparseTensor):
        bounds = tf.range(feature.dense_shape[0] + 1)
        return tf.cast(feature.values, tf.int64), tf.searchsorted(feature.indices[:, 0], bounds, out_type=tf.int64)
    if isinstance(feature, tf.RaggedTensor):
        splits, values = tf.cast(feature.row_splits, tf.int64), feature.values
        while isinstance(values, tf.RaggedTensor):
            splits, values = tf.gather(tf.cast(values.row_splits, tf.int64), splits), values.values
    else:
        splits, values = tf.range(tf.shape(feature, tf.int64)[0] + 1), feature
    each = tf.reduce_prod(tf.shape(values, tf.int64)[1:])
    return tf.cast(tf.reshape(values, [-1]), tf.int64), splits * each


def _order(micro_batches: int, *features: Any) -> np.ndarray:
    """Sample numbers <int64>[B] in their new order. `features` is the result of `_features`."""
    tables, values, splits = features[0::3], features[1::3], features[2::3]
    counts = [len(bounds) - 1 for bounds in splits]
    if len(set(counts)) > 1:
        raise ValueError(f"features of one batch have {counts} samples, but must have the same number.")
    keys = np.empty(0, np.int64)
    for table in set(map(int, tables)):
        of_table = np.concatenate([v for v, t in zip(values, tables) if t == table])
        # np.unique numbers the ids of this table, after the numbers of earlier tables.
        keys = np.concatenate([keys, len(keys) + np.unique(of_table, return_inverse=True)[1]])
    by_table = np.argsort(tables, kind="stable")
    lengths = [np.diff(splits[f]) for f in by_table]
    samples = np.concatenate([np.repeat(np.arange(counts[0]), of_feature) for of_feature in lengths])
    part = partition_samples(keys, samples, np.sum(lengths, axis=0), int(micro_batches))
    return np.argsort(part, kind="stable")


def _reordered(leaf: Any, order: tf.Tensor) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return tf.gather(leaf, order)
    place = tf.math.invert_permutation(order)
    indices = tf.concat([tf.gather(place, leaf.indices[:, :1]), leaf.indices[:, 1:]], axis=1)
    return tf.sparse.reorder(tf.SparseTensor(indices, leaf.values, leaf.dense_shape))
