"""Outputs of FusedEmbedding: flat rows get the form in which inputs.py found the ids. Padding has rows of zeros."""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding.inputs import FlatFeature, flat_values


def restore_form(feature: FlatFeature, rows: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    """Gives flat rows the form of their feature: one row per id, or one pooled row per sample.

    Args:
      feature: The flattened feature.
      rows: [n, D], rows of its ids; [B, D] where the lookup pooled them.

    Returns:
      combiner None: dense [B, ..., D]; RaggedTensor [B, (L), D] for ragged and sparse features; zeros at padding.
      else: [B, D]; a sample without ids, or of padding alone, has zeros.
    """
    form = feature.form
    if feature.pooled_by_lookup:
        return rows
    if feature.places is not None:
        shape = tf.stack([tf.size(flat_values(form)), rows.shape[1]])
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
    """The same feature with weights of 1 if it has none, so that TensorFlow's own operations pool its rows."""
    if not feature.pooled_by_lookup:
        return feature
    if feature.places is None:
        return feature._replace(weights=tf.ones_like(feature.ids, tf.float32))
    places, ones = feature.places[:, tf.newaxis], tf.ones_like(feature.places, tf.float32)
    return feature._replace(weights=tf.scatter_nd(places, ones, tf.shape(flat_values(feature.form), tf.int64)))


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
