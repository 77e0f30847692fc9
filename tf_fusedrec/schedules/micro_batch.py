"""Cuts a batch of any structure into pieces of whole samples."""

from __future__ import annotations

from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange.micro_batches import piece_bounds, token_bounds


class BatchWeight:
    """The weight of a rank's whole batch, <float32>[], and the factor of its loss once rank_weights.py has made it."""

    def __init__(self, weight: tf.Tensor):
        self.weight = weight
        self.factor: tf.Tensor | None = None


class MicroBatch(NamedTuple):
    """The part of a batch that a model is working on."""

    number: int  # position of the piece in the batch; 0 for a whole batch
    share: Any  # <float32>[] or 1.0: the piece's share of the batch's loss; shares of a batch sum to 1
    weight: Any = None  # <float32>[], from PipelinedModel.loss_weights; None for a whole batch
    batch: BatchWeight | None = None  # of all micro-batches together; None for a whole batch


WHOLE = MicroBatch(0, 1.0)


def cut(data: Any, micro_batches: int) -> list[Any]:
    """Cuts a batch by sample into consecutive pieces. The first and the last piece are half as large as the others.

    The size of a piece is its number of tokens: one for each sample, and one for each value of its ragged and sparse
    features. Without such features it is the number of samples. Where a batch has fewer samples than pieces, as at the
    end of an epoch, some pieces have no samples. Else every piece has a sample.

    Args:
      data: Any structure of dense [B, ...], ragged [B, (L), ...] and sparse [B, ...] tensors; None stays None.
      micro_batches: M, the number of pieces.

    Returns:
      M structures like `data`.

    Raises:
      ValueError: a tensor without a first dimension, tensors whose first dimensions are known and differ, a batch
        whose size is known and is below M. At run time InvalidArgumentError: first dimensions that differ.

    Example, M = 2:
      {"a": [7 8 9], "b": [[1 2] [] [3]]}  ->  {"a": [7], "b": [[1 2]]}, {"a": [8 9], "b": [[] [3]]}, 3 tokens each
    """
    tensors = [_tensor(leaf) for leaf in tf.nest.flatten(data) if leaf is not None]
    _check(tensors, micro_batches)
    samples = _samples(tensors[0])
    # One comparison of all, because each builds many ops.
    same = tf.debugging.assert_equal(
        tf.stack([_samples(tensor) for tensor in tensors]),
        samples,
        "tensors of a batch differ in their number of samples",
    )
    with tf.control_dependencies([] if same is None else [same]):
        bounds = [tf.identity(bound) for bound in _bounds(tensors, samples, micro_batches)]

    def piece(leaf: Any, i: int) -> Any:
        return None if leaf is None else _slice(_tensor(leaf), bounds[i], bounds[i + 1])

    return [tf.nest.map_structure(lambda leaf, i=i: piece(leaf, i), data) for i in range(micro_batches)]


def num_samples(data: Any) -> tf.Tensor:
    """<int64>[], the number of samples of a batch or of a piece."""
    return _samples(_first_tensor(data))


def known_num_samples(data: Any) -> int | None:
    """The same where it is known when a step is traced, else None."""
    shape = _first_tensor(data).shape
    return shape[0] if shape.rank else None


def _first_tensor(data: Any) -> Any:
    return next(_tensor(leaf) for leaf in tf.nest.flatten(data) if leaf is not None)


def _tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(leaf)


def _check(tensors: list[Any], micro_batches: int) -> None:
    if not tensors:
        raise ValueError("a batch must hold at least one tensor, got none.")
    for tensor in tensors:
        if tensor.shape.rank == 0:
            raise ValueError(
                f"a batch is cut by sample, but {tensor!r} is a scalar. Give every tensor a first dimension of samples."
            )
    sizes = sorted({tensor.shape[0] for tensor in tensors if tensor.shape.rank and tensor.shape[0] is not None})
    if len(sizes) > 1:
        raise ValueError(f"tensors of a batch must have the same number of samples, got {sizes}.")
    if sizes and sizes[0] < micro_batches:
        raise ValueError(
            f"micro_batches {micro_batches} is more than the {sizes[0]} samples of a batch. Remedy: larger batches, or "
            "fewer micro-batches."
        )


def _bounds(tensors: list[Any], samples: tf.Tensor, micro_batches: int) -> list[tf.Tensor]:
    lengths = [_lengths(tensor) for tensor in tensors if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor))]
    return token_bounds(1 + tf.add_n(lengths), micro_batches) if lengths else piece_bounds(samples, micro_batches)


def _lengths(feature: Any) -> tf.Tensor:
    """<int64>[B], values of each sample."""
    if isinstance(feature, tf.SparseTensor):
        ones = tf.ones_like(feature.indices[:, 0])
        return tf.math.unsorted_segment_sum(ones, feature.indices[:, 0], feature.dense_shape[0])
    return tf.cast(feature.merge_dims(1, feature.ragged_rank).row_lengths(), tf.int64)


def _samples(tensor: Any) -> tf.Tensor:
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int64)
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tf.shape(tensor, tf.int64)[0]


def _slice(tensor: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    if isinstance(tensor, tf.RaggedTensor):  # whose own slices have a tf.cond each
        splits = tensor.row_splits[begin : end + 1]
        values = _slice(tensor.values, splits[0], splits[-1])
        return tf.RaggedTensor.from_row_splits(values, splits - splits[0], validate=False)
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin:end]
    rest = tensor.dense_shape[1:]
    return tf.sparse.slice(
        tensor, tf.concat([[begin], tf.zeros_like(rest)], axis=0), tf.concat([[end - begin], rest], axis=0)
    )
