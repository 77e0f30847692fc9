"""Evaluation and predictions on several ranks: as many steps on each as the one with the most batches has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.schedules.feed import read, unconverted


class EvenSteps:
    """In the place of Keras' compiled test or predict function: called with an iterator, answers what one step gives.

    A rank whose data ends first takes part with batches of no samples: lookups are collective, and the others would
    wait for it for ever.

    Args:
      name: of the all-reduce that asks who has data.
      step: what is done with one batch, of any number of samples.
      compiled: whether it runs as a function; else eagerly.

    Raises:
      tf.errors.OutOfRangeError: no rank has data any more.
    """

    def __init__(self, name: str, step: Callable[[Any], Any], *, compiled: bool):
        self._step, self._compiled = step, compiled
        self._read = self._wrap(lambda iterator: read(iterator, name))
        self._steps: dict[str, Callable] = {}  # by the structure of the batches

    def __call__(self, iterator: Any) -> Any:
        batch = self._read(iterator)
        if not batch.goes_on:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence: no rank has data any more.")
        key = repr(iterator.element_spec)
        if key not in self._steps:
            self._steps[key] = self._wrap(self._step, [tf.nest.map_structure(_of_any_size, iterator.element_spec)])
        return self._steps[key](batch.data)

    def _wrap(self, function: Callable, signature: Any = None) -> Callable:
        return tf.function(unconverted(function), input_signature=signature) if self._compiled else function


def _of_any_size(spec: Any) -> Any:
    """The spec of the same tensor for any number of samples."""
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)
