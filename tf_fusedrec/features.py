"""Inputs of FusedEmbedding: every form in which ids come becomes flat ids, and rows go back into that form.

Accepted: dense [B] or [B, L, ...], RaggedTensor [B, (L), ...], SparseTensor [B, L]; int32 or int64 ids.
"""

from __future__ import annotations

from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import FeatureConfig


class FlatFeature(NamedTuple):
    """Ids of one feature, flat, and what is needed to give rows the feature's form."""

    config: FeatureConfig
    ids: tf.Tensor  # <int64>[n]
    row_splits: tf.Tensor | None  # <int64>[B+1] of a ragged feature's innermost dimension, to be checked
    bag_size: int  # ids that become one row; 0: a row of row_splits does
    form: tf.Tensor | tf.RaggedTensor | tf.SparseTensor  # as it came
    weights: tf.Tensor | None  # <float>[n]


def _flat_values(value: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> tf.Tensor:
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values
    return value.values if isinstance(value, tf.SparseTensor) else tf.reshape(value, [-1])


def _as_form(value, what: str) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} must be a Tensor, RaggedTensor or SparseTensor, got {type(value).__name__}."
        ) from error


def flatten(config: FeatureConfig, value, weights=None) -> FlatFeature:
    """Checks one feature and makes it flat.

    Args:
      config: of the feature.
      value: ids in any accepted form.
      weights: one number per id, in the form of `value` (or flat), or None.

    Raises:
      ValueError: ids are not integers, the rank does not suit the combiner, weights came without a combiner, or their
        number differs from that of the ids. InvalidArgumentError at run time where the number is known only then.
    """
    what = f"feature {config.name!r}"
    value = _as_form(value, what)
    if value.dtype not in (tf.int32, tf.int64):
        raise ValueError(
            f"Ids of {what} must be int32 or int64, got {value.dtype.name}. Cast them, or hash strings to int64 first."
        )
    if value.shape.rank is None or value.shape.rank < 1:
        raise ValueError(f"Ids of {what} must have a known rank of at least 1 (samples first), got {value.shape}.")
    if isinstance(value, tf.SparseTensor) and value.shape.rank != 2:
        raise ValueError(f"A SparseTensor of {what} must have shape [B, L], got {value.shape}. Use a RaggedTensor.")
    if config.combiner is not None and value.shape.rank > 2:
        raise ValueError(
            f"Ids of {what} with combiner {config.combiner!r} must have shape [B] or [B, L], got {value.shape}. "
            "Merge the inner dimensions, or use combiner=None."
        )
    ids = _flat_values(value)
    row_splits = None
    if isinstance(value, tf.RaggedTensor):
        if value.flat_values.shape.rank != 1:
            raise ValueError(f"Ragged ids of {what} must have flat values of rank 1, got {value.flat_values.shape}.")
        row_splits = tf.cast(value.nested_row_splits[-1], tf.int64)
    flat_weights = None if weights is None else _flat_weights(config, _as_form(weights, f"weights of {what}"), ids)
    bag_size = 1
    if config.combiner is not None and weights is None:
        bag_size, row_splits = _bags(value, row_splits)
    return FlatFeature(config, tf.cast(ids, tf.int64), row_splits, bag_size, value, flat_weights)


def _bags(value, row_splits: tf.Tensor | None) -> tuple[int, tf.Tensor | None]:
    """How the ids of a pooled feature fall into samples: a number of ids each, or 0 and row_splits."""
    if row_splits is not None:
        return 0, row_splits
    if isinstance(value, tf.SparseTensor):
        rows = tf.RaggedTensor.from_value_rowids(
            value.values, value.indices[:, 0], value.dense_shape[0], validate=False
        )
        return 0, rows.row_splits
    if value.shape.rank == 1:
        return 1, None
    if value.shape[1]:
        return value.shape[1], None
    # None, or no ids at all, which leaves the number of samples to be said.
    shape = tf.shape(value, out_type=tf.int64)
    return 0, tf.range(shape[0] + 1) * shape[1]


def _flat_weights(config: FeatureConfig, weights, ids: tf.Tensor) -> tf.Tensor:
    if config.combiner is None:
        raise ValueError(
            f"Feature {config.name!r} got weights, but its combiner is None. Use 'sum', 'mean' or 'sqrtn'."
        )
    if not weights.dtype.is_floating:
        raise ValueError(f"Weights of feature {config.name!r} must be floats, got {weights.dtype.name}.")
    flat = _flat_values(weights)
    message = f"Weights of feature {config.name!r} must be one per id: numbers of weights and of ids differ."
    with tf.control_dependencies([tf.debugging.assert_equal(tf.size(flat), tf.size(ids), message=message)]):
        return tf.identity(flat)


def restore_form(feature: FlatFeature, rows: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    """Gives flat rows the form of the feature: one row per id, or one pooled row per sample.

    Args:
      feature: as it was flattened.
      rows: [n, D] of its ids, or, where it was pooled on the way, [B, D].

    Returns:
      combiner None: dense [B, ..., D]; RaggedTensor [B, (L), D] for ragged and sparse features.
      else: [B, D]; a sample without ids has zeros.
    """
    form = feature.form
    if feature.weights is not None:
        return _pool(feature, rows)
    if feature.config.combiner is not None:
        return rows
    if isinstance(form, tf.RaggedTensor):
        return form.with_flat_values(rows)
    if isinstance(form, tf.SparseTensor):
        return tf.RaggedTensor.from_value_rowids(rows, form.indices[:, 0], nrows=form.dense_shape[0], validate=False)
    dense = tf.reshape(rows, tf.concat([tf.shape(form), rows.shape[1:]], axis=0))
    dense.set_shape([*form.shape, rows.shape[1]])
    return dense


def _pool(feature: FlatFeature, rows: tf.Tensor) -> tf.Tensor:
    """Weighted sum, mean or sqrtn over the ids of each sample, differentiable in the weights too."""
    weights = tf.cast(feature.weights, tf.float32)
    pooled = _sum_over_sample(feature, tf.cast(rows, tf.float32) * weights[:, tf.newaxis])
    combiner = feature.config.combiner
    if combiner == "sum":
        return tf.cast(pooled, rows.dtype)
    norm = _sum_over_sample(feature, (weights if combiner == "mean" else weights * weights)[:, tf.newaxis])
    return tf.cast(tf.math.divide_no_nan(pooled, norm if combiner == "mean" else tf.sqrt(norm)), rows.dtype)


def _sum_over_sample(feature: FlatFeature, values: tf.Tensor) -> tf.Tensor:
    """<float>[B, C] sums of values [n, C] over the ids of each sample."""
    form = feature.form
    if isinstance(form, tf.RaggedTensor):
        return tf.math.unsorted_segment_sum(values, form.value_rowids(), form.nrows())
    if isinstance(form, tf.SparseTensor):
        return tf.math.unsorted_segment_sum(values, form.indices[:, 0], form.dense_shape[0])
    if form.shape.rank == 1:
        return values
    shape = tf.concat([tf.shape(form), values.shape[1:]], axis=0)
    return tf.reduce_sum(tf.reshape(values, shape), axis=1)
