"""Batches of any structure: their samples, their micro-batches, and batches of no samples.

A schedule of micro-batches cannot hide two parts of the exchange: nothing computes before the rows of the first
micro-batch, and nothing after the gradients of the last. NestPipe (section V) cuts evenly, so it exposes 1 / M of the
exchange. Here pieces double from both ends on, once, or twice from eight pieces on: 1 2 ... 2 1, or 1 2 4 ... 4 2 1.
That exposes 1 / (2 M - 2), or 1 / (4 M - 10), of the exchange, if the compute is about as long as it or longer.

The rank with the most rows sets the time of an exchange. So a batch is cut by tokens if its samples differ in tokens.
Ranks with equal tokens in a batch then have nearly equal tokens in each micro-batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import tf


def cut(data: Any, micro_batches: int) -> list[Any]:
    """Cuts a batch by sample into consecutive pieces, smaller ones at both ends.

    The size of a piece is its number of tokens: one for each sample, and one for each value of its ragged and sparse
    features. Without such features it is the number of samples. Where a batch has fewer samples than pieces, as at the
    end of an epoch, some pieces have no samples. Else every piece has a sample.

    Args:
      data: Any structure of dense [B, ...], ragged [B, (L), ...] and sparse [B, ...] tensors; None stays None.
      micro_batches: M, the number of pieces.

    Returns:
      M structures like `data`.

    Raises:
      ValueError: a tensor without a first dimension, tensors with different known first dimensions, a batch
        of a known size below M. At run time InvalidArgumentError: first dimensions that differ.

    Example, M = 2:
      {"a": [7 8 9], "b": [[1 2] [] [3]]}  ->  {"a": [7], "b": [[1 2]]}, {"a": [8 9], "b": [[] [3]]}, 3 tokens each
    """
    leaves = [None if leaf is None else _tensor(leaf) for leaf in tf.nest.flatten(data)]
    tensors = [leaf for leaf in leaves if leaf is not None]
    _check(tensors, micro_batches)
    samples = _samples(tensors[0])
    equal = tf.reduce_all(tf.equal(tf.stack([_samples(tensor) for tensor in tensors]), samples))
    same = tf.debugging.Assert(equal, ["tensors of a batch differ in their number of samples"])
    with tf.control_dependencies([] if same is None else [same]):
        lengths = [_lengths(tensor) for tensor in tensors if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor))]
        bounds = token_bounds(1 + tf.add_n(lengths), micro_batches) if lengths else piece_bounds(samples, micro_batches)
        bounds = tf.identity(bounds)
    none, sizes = [None] * micro_batches, _sizes(bounds)
    pieces = [none if leaf is None else _pieces(leaf, bounds, sizes) for leaf in leaves]
    return [tf.nest.pack_sequence_as(data, piece) for piece in zip(*pieces)]


def num_samples(data: Any) -> tf.Tensor:
    """<int64>[], the number of samples of a batch or of a piece."""
    return _samples(_first_tensor(data))


def known_num_samples(data: Any) -> int | None:
    """The same where it is known when a step is traced, else None."""
    shape = _first_tensor(data).shape
    return shape[0] if shape.rank else None


def no_samples(element_spec: Any) -> Any:
    """A batch of no samples for a data set with this element_spec."""

    def empty(spec: Any) -> Any:
        rank = spec.shape.rank
        if not rank:
            raise ValueError(
                f"a batch must consist of tensors whose first dimension counts the samples, got {spec}. "
                "Use Dataset.batch, or tensors of a known rank >= 1."
            )
        shape = [0, *(size or 0 for size in spec.shape[1:])]
        if isinstance(spec, tf.SparseTensorSpec):
            indices, values = tf.zeros([0, rank], tf.int64), tf.zeros([0], spec.dtype)
            return tf.SparseTensor(indices, values, tf.constant(shape, tf.int64))
        if isinstance(spec, tf.RaggedTensorSpec):
            values = _zeros([0, *shape[1 + spec.ragged_rank :]], spec.dtype)
            splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
            return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)
        return _zeros(shape, spec.dtype)

    return tf.nest.map_structure(empty, element_spec)


def piece_bounds(samples: Any, micro_batches: int) -> Any:
    """M + 1 bounds <int64>[M + 1] of the pieces of B samples, an int or <int64>[]; piece_bounds(12, 4) = 0 2 6 10 12.

    Every piece has a sample before one has two, so that none is empty unless there are fewer samples than pieces.
    """
    each = tf.minimum(samples, micro_batches) if tf.is_tensor(samples) else min(samples, micro_batches)
    before = _shares_before(micro_batches)
    return each * np.arange(micro_batches + 1) // micro_batches + (samples - each) * before // before[-1]


def token_bounds(tokens: tf.Tensor, micro_batches: int) -> tf.Tensor:
    """M + 1 bounds <int64>[M + 1] of the pieces of a batch with these tokens <int64>[B], each >= 1, as piece_bounds.

    The tokens before a bound are as close as possible to the share of the pieces before it.
    Example: tokens 1 1 4 2 2 2 and M = 3 give 0 2 4 6, pieces of 2, 6 and 4 tokens for shares of 3, 6 and 3.
    """
    before = _shares_before(micro_batches)
    # Twice the token count at which the closest bound moves from before a sample to after it.
    middles = 2 * tf.cumsum(tokens) - tokens
    closest = tf.searchsorted(middles * before[-1], 2 * tf.reduce_sum(tokens) * before, out_type=tf.int64)
    samples = tf.size(tokens, tf.int64)
    each = tf.minimum(samples, micro_batches)
    first = each * np.arange(micro_batches + 1) // micro_batches  # samples that the pieces before a bound must have
    # The extra samples before a bound are at least those before the previous bound.
    extra = tf.clip_by_value(closest - first, 0, samples - each)
    return first + tf.reduce_max(extra * np.tri(micro_batches + 1, dtype=np.int64), axis=1)


def _shares_before(micro_batches: int) -> np.ndarray:
    """<int64>[M + 1], the sum of the relative sizes of the pieces before each bound."""
    full = 4 if micro_batches >= 8 else 2
    shares = [min(full, 2 ** min(i, micro_batches - 1 - i)) for i in range(micro_batches)]
    return np.cumsum([0, *shares])


def _check(tensors: list[Any], micro_batches: int) -> None:
    if not tensors:
        raise ValueError("a batch must hold at least one tensor, got none.")
    for tensor in tensors:
        if tensor.shape.rank == 0:
            raise ValueError(
                f"a batch is cut by sample, but {tensor!r} is a scalar. Use tensors with a first dimension of samples."
            )
    sizes = sorted({tensor.shape[0] for tensor in tensors if tensor.shape.rank and tensor.shape[0] is not None})
    if len(sizes) > 1:
        raise ValueError(f"tensors of a batch must have the same number of samples, got {sizes}.")
    if sizes and sizes[0] < micro_batches:
        raise ValueError(
            f"micro_batches {micro_batches} is more than the {sizes[0]} samples of a batch. Use larger batches, or "
            "fewer micro-batches."
        )


def _first_tensor(data: Any) -> Any:
    return next(_tensor(leaf) for leaf in tf.nest.flatten(data) if leaf is not None)


def _tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(leaf)


def _samples(tensor: Any) -> tf.Tensor:
    if isinstance(tensor, tf.RaggedTensor):
        return tf.size(tensor.row_splits, tf.int64) - 1
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tf.shape(tensor, tf.int64)[0]


def _lengths(feature: Any) -> tf.Tensor:
    """<int64>[B], values of each sample."""
    if isinstance(feature, tf.SparseTensor):
        ones = tf.ones_like(feature.indices[:, 0])
        return tf.math.unsorted_segment_sum(ones, feature.indices[:, 0], feature.dense_shape[0])
    return tf.cast(feature.merge_dims(1, feature.ragged_rank).row_lengths(), tf.int64)


def _pieces(tensor: Any, bounds: tf.Tensor, sizes: tf.Tensor) -> list[Any]:
    """The pieces of a tensor between M + 1 bounds. Few ops, because all run before a step can send its first id."""
    if not isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
        return tf.split(tensor, sizes)
    edges = tf.split(bounds, bounds.shape[0])  # [1] each, as a slice takes them
    if isinstance(tensor, tf.RaggedTensor):  # its own slices have a tf.cond each
        of_values, unit = tf.gather(tensor.row_splits, bounds), tf.constant([1], bounds.dtype)
        values = _pieces(tensor.values, of_values, _sizes(of_values))
        splits = [
            tf.strided_slice(tensor.row_splits, begin, end + unit, unit) for begin, end in itertools.pairwise(edges)
        ]
        return [
            tf.RaggedTensor.from_row_splits(piece, here - first, validate=False)
            for piece, here, first in zip(values, splits, tf.split(of_values, of_values.shape[0]))
        ]
    rest = tensor.dense_shape[1:]
    return [
        tf.sparse.slice(tensor, tf.concat([begin, tf.zeros_like(rest)], axis=0), tf.concat([size, rest], axis=0))
        for begin, size in zip(edges, tf.split(sizes, sizes.shape[0]))
    ]


def _sizes(bounds: tf.Tensor) -> tf.Tensor:
    return bounds[1:] - bounds[:-1]


def _zeros(shape: list[int], dtype: tf.DType) -> tf.Tensor:
    return tf.reshape(tf.constant([], dtype), shape)
