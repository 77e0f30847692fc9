"""Keeps what no gradient trains one state on all ranks: moving statistics, constants, counters, vocabularies.

A constant has rank 0's value from the start. A moving statistic follows the samples of each rank alone, so it is
averaged before it is read. Metrics and random generators belong to a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives

_LOG = logging.getLogger("tf_fusedrec.exchange.model_state")


class Digest(NamedTuple):
    """A variable of one rank in a few bytes, whatever its size."""

    name: str
    form: str  # shape and dtype
    content: int  # xxh3_64 of the bytes


def dense_weights(model: keras.Model) -> list[tf.Variable]:
    """The trainable weights of a model, whether frozen or not. Rows of a FusedEmbedding are no weights."""
    return [weight for weight in model.weights if weight.trainable]


def state_of(model: keras.Model) -> list[tf.Variable]:
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


def equal_start(variables: Sequence[tf.Variable], steps: int, others: Sequence[Digest] = ()) -> bool:
    """Gives all ranks rank 0's values if no rank has trained yet, and else checks that they are equal. Collective.

    Eager. Rank 0's logger "tf_fusedrec.exchange.model_state" reports a broadcast at INFO.

    Args:
      variables: Weights, state and variables of the optimizer, in the same order on all ranks.
      steps: Number of steps that the optimizer has made on this rank; 0 at a first start.
      others: Digests of what no broadcast can make equal.

    Returns:
      Whether ranks have got values of rank 0.

    Raises:
      RuntimeError: ranks differ that have trained or loaded a checkpoint, or ranks hold different models.
    """
    if collectives.size() == 1:
        return False
    told = collectives.all_gather_object((steps, [*digests(values_of(variables)), *others]))
    differs = difference_at_start(*zip(*told))
    if differs is None:
        return False
    collectives.broadcast_variables(variables)
    if collectives.rank() == 0:
        _LOG.info("before the first step %s; all ranks have rank 0's values now", differs)
    return True


def _digest(name: str, value: np.ndarray) -> Digest:
    # Bytes, because Python reads no buffer of bfloat16.
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return Digest(name, f"{value.shape} {value.dtype.name}", xxhash.xxh3_64_intdigest(content.data))


_Preprocessing = keras.layers.Normalization.__base__


def average_state(model: keras.Model, samples: int = 1, steps: int = 0) -> None:
    """Makes the state that no gradient trains equal on all ranks. Collective, eager.

    Evaluations, predictions, the end of an epoch, checkpoints and exports call it for a PipelinedModel; checkpoints and
    exports for every model. Call it before an evaluation of another model.

    Numbers that training has changed become the mean over ranks, weighted by `samples`. The moving variance of batch
    normalization becomes that of all samples, which includes the spread of the ranks' means. Counters, and variables
    with aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, get the value of the rank with the most steps. Without
    `steps`, only variables change that were equal in the first step of collectives.distributed_optimizer, or that have
    aggregation=tf.VariableAggregation.MEAN, as those of batch normalization.

    Args:
      model: Keras model.
      samples: Number of samples that this rank has trained since the last call.
      steps: Number of training steps in which this rank had samples since the last call.
    """
    if collectives.size() == 1 or not model.built:
        return
    variables = state_of(model)
    mine = samples, steps, digests(values_of(variables))
    samples_of, steps_of, digests_of = zip(*collectives.all_gather_object(mine))
    if len({len(of_rank) for of_rank in digests_of}) > 1:
        return  # a comparison will name the difference
    differing = [v for v, *of_ranks in zip(variables, *digests_of) if len({digest.content for digest in of_ranks}) > 1]
    trained, known = any(steps_of), _equal_at_start(getattr(model, "optimizer", None))
    changed = [v for v in differing if trained or v.ref() in known or v.aggregation == tf.VariableAggregation.MEAN]
    averaged = [
        v for v in changed if v.dtype.is_floating and v.aggregation != tf.VariableAggregation.ONLY_FIRST_REPLICA
    ]
    share = samples / sum(samples_of) if sum(samples_of) else 1.0 / collectives.size()
    spread = _spread(model, averaged, share)
    for variable in averaged:
        value = variable.numpy().astype(np.float64) + spread.get(variable.ref(), 0.0)
        variable.assign(tf.cast(_sum(share * value), variable.dtype))
    others = [v for v in changed if v.ref() not in {one.ref() for one in averaged}]
    if others:
        leader = int(np.argmax(steps_of))
        values = collectives.all_gather_object([variable.numpy() for variable in others])[leader]
        for variable, value in zip(others, values):
            variable.assign(value)


def check_equal(model: keras.Model, when: str, *, state: bool) -> None:
    """Raises RuntimeError on all ranks if they hold different models. Collective, eager.

    Args:
      model: Keras model.
      when: The time of the comparison, for the message.
      state: True to compare the state that no gradient trains as well. It may differ between steps.
    """
    if collectives.size() == 1 or not model.built:
        return
    weights = [*dense_weights(model), *(state_of(model) if state else ())]
    mine = [*digests(values_of(weights)), *(vocabularies(model) if state else ())]
    differs = difference(collectives.all_gather_object(mine))
    if differs is not None:
        raise RuntimeError(
            f"Ranks hold different models {when}: {differs}. Remedy: model.compile("
            "fr.collectives.distributed_optimizer(optimizer), ...), or average gradients over ranks before "
            "apply_gradients; build and adapt layers equally on all ranks."
        )


def vocabularies(model: keras.Model) -> list[Digest]:
    """The digests of the vocabularies of preprocessing layers. Ranks cannot exchange them, so they are a form."""
    layers = [layer for layer in model._flatten_layers() if hasattr(layer, "get_vocabulary")]
    words = [(layer.name, layer.get_vocabulary()) for layer in layers]
    return [
        Digest(name, f"a vocabulary of {len(of_layer)} ({xxhash.xxh3_64_hexdigest(repr(of_layer).encode())})", 0)
        for name, of_layer in words
    ]


def finish_adapting(model: keras.Model) -> None:
    """Lets preprocessing layers compute with the values that their variables have got from rank 0."""
    for layer in model._flatten_layers():
        if isinstance(layer, _Preprocessing):
            layer.finalize_state()


def _equal_at_start(optimizer: Any) -> set[Any]:
    """References of the variables that an optimizer of collectives.distributed_optimizer has compared."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), "__dict__", {}).get("_known", set())


def _sum(value: np.ndarray) -> tf.Tensor:
    return collectives.all_reduce_sum(tf.constant(value), name="fusedrec.state")


def _spread(model: keras.Model, averaged: list[tf.Variable], share: float) -> dict[Any, np.ndarray]:
    """By reference of a moving variance, the square of the distance from this rank's mean to the mean of all."""
    references, found = {variable.ref() for variable in averaged}, {}
    for layer in model._flatten_layers():
        mean, variance = getattr(layer, "moving_mean", None), getattr(layer, "moving_variance", None)
        if isinstance(mean, tf.Variable) and isinstance(variance, tf.Variable) and mean.ref() in references:
            here = mean.numpy().astype(np.float64)
            found[variance.ref()] = np.square(here - _sum(share * here).numpy())
    return found
