"""Compares the weights of all ranks: ranks exchange digests, and a sentence names the first difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from tf_fusedrec._tf_compat import keras, tf


class Digest(NamedTuple):
    """A variable of one rank in a few bytes, whatever its size."""

    name: str
    form: str  # shape and dtype
    content: int  # xxh3_64 of the bytes


def dense_weights(model: keras.Model) -> list[tf.Variable]:
    """The trainable weights of a model, whether frozen or not. Rows of a FusedEmbedding are no weights."""
    return [weight for weight in model.weights if weight.trainable]


def state(model: keras.Model) -> list[tf.Variable]:
    """The weights of a model that no gradient trains: moving statistics, constants, counters. Metrics are no state."""
    of_metrics = {variable.ref() for metric in model.metrics for variable in metric.variables}
    return [weight for weight in model.weights if not weight.trainable and weight.ref() not in of_metrics]


def values_of(variables: Iterable[tf.Variable]) -> Iterator[tuple[str, np.ndarray]]:
    """The name and value of each variable. Copies one variable at a time to host memory. Eager."""
    return ((variable.name, variable.numpy()) for variable in variables)


def digests(weights: Iterable[tuple[str, np.ndarray]]) -> list[Digest]:
    """The digest of each weight (name, value), in their order."""
    return [_digest(name, np.asarray(value)) for name, value in weights]


def difference(of_ranks: Sequence[Sequence[Digest]]) -> str | None:
    """A sentence that names a difference from rank 0; None if all ranks hold equal bits.

    Args:
      of_ranks: R lists of digests, of the same variables in the same order.
    """
    forms = [[digest.form for digest in digests] for digests in of_ranks]
    for rank, mine in enumerate(forms):
        if len(mine) != len(forms[0]):
            return f"rank {rank} has {len(mine)} dense weights and slots, rank 0 has {len(forms[0])}"
    for place, first in enumerate(of_ranks[0]):
        other = [rank for rank, digests in enumerate(of_ranks) if digests[place].form != first.form]
        if other:
            theirs = of_ranks[other[0]][place]
            return f"{first.name!r} is {first.form} on rank 0, {theirs.name!r} is {theirs.form} on rank {other[0]}"
    for place, first in enumerate(of_ranks[0]):
        other = [rank for rank, digests in enumerate(of_ranks) if digests[place].content != first.content]
        if other:
            more = sum(any(digests[i].content != d.content for digests in of_ranks) for i, d in enumerate(of_ranks[0]))
            others = f" (and {more - 1} more)" if more > 1 else ""
            return f"dense weight {first.name!r}{others} has other values on rank 0 than on ranks {other}"
    return None


def difference_at_start(steps: Sequence[int], of_ranks: Sequence[Sequence[Digest]]) -> str | None:
    """The same sentence where rank 0's values may replace the other ranks' values; None if all ranks hold equal bits.

    Args:
      steps: R numbers of steps that the optimizer has made.
      of_ranks: R lists of digests, see difference.

    Raises:
      RuntimeError: ranks differ, and one of them has trained or holds variables of other forms.
    """
    differs = difference(of_ranks)
    same_forms = len({tuple(digest.form for digest in digests) for digests in of_ranks}) == 1
    if differs is not None and (any(steps) or not same_forms):
        raise RuntimeError(
            f"Ranks do not hold the same model after {list(steps)} steps of the optimizer by rank: {differs}. Remedy: "
            "build the same model on all ranks, load the same checkpoint on all of them, and train by "
            "tf_fusedrec.collectives.distributed_optimizer at the same learning rate. Or give all ranks rank 0's "
            "values by tf_fusedrec.collectives.broadcast_variables."
        )
    return differs


def _digest(name: str, value: np.ndarray) -> Digest:
    # Bytes, because Python reads no buffer of bfloat16.
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return Digest(name, f"{value.shape} {value.dtype.name}", xxhash.xxh3_64_intdigest(content.data))
