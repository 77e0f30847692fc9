"""Inputs of FusedEmbedding: ids of every accepted form become flat ids, and rows get that form again.

Accepted: dense [B] or [B, L, ...], RaggedTensor [B, (L), ...], SparseTensor [B, L]; int32 or int64 ids. The indices of
a SparseTensor may have any order, and are sorted first. Weights and masks must have the rows of their ids. Padding (a
padding_id, or a mask that is False) is removed before anything else sees the ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, keras_api, of_other_keras, tf
from tf_fusedrec.config import FeatureConfig
from tf_fusedrec.tables import Table


class FlatFeature(NamedTuple):
    """Flat ids of one feature, and its form, which has m places for ids."""

    config: FeatureConfig
    ids: tf.Tensor  # <int64>[n], without padding
    row_splits: tf.Tensor | None  # <int64>[B+1] of a ragged feature's innermost dimension, not yet checked
    bag_size: int  # ids that are pooled into one row; 0: the ids of one row of row_splits are
    form: tf.Tensor | tf.RaggedTensor | tf.SparseTensor  # the ids as the caller gave them, but with sorted indices
    weights: tf.Tensor | None = None  # <float>[m], 0 at padding
    places: tf.Tensor | None = None  # <int64>[n], ascending, the place of each id among the m; None: n = m

    @property
    def pooled_by_lookup(self) -> bool:
        """True if the lookup returns one row per sample. Rows with weights are pooled by `restore_form` instead."""
        return self.config.combiner is not None and self.weights is None


def flatten_inputs(
    layer_name: str,
    configs: Mapping[str, FeatureConfig],
    ids: Mapping[str, Any],
    weights: Mapping[str, Any],
    mask: Mapping[str, Any],
    tables: Mapping[str, Table],
) -> dict[str, FlatFeature]:
    """Checks the inputs of a call, see FusedEmbedding.call, and flattens every feature.

    Raises ValueError if there is no dict, an unknown feature, or a feature that `flatten` refuses.
    """
    if not isinstance(ids, Mapping) or not ids:
        raise ValueError(f"inputs of {layer_name!r} must be a dict from feature names to ids, got {ids!r}.")
    for argument, names in (("inputs", ids), ("weights", weights), ("mask", mask)):
        known = configs if argument == "inputs" else ids
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise ValueError(
                f"{argument} of {layer_name!r} hold unknown features {unknown}. Known features: {sorted(known)}."
            )
    return {
        name: flatten(configs[name], value, weights.get(name), mask.get(name), tables[name])
        for name, value in ids.items()
    }


def flat_values(value: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> tf.Tensor:
    """The values of a tensor of any form, [n]."""
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values
    return value.values if isinstance(value, tf.SparseTensor) else tf.reshape(value, [-1])


def _as_form(value, what: str) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    refusal = f"{what} must be a Tensor, RaggedTensor or SparseTensor, got {type(value).__name__}"
    if of_other_keras(value):  # TensorFlow would take a symbol of tf_keras
        raise ValueError(f"{refusal}, which {keras_api.OTHER_KERAS}")
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{refusal}.") from error


def flatten(config: FeatureConfig, value, weights, mask, table: Table) -> FlatFeature:
    """Checks and flattens one feature.

    Args:
      value: Ids in any accepted form.
      weights: <float>, one number per id, in the form of `value` or flat; or None.
      mask: <bool>, False at padding, in the form of `value` or of its first dimensions; None: the mask that a Keras
        layer left on `value`, if any.

    Raises:
      ValueError: ids are not integers, the rank does not suit the combiner, or there are weights without a combiner.
      InvalidArgumentError: at run time, or before it where the shapes show it: weights or mask have other rows than the
        ids; indices of a SparseTensor are outside of its shape, or occur twice.
    """
    with placing_ids([table]):
        feature, kept, order = _flatten_ids(config, value, mask, pooled=config.combiner is not None and weights is None)
    if weights is None:
        return feature
    # Weights stay where they are: a model may compute them on a device.
    flat = _flat_weights(config, _as_form(weights, f"weights of feature {config.name!r}"), feature.form, order)
    return feature._replace(weights=flat if kept is None else tf.where(kept, flat, tf.zeros_like(flat)))


def check_dtype(name: str, dtype: str) -> None:
    """Raises ValueError unless ids of a feature may have this dtype."""
    if dtype not in ("int32", "int64"):
        raise ValueError(
            f"Ids of feature {name!r} must be int32 or int64, got {dtype}. Use keras.Input([...], "
            "dtype='int64'), or cast them; strings become ids by fr.hash_strings."
        )


def _flatten_ids(
    config: FeatureConfig, value, mask, *, pooled: bool
) -> tuple[FlatFeature, tf.Tensor | None, tf.Tensor | None]:
    """Flattens a feature without its weights. `pooled`: the lookup pools the ids of a sample.

    Returns:
      The feature; its mask <bool>[m], False at padding, or None where nothing can be padding; the order <int64>[m] in
      which the ids of a SparseTensor were taken, None for the other forms.
    """
    what = f"feature {config.name!r}"
    mask = getattr(value, "_keras_mask", None) if mask is None else mask
    value = _as_form(value, what)
    check_dtype(config.name, value.dtype.name)
    if value.shape.rank is None or value.shape.rank < 1:
        raise ValueError(f"Ids of {what} must have a known rank of at least 1 (samples first), got {value.shape}.")
    if isinstance(value, tf.SparseTensor) and value.shape.rank != 2:
        raise ValueError(f"A SparseTensor of {what} must have shape [B, L], got {value.shape}. Use a RaggedTensor.")
    if config.combiner is not None and value.shape.rank > 2:
        raise ValueError(
            f"Ids of {what} with combiner {config.combiner!r} must have shape [B] or [B, L], got {value.shape}. "
            "Merge the inner dimensions, or use combiner=None."
        )
    order = None
    if isinstance(value, tf.SparseTensor):
        value, order = _sorted(what, value)
    ids = flat_values(value)
    row_splits = None
    if isinstance(value, tf.RaggedTensor):
        if value.flat_values.shape.rank != 1:
            raise ValueError(f"Ragged ids of {what} must have flat values of rank 1, got {value.flat_values.shape}.")
        row_splits = tf.cast(value.nested_row_splits[-1], tf.int64)
    bag_size = 1
    if pooled:
        bag_size, row_splits = _bags(value, row_splits)
    feature = FlatFeature(config, tf.cast(ids, tf.int64), row_splits, bag_size, value)
    kept = is_kept(config, value, mask)
    if kept is None:
        return feature, None, order
    return _without_padding(feature, flat_values(kept), pooled=pooled), flat_values(kept), order


def _sorted(what: str, value: tf.SparseTensor) -> tuple[tf.SparseTensor, tf.Tensor]:
    """The tensor with its indices in row-major order, and the former place <int64>[n] of each value."""
    indices, shape = value.indices, value.dense_shape
    message = f"Indices of the SparseTensor of {what} must be inside its dense_shape. Correct the indices."
    # Whole columns: comparisons over the short inner dimension of `indices` take ten times as long.
    rows, columns = tf.unstack(indices, axis=1)
    least, most = ([reduce(rows), reduce(columns)] for reduce in (tf.reduce_min, tf.reduce_max))
    sound = tf.reduce_all(tf.stack(least) >= 0) & tf.reduce_all(tf.stack(most) < shape)
    inside = tf.debugging.assert_equal(sound, True, message=message)

    def ascending(rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
        in_row = (rows[:-1] == rows[1:]) & (columns[:-1] < columns[1:])
        return tf.reduce_all((rows[:-1] < rows[1:]) | in_row)

    def reordered() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        places = tf.range(tf.size(value.values, tf.int64))
        result = tf.sparse.reorder(tf.SparseTensor(indices, places, shape))
        message = (
            f"Indices of the SparseTensor of {what} must occur once each, got an index twice. Use another column "
            "for each value of a row."
        )
        once = tf.debugging.assert_equal(ascending(*tf.unstack(result.indices, axis=1)), True, message=message)
        with tf.control_dependencies([once]):
            return result.indices, tf.gather(value.values, result.values), tf.identity(result.values)

    def as_they_are() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return indices, value.values, tf.range(tf.size(value.values, tf.int64))

    with tf.control_dependencies([inside]):
        # A sort of sorted indices would cost more than the rest of the flattening.
        indices, values, order = tf.cond(ascending(rows, columns), as_they_are, reordered)
    return tf.SparseTensor(indices, values, shape), order


def is_kept(config: FeatureConfig, value, mask=None):
    """<bool> in the form of the ids, False at padding; None where nothing can be padding. Arguments as in flatten."""
    what = f"feature {config.name!r}"
    mask = getattr(value, "_keras_mask", None) if mask is None else mask
    if mask is None and config.padding_id is None:
        return None
    if not KERAS_IS_LEGACY and isinstance(value, keras_api.KerasTensor):
        return _symbolic_mask(config, value, mask)
    value = _as_form(value, what)
    ids = flat_values(value)
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


def _symbolic_mask(config: FeatureConfig, ids, mask):
    """The mask of dense ids in a functional model of Keras 3; None for other ids.

    A layer such as MultiHeadAttention removes the masks of its inputs. Only a symbolic mask stays in the calls of other
    layers.
    """
    if ids.ragged or ids.sparse:
        return None
    kept = keras.ops.ones_like(ids, "bool")
    if config.padding_id is not None:
        kept = keras.ops.not_equal(ids, np.int64(config.padding_id))
    if mask is None:
        return kept
    for _ in range(len(ids.shape) - len(mask.shape)):
        mask = keras.ops.expand_dims(mask, -1)
    return keras.ops.logical_and(kept, mask)


def _flat_mask(what: str, mask, value, ids: tf.Tensor) -> tf.Tensor:
    """The mask <bool>[m] of each id. A mask of the first dimensions of the ids covers all of their inner dimensions."""
    if mask.dtype != tf.bool:
        raise ValueError(f"mask of {what} must be bool, got {mask.dtype.name}.")
    rank, are_dense = mask.shape.rank, isinstance(value, tf.Tensor) and isinstance(mask, tf.Tensor)
    suits = rank is not None and 1 <= rank <= value.shape.rank and not (isinstance(mask, tf.SparseTensor) and rank != 2)
    if not suits or (are_dense and not mask.shape.is_compatible_with(value.shape[:rank])):
        raise ValueError(
            f"mask of {what} must have the shape of its ids or of their first dimensions, got {mask.shape} for ids "
            f"of shape {value.shape}."
        )
    message = f"mask of {what} must be one per id, in the rows of its ids. Use a mask made from these ids."
    if are_dense:
        same = tf.debugging.assert_equal(tf.shape(mask), tf.shape(value)[:rank], message=message)
        with tf.control_dependencies([same]):
            inner = tf.reshape(mask, tf.concat([tf.shape(mask), [1] * (value.shape.rank - rank)], 0))
            return tf.reshape(tf.broadcast_to(inner, tf.shape(value)), [-1])
    if isinstance(mask, tf.SparseTensor):
        mask, _ = _sorted(f"the mask of {what}", mask)
    flat, depth = flat_values(mask), len(_nested_splits(mask))
    if flat.shape.rank != 1:
        raise ValueError(f"Ragged mask of {what} must have flat values of rank 1, got {flat.shape}.")
    for splits in _nested_splits(value)[depth:]:
        flat = tf.repeat(flat, splits[1:] - splits[:-1])
    return _of_same_rows(flat, message, mask, value)


def _without_padding(feature: FlatFeature, kept: tf.Tensor, *, pooled: bool) -> FlatFeature:
    """The feature without the ids where `kept` <bool>[m] is False."""
    places = tf.where(kept)[:, 0]
    # before[i] counts the kept ids among the first i, so it maps a bound among all ids to a bound among kept ids.
    before = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(tf.cast(kept, tf.int64))], 0)
    row_splits, bag_size = feature.row_splits, feature.bag_size
    if row_splits is not None:
        row_splits = tf.gather(before, _checked_splits(feature.config, row_splits, tf.size(kept, tf.int64)))
    elif pooled:
        row_splits, bag_size = before[::bag_size], 0
    return feature._replace(ids=tf.gather(feature.ids, places), row_splits=row_splits, bag_size=bag_size, places=places)


def _checked_splits(config: FeatureConfig, row_splits: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """row_splits, checked here because ops.fuse_ids sees only the splits of the kept ids."""
    bounds = tf.concat([[0], row_splits, [ids]], 0)
    sound = tf.reduce_all(bounds[1:] >= bounds[:-1]) & (row_splits[0] == 0) & (row_splits[-1] == ids)
    message = f"row_splits of feature {config.name!r} must run from 0 to the number of its ids without decreasing."
    with tf.control_dependencies([tf.debugging.assert_equal(sound, True, message=message)]):
        return tf.identity(row_splits)


def _bags(value, row_splits: tf.Tensor | None) -> tuple[int, tf.Tensor | None]:
    """The bags of a pooled feature: ids per bag, or 0 and row_splits <int64>[B+1]."""
    if row_splits is not None:
        return 0, row_splits
    if isinstance(value, tf.SparseTensor):
        return 0, _nested_splits(value)[0]
    if value.shape.rank == 1:
        return 1, None
    if value.shape[1]:
        return value.shape[1], None
    # The length is unknown or 0; with 0 ids only splits tell the number of samples.
    return 0, _nested_splits(value)[0]


def _flat_weights(config: FeatureConfig, weights, form, order: tf.Tensor | None) -> tf.Tensor:
    """The weights <float>[m] of the ids of `form`; see `flatten` and `_flatten_ids`."""
    what = f"feature {config.name!r}"
    if config.combiner is None:
        raise ValueError(
            f"Feature {config.name!r} got weights, but its combiner is None. Use 'sum', 'mean' or 'sqrtn'."
        )
    if not weights.dtype.is_floating:
        raise ValueError(f"Weights of {what} must be floats, got {weights.dtype.name}.")
    if weights.shape.rank not in (1, 2) or flat_values(weights).shape.rank != 1:
        raise ValueError(f"Weights of {what} must have the form of the ids, {form.shape}, or [n], got {weights.shape}.")
    message = f"Weights of {what} must be one per id, in the rows of its ids. Use weights of the same samples."
    if isinstance(weights, tf.SparseTensor):
        weights, _ = _sorted(f"the weights of {what}", weights)
    flat = flat_values(weights)
    if isinstance(weights, tf.Tensor) and weights.shape.rank == 1:  # flat
        same = tf.debugging.assert_equal(tf.size(flat), tf.size(flat_values(form)), message=message)
        with tf.control_dependencies([same]):
            return tf.identity(flat) if order is None else tf.gather(flat, order)
    if isinstance(weights, tf.Tensor) and isinstance(form, tf.Tensor):
        same = tf.debugging.assert_equal(_rows_and_columns(weights), _rows_and_columns(form), message=message)
        with tf.control_dependencies([same]):
            return tf.identity(flat)
    if isinstance(form, tf.Tensor) and form.shape.rank == 1:
        form = form[:, tf.newaxis]
    return _of_same_rows(flat, message, weights, form)


def _rows_and_columns(dense: tf.Tensor) -> tf.Tensor:
    """<int32>[2], the shape of a dense tensor [B, L], or of [B] as [B, 1]. Known sizes stay constants."""
    sizes = [tf.shape(dense)[at] if size is None else size for at, size in enumerate(dense.shape)]
    return tf.stack([*sizes, 1][:2])


def _nested_splits(form: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> list[tf.Tensor]:
    """row_splits <int64> of each dimension after the first, the outermost first."""
    if isinstance(form, tf.SparseTensor):
        form = tf.RaggedTensor.from_value_rowids(
            form.values, form.indices[:, 0], nrows=form.dense_shape[0], validate=False
        )
    if isinstance(form, tf.RaggedTensor):
        return [tf.cast(splits, tf.int64) for splits in form.nested_row_splits]
    shape = tf.shape(form, tf.int64)
    return [tf.range(tf.reduce_prod(shape[:at]) + 1) * shape[at] for at in range(1, form.shape.rank)]


def _of_same_rows(flat: tf.Tensor, message: str, other, form) -> tf.Tensor:
    """`flat`, values of `other`, after a check that weights or mask `other` has the rows of the ids `form`.

    A mask may have the rows of the first dimensions. One of the two is not dense. Indices of a SparseTensor are sorted.
    Raises InvalidArgumentError at run time if the rows differ.
    """
    theirs, ours = _nested_splits(other), _nested_splits(form)
    rows = tf.size(theirs[0]) - 1 if theirs else tf.size(flat_values(other))
    same = (rows == tf.size(ours[0]) - 1) & (tf.size(flat) == tf.size(flat_values(form)))
    pairs = [*zip(theirs, ours)]
    if isinstance(other, tf.SparseTensor) and isinstance(form, tf.SparseTensor):
        pairs.append((other.indices[:, 1], form.indices[:, 1]))
    for got, wanted in pairs:
        both = tf.minimum(tf.size(got), tf.size(wanted))  # Vectors of other sizes cannot be compared.
        same &= (tf.size(got) == tf.size(wanted)) & tf.reduce_all(got[:both] == wanted[:both])
    counts = [theirs[0], ours[0]] if theirs else [rows, tf.size(ours[0]) - 1]
    words = [message, "Got and want row_splits:" if theirs else "Got and want samples:"]
    with tf.control_dependencies([tf.debugging.Assert(same, [*words, *(tf.cast(x, tf.int32) for x in counts)])]):
        return tf.identity(flat)


def restore_form(feature: FlatFeature, rows: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    """Gives rows [n, D] of a feature's ids, [B, D] where the lookup pooled them, the form of the feature.

    Returns:
      combiner None: dense [B, ..., D]; RaggedTensor [B, (L), D] for ragged and sparse features; zeros at padding.
      else: [B, D]; a sample without ids, or with padding only, has zeros.
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


def placing_ids(tables: Iterable[Table]) -> contextlib.AbstractContextManager:
    """Operations made inside run in host memory if the ids of one of these tables travel there; else anywhere."""
    if any(table.ids_on_host for table in tables):
        return tf.device("/CPU:0")
    return contextlib.nullcontext()
