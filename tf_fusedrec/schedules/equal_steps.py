"""Evaluation and predictions on several ranks: every rank makes as many steps as the rank with the most batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules.feed import read, unconverted
from tf_fusedrec.schedules.micro_batch import num_samples


class EqualSteps:
    """Replaces Keras' compiled test or predict function: takes an iterator and returns the result of its steps.

    A rank whose data ends first takes part with batches of no samples, because lookups are collective and the other
    ranks would wait for ever.

    Args:
      model: A PipelinedModel. A call makes `steps_at_once` steps, or fewer if no rank has data for more.
      name: Name of the all-reduce that asks which ranks have data.
      step: The step of one batch, of any number of samples.
      put_together: The function from the steps' results to the result of a call: `last` or `concatenated`.
      compiled: True if steps run as functions; else eagerly.

    Raises:
      tf.errors.OutOfRangeError: no rank has data any more.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        step: Callable[[Any], Any],
        put_together: Callable[[list[Any]], Any],
        *,
        compiled: bool,
    ):
        self._model, self._step, self._put_together, self._compiled = model, step, put_together, compiled
        self._read = self._wrap(lambda iterator: read(iterator, name))
        self._steps: dict[str, Callable] = {}  # by the structure of the batches
        self._empty: tuple[Any, Any] = (None, None)  # an iterator, and no samples of the form of its last result

    def __call__(self, iterator: Any) -> Any:
        key = repr(iterator.element_spec)
        if key not in self._steps:
            self._steps[key] = self._wrap(self._step, [tf.nest.map_structure(_of_any_size, iterator.element_spec)])
        answers: list[Any] = []
        while len(answers) < self._model.steps_at_once:
            batch = self._read(iterator)
            if not batch.goes_on:
                break
            answer = self._steps[key](batch.data)
            if self._put_together is concatenated:
                answer = self._of_last_form(answer, iterator, int(num_samples(batch.data)))
            answers.append(answer)
        if not answers:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence: no rank has data any more.")
        return self._put_together(answers)

    def _of_last_form(self, answer: Any, iterator: Any, samples: int) -> Any:
        """The predictions for a batch; without samples, in the form of the batch before.

        Sizes that the data set does not state are 0 in a batch of no samples, and Keras would put predictions of
        different sizes together as a RaggedTensor.
        """
        if samples:
            self._empty = (iterator, tf.nest.map_structure(_first_none, answer))
            return answer
        return self._empty[1] if self._empty[0] is iterator else answer

    def _wrap(self, function: Callable, signature: Any = None) -> Callable:
        return tf.function(unconverted(function), input_signature=signature) if self._compiled else function


def last(answers: list[Any]) -> Any:
    """The logs of the last step, which cover all steps since the epoch began."""
    return answers[-1]


def averaged(logs: Any) -> Any:
    """Logs of a user's own step: every number becomes its mean over ranks. Collective, eager."""
    if not isinstance(logs, dict):
        return logs
    names = [name for name in sorted(logs) if np.ndim(logs[name]) == 0]
    mine = tf.constant([float(logs[name]) for name in names], tf.float64)
    total = collectives.all_reduce_sum(mine, name="fusedrec.logs").numpy() if names else []
    return {**logs, **{name: float(value) / collectives.size() for name, value in zip(names, total)}}


def concatenated(answers: list[Any]) -> Any:
    """Predictions of several steps, concatenated; scalars are stacked, as in Keras' predict."""

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        return tf.concat(parts, 0) if parts[0].shape.rank else tf.stack(parts)

    return tf.nest.map_structure(join, *answers)


def _first_none(part: Any) -> Any:
    """The first 0 samples of predictions; a scalar, which belongs to no sample, as it is."""
    if isinstance(part, tf.SparseTensor):
        return tf.sparse.slice(part, [0] * part.shape.rank, [0, *part.shape[1:]])
    return part[:0] if part.shape.rank else part


def _of_any_size(spec: Any) -> Any:
    """The spec of the same tensor for any number of samples."""
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)
