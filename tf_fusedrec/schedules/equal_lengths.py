"""All ranks of one `fit` make equally many steps, however many batches each rank has."""

from __future__ import annotations

from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules.feed import no_samples


def with_equal_length(x: Any, batch_size: int | None, steps: int | None, argument: str = "steps_per_epoch") -> Any:
    """The data set `x`, extended where ranks have different numbers of batches. Collective.

    Keras counts the batches of a data set first, and stops after that number. Where all ranks know their number,
    batches of no samples are appended up to the largest number. Else the number is hidden from Keras: an epoch ends
    after `steps`, or when Feed or EqualSteps finds that no rank has data any more.

    Args:
      x, batch_size, steps: Arguments of keras.Model.fit, evaluate or predict.
      argument: Name of `steps` in that method.

    Raises:
      ValueError: ranks have different `steps`, or arrays of different lengths.
    """
    if collectives.size() == 1:
        return x
    is_dataset = isinstance(x, tf.data.Dataset)
    batches = int(x.cardinality()) if is_dataset else _batches(x, batch_size or 32)
    mine = (is_dataset, batches, steps)
    of_ranks = collectives.all_gather_object(mine)
    if len({steps for _, _, steps in of_ranks}) > 1:
        raise ValueError(
            f"{argument} must be the same on all ranks, got {[steps for _, _, steps in of_ranks]} by rank."
        )
    if all(other == mine for other in of_ranks):
        return x
    if not all(given for given, _, _ in of_ranks):
        raise ValueError(
            f"ranks have {[number for _, number, _ in of_ranks]} batches. Remedy: give a tf.data.Dataset on every "
            "rank; a rank whose data ends first then takes part with empty batches."
        )
    counts = [number for _, number, _ in of_ranks]
    if steps is None and min(counts) >= 0:  # below: unknown, or endless
        nothing = tf.data.Dataset.from_tensors(0).map(lambda _: no_samples(x.element_spec))
        return x.concatenate(nothing.repeat(max(counts) - batches))
    return tf.data.Dataset.from_tensors(0).flat_map(lambda _: x)


def _batches(x: Any, batch_size: int) -> int | None:
    """The number of batches of arrays of one length; None for inputs without a length."""
    shape = getattr(next(iter(tf.nest.flatten(x)), None), "shape", None)
    return -(-int(shape[0]) // batch_size) if shape is not None and len(shape) else None
