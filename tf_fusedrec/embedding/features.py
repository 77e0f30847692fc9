"""Inputs of FusedEmbedding: every form in which ids come becomes flat ids, and rows go back into that form.

Accepted: dense [B] or [B, L, ...], RaggedTensor [B, (L), ...], SparseTensor [B, L]; int32 or int64 ids. Padding (a
padding_id, or where a mask is False) is left out before anything else sees the ids, and its rows come back as zeros.
"""

from __future__ import annotations

from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import FeatureConfig


class FlatFeature(NamedTuple):
    """Ids of one feature, flat, and what is needed to give rows the feature's form, which has m places for ids."""

    config: FeatureConfig
    ids: tf.Tensor  # <int64>[n], without padding
    row_splits: tf.Tensor | None  # <int64>[B+1] of a ragged feature's innermost dimension, to be checked
    bag_size: int  # ids that become one row; 0: a row of row_splits does
    form: tf.Tensor | tf.RaggedTensor | tf.SparseTensor  # as it came
    weights: tf.Tensor | None  # <float>[m], 0 at padding
    places: tf.Tensor | None = None  # <int64>[n], ascending, where among the m each id stands; None: n = m

    @property
    def pooled_on_the_way(self) -> bool:
        """Whether rows come back as one per sample; weights pool them here instead."""
        return self.config.combiner is not None and self.weights is None


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


def flatten(config: FeatureConfig, value, weights=None, mask=None) -> FlatFeature:
    """Checks one feature and makes it flat.

    Args:
      config: of the feature.
      value: ids in any accepted form.
      weights: one number per id, in the form of `value` (or flat), or None.
      mask: <bool>, False at padding, in the form of `value` or of its first dimensions; None: the one that a Keras
        layer has left on `value`, if any.

    Raises:
      ValueError: ids are not integers, the rank does not suit the combiner, weights came without a combiner, or their
        number differs from that of the ids. InvalidArgumentError at run time where the number is known only then.
    """
    given, what = value, f"feature {config.name!r}"
    value = _as_form(value, what)
    if value.dtype not in (tf.int32, tf.int64):
        raise ValueError(
            f"Ids of {what} must be int32 or int64, got {value.dtype.name}. Cast them; strings become ids by "
            "fr.hash_strings."
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
    feature = FlatFeature(config, tf.cast(ids, tf.int64), row_splits, bag_size, value, flat_weights)
    kept = is_kept(config, given, mask)
    return feature if kept is None else _without_padding(feature, _flat_values(kept))


def is_kept(config: FeatureConfig, value, mask=None):
    """<bool> in the form of the ids: False at padding. None where nothing can be padding. Args as those of flatten."""
    what = f"feature {config.name!r}"
    mask = getattr(value, "_keras_mask", None) if mask is None else mask
    if mask is None and config.padding_id is None:
        return None
    value = _as_form(value, what)
    ids = _flat_values(value)
    kept = tf.ones_like(ids, tf.bool)
    if config.padding_id is not None:
        kept = tf.not_equal(tf.cast(ids, tf.int64), config.padding_id)
    if mask is not None:
        kept &= _flat_mask(what, _as_form(mask, f"mask of {what}"), value, ids)
    if isinstance(value, tf.RaggedTensor):
        return value.with_flat_values(kept)
    if isinstance(value, tf.SparseTensor):
        return value.with_values(kept)
    return tf.reshape(kept, tf.shape(value))


def _flat_mask(what: str, mask, value, ids: tf.Tensor) -> tf.Tensor:
    if mask.dtype != tf.bool:
        raise ValueError(f"mask of {what} must be bool, got {mask.dtype.name}.")
    if isinstance(value, tf.Tensor) and mask.shape.rank is not None:
        if not mask.shape.is_compatible_with(value.shape[: mask.shape.rank]):
            raise ValueError(
                f"mask of {what} must have the shape of its ids or of their first dimensions, got {mask.shape} for ids "
                f"of shape {value.shape}."
            )
        inner = [1] * (value.shape.rank - mask.shape.rank)  # what it names, it masks as a whole
        mask = tf.broadcast_to(tf.reshape(mask, tf.concat([tf.shape(mask), inner], 0)), tf.shape(value))
    flat = _flat_values(mask)
    message = f"mask of {what} must be one per id: numbers of bools and of ids differ."
    with tf.control_dependencies([tf.debugging.assert_equal(tf.size(flat), tf.size(ids), message=message)]):
        return tf.identity(flat)


def _without_padding(feature: FlatFeature, kept: tf.Tensor) -> FlatFeature:
    """The feature without the ids whose `kept` <bool>[m] is False: bags are smaller, and weights there are 0."""
    places = tf.where(kept)[:, 0]
    # before[i]: kept ids among the first i, so that bounds among all ids become bounds among those that are kept.
    before = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(tf.cast(kept, tf.int64))], 0)
    row_splits, weights, bag_size = feature.row_splits, feature.weights, feature.bag_size
    if row_splits is not None:
        row_splits = tf.gather(before, _checked_splits(feature.config, row_splits, tf.size(kept, tf.int64)))
    elif feature.pooled_on_the_way:
        row_splits, bag_size = before[::bag_size], 0
    if weights is not None:
        weights = tf.where(kept, weights, tf.zeros_like(weights))
    return feature._replace(
        ids=tf.gather(feature.ids, places), row_splits=row_splits, bag_size=bag_size, weights=weights, places=places
    )


def _checked_splits(config: FeatureConfig, row_splits: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """row_splits, after the check that ops.fuse_ids makes of others: it would see only those of the kept ids."""
    bounds = tf.concat([[0], row_splits, [ids]], 0)
    sound = tf.reduce_all(bounds[1:] >= bounds[:-1]) & (row_splits[0] == 0) & (row_splits[-1] == ids)
    message = f"row_splits of feature {config.name!r} must run from 0 to the number of its ids without decreasing."
    with tf.control_dependencies([tf.debugging.assert_equal(sound, True, message=message)]):
        return tf.identity(row_splits)


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
      combiner None: dense [B, ..., D]; RaggedTensor [B, (L), D] for ragged and sparse features; zeros at padding.
      else: [B, D]; a sample without ids, or of padding alone, has zeros.
    """
    form = feature.form
    if feature.pooled_on_the_way:
        return rows
    if feature.places is not None:
        shape = tf.stack([tf.size(_flat_values(form)), rows.shape[1]])
        rows = tf.scatter_nd(feature.places[:, tf.newaxis], rows, tf.cast(shape, tf.int64))
    if feature.weights is not None:
        return _pool(feature, rows)
    if isinstance(form, tf.RaggedTensor):
        return form.with_flat_values(rows)
    if isinstance(form, tf.SparseTensor):
        return tf.RaggedTensor.from_value_rowids(rows, form.indices[:, 0], nrows=form.dense_shape[0], validate=False)
    dense = tf.reshape(rows, tf.concat([tf.shape(form), rows.shape[1:]], axis=0))
    dense.set_shape([*form.shape, rows.shape[1]])
    return dense


def pooled_by_tensorflow(feature: FlatFeature) -> FlatFeature:
    """The same feature with weights of 1, if it has none: what weights pool, TensorFlow's own operations pool."""
    if not feature.pooled_on_the_way:
        return feature
    if feature.places is None:
        return feature._replace(weights=tf.ones_like(feature.ids, tf.float32))
    places, ones = feature.places[:, tf.newaxis], tf.ones_like(feature.places, tf.float32)
    return feature._replace(weights=tf.scatter_nd(places, ones, tf.shape(_flat_values(feature.form), tf.int64)))


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
