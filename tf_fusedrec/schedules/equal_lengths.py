"""Ranks of one `fit` make the same steps, however many batches each of them has."""

from __future__ import annotations

from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules.feed import no_samples


def with_equal_length(x: Any, batch_size: int | None, steps: int | None, argument: str = "steps_per_epoch") -> Any:
    """`x`, or the same with a length that suits all ranks, where lengths differ; collective.

    Keras counts the batches of a data set before it begins, and stops after so many. Where the number is known on all
    ranks, batches of no samples follow, up to the largest. Else Keras is not told: an epoch ends after `steps`, or when
    no rank has data any more, as Feed and EqualSteps see to.

    Args:
      x, batch_size, steps: of keras.Model.fit, evaluate or predict.
      argument: name of `steps` there.

    Raises:
      ValueError: other steps on another rank, or arrays of other lengths.
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
    """Batches of arrays, all of one length; None for what has none."""
    shape = getattr(next(iter(tf.nest.flatten(x)), None), "shape", None)
    return -(-int(shape[0]) // batch_size) if shape is not None and len(shape) else None
