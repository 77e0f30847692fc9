"""Keeps what no gradient trains one state on all ranks: moving statistics, constants, counters, vocabularies.

A constant has rank 0's value from the start. A moving statistic follows the samples of each rank alone, so it is
averaged before it is read. Metrics and random generators belong to a rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives, weight_equality
from tf_fusedrec.exchange.weight_equality import Digest

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
    variables = weight_equality.state(model)
    mine = samples, steps, weight_equality.digests(weight_equality.values_of(variables))
    samples_of, steps_of, digests = zip(*collectives.all_gather_object(mine))
    if len({len(of_rank) for of_rank in digests}) > 1:
        return  # a comparison will name the difference
    differing = [v for v, *of_ranks in zip(variables, *digests) if len({digest.content for digest in of_ranks}) > 1]
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
    weights = [*weight_equality.dense_weights(model), *(weight_equality.state(model) if state else ())]
    mine = [*weight_equality.digests(weight_equality.values_of(weights)), *(vocabularies(model) if state else ())]
    differs = weight_equality.difference(collectives.all_gather_object(mine))
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
