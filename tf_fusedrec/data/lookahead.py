"""Look-ahead: with every batch, the ids of the batch that comes k steps later (FusedRec, section 4; NestPipe, IV).

for batch, coming in lookahead(batches, steps=4):
    embedding.prefetch(coming)  # rows begin their way from disk to memory
    train(batch)                # others are trained meanwhile
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_fusedrec._tf_compat import tf


def lookahead(dataset: tf.data.Dataset, steps: int, ids: Callable[..., Any] | None = None) -> tf.data.Dataset:
    """Pairs every batch with the ids of the batch `steps` later.

    The input is read once, in its order; `steps` + 1 batches are held in memory. All batches come, also the last
    `steps`, after which nothing comes: theirs is a batch of no samples, so that FusedEmbedding.prefetch, which is
    collective, is called equally often on ranks with equally many batches.

    Args:
      dataset: of batches: nested structures of tensors, RaggedTensors and SparseTensors, samples first.
      steps: k >= 1.
      ids: takes a batch (its parts as arguments where it is a tuple) and gives what FusedEmbedding.prefetch takes; None
        takes the whole batch.

    Returns:
      Dataset of (batch, ids of the coming batch), as many as `dataset` has.

    Raises:
      ValueError: steps < 1, or ids of unknown rank.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an int >= 1, got {steps!r}.")

    def paired(*parts: Any) -> tuple[Any, Any]:
        batch = parts if len(parts) > 1 else parts[0]
        return batch, batch if ids is None else ids(*parts)

    pairs = dataset.map(paired)
    nothing = tf.data.Dataset.from_tensors(tf.nest.map_structure(_empty, pairs.element_spec[1]))

    def ends(batches: Any, comings: Any) -> tf.data.Dataset:
        later = tf.data.Dataset.zip(comings).skip(steps).concatenate(nothing)
        return tf.data.Dataset.zip((tf.data.Dataset.zip(batches).take(1), later))

    # A window is a batch and those behind it; at the end windows become shorter.
    ahead = pairs.window(steps + 1, shift=1).flat_map(ends)
    cardinality = dataset.cardinality()
    return ahead.apply(tf.data.experimental.assert_cardinality(cardinality)) if cardinality >= 0 else ahead


def _empty(spec: tf.TypeSpec) -> Any:
    """A value of `spec` with no samples."""
    if spec.shape.rank is None or spec.shape.rank < 1:
        raise ValueError(f"Ids that are looked ahead must have a known rank of at least 1 (samples first), got {spec}.")
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = [size or 0 for size in spec.shape[spec.ragged_rank + 1 :]]
        no_rows = tf.zeros([1], spec.row_splits_dtype)
        flat = tf.zeros([0, *inner], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(flat, [no_rows] * spec.ragged_rank, validate=False)
    shape = [0, *(size or 0 for size in spec.shape[1:])]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    return tf.zeros(shape, spec.dtype)
