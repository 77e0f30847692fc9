"""Two transformations of tf.data pipelines.

lookahead pairs every batch with the ids of the batch k steps later (FusedRec, section 4; NestPipe, section IV):

    for batch, later_ids in lookahead(batches, steps=4):
        embedding.prefetch(later_ids)  # starts to load rows from disk to memory
        train(batch)                   # trains at the same time

cluster_samples puts samples that share ids into the same micro-batch (NestPipe, section V.C). FrozenWindow sends the
row of an id once, with the first micro-batch that has it. Without clustering the first micro-batches send most rows.
Loss and gradients of a batch are sums over its samples, so they change by rounding only. custom_ops/cluster_samples has
the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import converted_as_here, tf
from tf_fusedrec.data.batches import no_samples, piece_bounds


def lookahead(dataset: tf.data.Dataset, steps: int, ids: Callable[..., Any] | None = None) -> tf.data.Dataset:
    """Pairs every batch with the ids of the batch `steps` later.

    The input is read once, in order, with `steps` + 1 batches in memory. The last `steps` batches are paired with a
    batch of no samples. Ranks with equally many batches thus call FusedEmbedding.prefetch, a collective, equally often.

    Args:
      dataset: Dataset of batches, nested structures of tensors, RaggedTensors and SparseTensors, samples first.
      steps: Number of steps to look ahead, k >= 1.
      ids: Function from a batch to the argument of FusedEmbedding.prefetch; None passes the whole batch. A batch that
        is a tuple is passed as several arguments.

    Returns:
      Dataset of (batch, ids of the later batch), as long as `dataset`.

    Raises:
      ValueError: steps < 1, or the ids have an unknown rank.

    Examples:
      >>> dataset = tf.data.Dataset.from_tensor_slices({"item": tf.constant([1, 2, 3], tf.int64)}).batch(1)
      >>> for batch, later in fr.data.lookahead(dataset, steps=2):
      ...     embedding.prefetch(later)
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an int >= 1, got {steps!r}.")

    def paired(*parts: Any) -> tuple[Any, Any]:
        batch = parts if len(parts) > 1 else parts[0]
        return batch, batch if ids is None else converted_as_here(ids)(*parts)

    pairs = dataset.map(paired)
    nothing = tf.data.Dataset.from_tensors(no_samples(pairs.element_spec[1]))

    def first_and_last(batches: Any, ids_of_window: Any) -> tf.data.Dataset:
        later = tf.data.Dataset.zip(ids_of_window).skip(steps).concatenate(nothing)
        return tf.data.Dataset.zip((tf.data.Dataset.zip(batches).take(1), later))

    # A window is a batch and the `steps` batches after it. The last windows are shorter.
    paired_dataset = pairs.window(steps + 1, shift=1).flat_map(first_and_last)
    cardinality = dataset.cardinality()
    if cardinality < 0:  # unknown or infinite
        return paired_dataset
    return paired_dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


IdsOfTables = Mapping[str, Any | Sequence[Any]]


def cluster_samples(dataset: tf.data.Dataset, micro_batches: int, ids: Callable[..., IdsOfTables]) -> tf.data.Dataset:
    """Orders the samples of every batch so that the micro-batches of a schedule have few ids in common.

    Each micro-batch gets its share of the samples (data/batches.py), and nearly that share of the tokens, the ids
    given here. Samples of a micro-batch keep their order. A schedule that cuts by tokens moves the bounds by the few
    samples that the shares differ. The new order is a function of the batch and of M. Several batches are ordered at
    once, ahead of training; benchmarks.overlap measures the time, and the ids of all micro-batches.

    Args:
      dataset: Dataset of batches, nested structures of tensors, RaggedTensors and SparseTensors, samples first.
      micro_batches: Number of micro-batches of the schedule, M.
      ids: Function from a batch to its ids by table: int32 or int64 [B, ...], ragged or sparse, or a sequence of such.
        A batch that is a tuple is passed as several arguments.

    Returns:
      Dataset of the same batches, with their samples in another order.

    Raises:
      ValueError: micro_batches is not an int >= 1; `ids` returns no ids, no integers, or ids not by sample.
      InvalidArgumentError: while reading, parts of a batch differ in their number of samples, or M is above 4096.

    Examples:
      >>> dataset = tf.data.Dataset.from_tensor_slices({"item": tf.constant([1, 2, 1, 2], tf.int64)}).batch(4)
      >>> clustered = fr.data.cluster_samples(dataset, micro_batches=2, ids=lambda batch: {"item": batch["item"]})
      >>> next(iter(clustered))["item"].numpy()
      array([1, 1, 2, 2])
    """
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
        raise ValueError(f"micro_batches must be an int >= 1, got {micro_batches!r}.")

    def clustered(*parts: Any) -> Any:
        batch = parts if len(parts) > 1 else parts[0]
        tables, values, splits = zip(*_features(converted_as_here(ids)(*parts)))
        bounds = piece_bounds(tf.size(splits[0], tf.int64) - 1, micro_batches)
        order = ops.cluster_samples(values, splits, bounds[1:] - bounds[:-1], tables=tables)
        return tf.nest.map_structure(lambda leaf: _reordered(leaf, order), batch)

    return dataset.map(clustered, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)


def _features(ids: IdsOfTables) -> list[tuple[int, tf.Tensor, tf.Tensor]]:
    """Table number, ids <int64>[n] and splits by sample <int64>[B+1] of each feature."""
    if not isinstance(ids, Mapping) or not ids:
        raise ValueError(f"ids must return a dict from table names to tensors of ids, got {ids!r}.")
    return [
        (number, *_flat(table, feature))
        for number, (table, features) in enumerate(sorted(ids.items()))
        for feature in (features if isinstance(features, (list, tuple)) else [features])
    ]


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


def _reordered(leaf: Any, order: tf.Tensor) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return tf.gather(leaf, order)
    place = tf.math.invert_permutation(order)
    indices = tf.concat([tf.gather(place, leaf.indices[:, :1]), leaf.indices[:, 1:]], axis=1)
    return tf.sparse.reorder(tf.SparseTensor(indices, leaf.values, leaf.dense_shape))
