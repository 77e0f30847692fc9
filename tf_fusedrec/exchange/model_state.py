"""All ranks train one model: equal dense weights from the start, and equal moving statistics, constants and counters.

A constant gets rank 0's value at the start. A moving statistic follows the samples of its rank, so it is averaged
before it is read. Metrics and random generators belong to a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.exchange import collectives

_LOG = logging.getLogger("tf_fusedrec.exchange.model_state")


class Digest(NamedTuple):
    """A variable of one rank in a few bytes, whatever its size."""

    name: str
    form: str  # shape and dtype
    content: int  # xxh3_64 of the bytes


def dense_weights(model: keras.Model) -> list[tf.Variable]:
    """The trainable weights of a model, also frozen ones. Rows of a FusedEmbedding are not among them."""
    return [weight for weight in model.weights if weight.trainable]


def state_of(model: keras.Model) -> list[tf.Variable]:
    """The weights of a model that no gradient trains: moving statistics, constants, counters, but not metrics."""
    of_metrics = {_ref(variable) for metric in model.metrics for variable in metric.variables}
    return [weight for weight in model.weights if not weight.trainable and _ref(weight) not in of_metrics]


def values_of(variables: Iterable[tf.Variable]) -> Iterator[tuple[str, np.ndarray]]:
    """The name and value of each variable. Copies one variable at a time to host memory. Eager."""
    return ((keras_api.variable_name(variable), keras_api.tf_variable(variable).numpy()) for variable in variables)


def _ref(variable: Any) -> Any:
    return keras_api.tf_variable(variable).ref()


def digests(weights: Iterable[tuple[str, np.ndarray]]) -> list[Digest]:
    """The digest of each weight (name, value), in their order."""
    result = []
    for name, value in weights:
        value = np.asarray(value)
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)  # Python reads no buffer of bfloat16
        result.append(Digest(name, f"{value.shape} {value.dtype.name}", xxhash.xxh3_64_intdigest(content.data)))
    return result


def vocabularies(model: keras.Model) -> list[Digest]:
    """The digests of the vocabularies of preprocessing layers. Ranks cannot exchange them, so they are a form."""
    result = []
    for layer in model._flatten_layers():
        if hasattr(layer, "get_vocabulary"):
            words = layer.get_vocabulary()
            form = f"a vocabulary of {len(words)} ({xxhash.xxh3_64_hexdigest(repr(words).encode())})"
            result.append(Digest(layer.name, form, 0))
    return result


def difference(of_ranks: Sequence[Sequence[Digest]]) -> str | None:
    """A sentence that names a difference from rank 0; None if all R ranks have equal bits of the same variables."""
    for rank, of_rank in enumerate(of_ranks):
        if len(of_rank) != len(of_ranks[0]):
            return f"rank {rank} has {len(of_rank)} dense weights and slots, rank 0 has {len(of_ranks[0])}"
    by_variable = list(zip(*of_ranks))
    for first, *rest in by_variable:
        for rank, digest in enumerate(rest, 1):
            if digest.form != first.form:
                return f"{first.name!r} is {first.form} on rank 0, {digest.name!r} is {digest.form} on rank {rank}"
    differing = [variable for variable in by_variable if len({digest.content for digest in variable}) > 1]
    if not differing:
        return None
    first = differing[0][0]
    ranks = [rank for rank, digest in enumerate(differing[0]) if digest.content != first.content]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return f"dense weight {first.name!r}{more} has other values on rank 0 than on ranks {ranks}"


def difference_at_start(steps: Sequence[int], of_ranks: Sequence[Sequence[Digest]]) -> str | None:
    """The same sentence where rank 0's values may replace the other ranks' values; None if all ranks have equal bits.

    Raises RuntimeError if ranks differ, and one of them has trained (`steps` of its optimizer) or has other variables.
    """
    differs = difference(of_ranks)
    same_forms = len({tuple(digest.form for digest in of_rank) for of_rank in of_ranks}) == 1
    if differs is not None and (any(steps) or not same_forms):
        raise RuntimeError(
            f"Ranks do not have the same model after {list(steps)} steps of the optimizer by rank: {differs}. Use the "
            "same model and checkpoint on all ranks, and tf_fusedrec.collectives.distributed_optimizer with the same "
            "learning rate; or tf_fusedrec.collectives.broadcast_variables, which gives all ranks rank 0's values."
        )
    return differs


def equal_start(variables: Sequence[tf.Variable], steps: int, others: Sequence[Digest] = ()) -> bool:
    """Gives all ranks rank 0's values if no rank has trained yet, and else checks that they are equal. Collective.

    Eager. Rank 0's logger "tf_fusedrec.exchange.model_state" reports a broadcast at INFO.

    Args:
      variables: Weights, state and variables of the optimizer, in the same order on all ranks.
      steps: Number of steps that the optimizer has made on this rank; 0 at a first start.
      others: Digests of state that no broadcast can make equal.

    Returns:
      Whether ranks got values of rank 0.

    Raises:
      RuntimeError: ranks differ that have trained or loaded a checkpoint, or ranks have different models.
    """
    if collectives.size() == 1:
        return False
    reports = collectives.all_gather_object((steps, [*digests(values_of(variables)), *others]))
    differs = difference_at_start(*zip(*reports))
    if differs is None:
        return False
    collectives.broadcast_variables(variables)
    if collectives.rank() == 0:
        _LOG.info("before the first step %s; all ranks have rank 0's values now", differs)
    return True


def finish_adapting(model: keras.Model) -> None:
    """Lets preprocessing layers compute with the values that their variables got from rank 0."""
    for layer in model._flatten_layers():
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()


def check_equal(model: keras.Model, when: str, *, state: bool) -> None:
    """Raises RuntimeError on all ranks if their models differ. Collective, eager.

    Args:
      model: Keras model.
      when: The time of the comparison, for the message.
      state: True to compare the state that no gradient trains as well. It may differ between steps.
    """
    if collectives.size() == 1 or not model.built:
        return
    weights = [*dense_weights(model), *(state_of(model) if state else ())]
    of_this_rank = [*digests(values_of(weights)), *(vocabularies(model) if state else ())]
    differs = difference(collectives.all_gather_object(of_this_rank))
    if differs is not None:
        raise RuntimeError(
            f"Ranks have different models {when}: {differs}. Use fr.collectives.distributed_optimizer in model.compile,"
            " or average gradients over ranks before apply_gradients; build and adapt layers equally on all ranks."
        )


def average_state(model: keras.Model, samples: int = 1, steps: int = 0) -> None:
    """Makes the state that no gradient trains equal on all ranks. Collective, eager.

    Evaluations, predictions, the end of an epoch, checkpoints and exports call it for a PipelinedModel; checkpoints and
    exports for every model. Call it before the evaluation of any other model.

    Numbers that training has changed become the mean over ranks, weighted by `samples`. The moving variance of batch
    normalization becomes that of all samples, which includes the spread of the ranks' means. Counters, and variables
    with aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, get the value of the rank with the most steps. Without
    `steps`, only variables change that were equal in the first step of collectives.distributed_optimizer, or that have
    aggregation=tf.VariableAggregation.MEAN, as those of batch normalization.

    Args:
      model: Keras model.
      samples: Number of samples that this rank has trained since the last call.
      steps: Number of training steps in which this rank had samples since the last call.

    Examples:
      >>> fr.schedules.average_state(keras.Sequential([keras.layers.BatchNormalization()]))
    """
    if collectives.size() == 1 or not model.built:
        return
    variables, aggregation = state_of(model), tf.VariableAggregation
    report = samples, steps, digests(values_of(variables))
    variables = [keras_api.tf_variable(variable) for variable in variables]
    samples_of, steps_of, of_ranks = zip(*collectives.all_gather_object(report))
    if len({len(of_rank) for of_rank in of_ranks}) > 1:
        return  # a comparison will name the difference
    differing = [v for v, *of_variable in zip(variables, *of_ranks) if len({d.content for d in of_variable}) > 1]
    optimizer: Any = getattr(model, "optimizer", None)
    equal_at_start = getattr(getattr(optimizer, "inner_optimizer", optimizer), "__dict__", {}).get("_known", set())
    changed = [
        v for v in differing if any(steps_of) or v.ref() in equal_at_start or v.aggregation == aggregation.MEAN
    ]  # fmt: skip
    averaged = [v for v in changed if v.dtype.is_floating and v.aggregation != aggregation.ONLY_FIRST_REPLICA]
    share = samples / sum(samples_of) if sum(samples_of) else 1.0 / collectives.size()
    spread = _spread(model, {variable.ref() for variable in averaged}, share)
    for variable in averaged:
        value = variable.numpy().astype(np.float64) + spread.get(variable.ref(), 0.0)
        variable.assign(tf.cast(_sum(share * value), variable.dtype))
    copied = [v for v in changed if v.ref() not in {variable.ref() for variable in averaged}]
    if copied:
        values = collectives.all_gather_object([variable.numpy() for variable in copied])[int(np.argmax(steps_of))]
        for variable, value in zip(copied, values):
            variable.assign(value)


def _sum(value: np.ndarray) -> tf.Tensor:
    return collectives.all_reduce_sum(tf.constant(value), name="fusedrec.state")


def _spread(model: keras.Model, averaged: set[Any], share: float) -> dict[Any, np.ndarray]:
    """By reference of a moving variance, the square of the distance from this rank's mean to the mean of all."""
    spread = {}
    for layer in model._flatten_layers():
        of_layer = [getattr(layer, name, None) for name in ("moving_mean", "moving_variance")]
        if not all(hasattr(value, "assign") for value in of_layer):
            continue
        mean, variance = map(keras_api.tf_variable, of_layer)
        if mean.ref() in averaged:
            mean_here = mean.numpy().astype(np.float64)
            spread[variance.ref()] = np.square(mean_here - _sum(share * mean_here).numpy())
    return spread
