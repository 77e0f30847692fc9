"""Look-ahead: pairs every batch with the ids of the batch k steps later (FusedRec, section 4; NestPipe, section IV).

for batch, later_ids in lookahead(batches, steps=4):
    embedding.prefetch(later_ids)  # starts to load rows from disk to memory
    train(batch)                   # trains meanwhile
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_fusedrec._tf_compat import converted_as_here, tf


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
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an int >= 1, got {steps!r}.")

    def paired(*parts: Any) -> tuple[Any, Any]:
        batch = parts if len(parts) > 1 else parts[0]
        return batch, batch if ids is None else converted_as_here(ids)(*parts)

    pairs = dataset.map(paired)
    nothing = tf.data.Dataset.from_tensors(tf.nest.map_structure(_empty, pairs.element_spec[1]))

    def first_and_last(batches: Any, ids_of_window: Any) -> tf.data.Dataset:
        later = tf.data.Dataset.zip(ids_of_window).skip(steps).concatenate(nothing)
        return tf.data.Dataset.zip((tf.data.Dataset.zip(batches).take(1), later))

    # A window holds a batch and the `steps` batches after it. The last windows are shorter.
    paired_dataset = pairs.window(steps + 1, shift=1).flat_map(first_and_last)
    cardinality = dataset.cardinality()
    if cardinality < 0:  # unknown or infinite
        return paired_dataset
    return paired_dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


def _empty(spec: tf.TypeSpec) -> Any:
    """A value of `spec` with no samples."""
    if spec.shape.rank is None or spec.shape.rank < 1:
        raise ValueError(f"ids must return tensors of known rank >= 1 (samples first), got {spec}. Set their shape.")
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = [size or 0 for size in spec.shape[spec.ragged_rank + 1 :]]
        no_rows = tf.zeros([1], spec.row_splits_dtype)
        flat = tf.zeros([0, *inner], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(flat, [no_rows] * spec.ragged_rank, validate=False)
    shape = [0, *(size or 0 for size in spec.shape[1:])]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    return tf.zeros(shape, spec.dtype)
