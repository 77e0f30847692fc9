"""Key-centric sample clustering: samples that share ids come into the same micro-batch (NestPipe, section V.C).

dataset = cluster_samples(dataset, 8, ids=lambda batch: {"video": [batch["history_item"], batch["exposed_item"]]})

FrozenWindow sends an id once for every micro-batch that holds it. Which samples are together is the input pipeline's
to choose: loss and gradients of a batch are sums over its samples, so they do not change but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data.sample_partition import partition_samples

IdsOfTables = Mapping[str, Union[Any, Sequence[Any]]]


def cluster_samples(dataset: tf.data.Dataset, micro_batches: int, ids: Callable[..., IdsOfTables]) -> tf.data.Dataset:
    """Orders the samples of every batch so that the pieces of schedules.cut have few ids in common.

    Pieces keep their number of samples and have nearly that share of the tokens, which are the ids given here;
    samples of a piece keep their order. The new order is a function of the batch and of M. It is found on the CPU, a
    batch or two ahead of training; benchmarks/clustering says how long that takes and how many bytes it saves.

    Args:
      dataset: of batches: nested structures of tensors, RaggedTensors and SparseTensors, samples first.
      micro_batches: M of the schedule.
      ids: takes a batch (its parts as arguments where it is a tuple) and gives, by name of table, the ids that its
        samples ask of it: int32 or int64, [B, ...], ragged or sparse; or a sequence of several such.

    Returns:
      Dataset of the same batches, with their samples in another order.

    Raises:
      ValueError: micro_batches is no int >= 1; ids that are none, no integers, or not by sample. While reading
        InvalidArgumentError: parts of a batch that differ in their number of samples.
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
    """Of every feature, one after another: number of its table, ids <int64>[n], their splits by sample <int64>[B+1]."""
    if not isinstance(ids, Mapping) or not ids:
        raise ValueError(f"ids must give a dict from names of tables to tensors of ids, got {ids!r}.")
    features: list[Any] = []
    for number, (table, given) in enumerate(sorted(ids.items())):
        for feature in given if isinstance(given, (list, tuple)) else [given]:
            features += [number, *_flat(table, feature)]
    return features


def _flat(table: str, feature: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """ids <int64>[n] of one feature and their splits by sample <int64>[B+1]."""
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
    """<int64>[B], the samples in their new order. features: what `_features` gave."""
    tables, values, splits = features[0::3], features[1::3], features[2::3]
    counts = [len(bounds) - 1 for bounds in splits]
    if len(set(counts)) > 1:
        raise ValueError(f"ids of one batch must be of the same samples, got features of {counts} samples.")
    keys = np.empty(0, np.int64)
    for table in set(map(int, tables)):
        of_table = np.concatenate([v for v, t in zip(values, tables) if t == table])
        # np.unique numbers the ids; those of other tables have other numbers.
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
