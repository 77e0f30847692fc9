"""This module adapts tf_keras, the legacy Keras, to the package. keras_3.py does so for Keras 3, by the same names."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

OTHER_KERAS = (
    "comes from Keras 3. Use its counterpart in tf_fusedrec.keras, or unset TF_USE_LEGACY_KERAS in the environment "
    "for a program in Keras 3."
)

KerasTensor = keras.src.engine.keras_tensor.KerasTensor  # the symbol of a functional model
Functional = keras.Sequential.__base__  # the class of models of inputs and outputs
Dropout = keras.layers.Dropout
OPTIMIZERS = (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer)
LEGACY_OPTIMIZERS = {
    name: getattr(keras.optimizers.legacy, name) for name in ("SGD", "Adam", "Adagrad", "RMSprop", "Ftrl")
}


def _create_seed(self: Any, given: int | None) -> int:
    """Draws a layer's seed from the generator of keras.utils.set_random_seed, or from Python's own."""
    if given is not None:
        return given
    return (getattr(keras.src.backend._SEED_GENERATOR, "generator", None) or random).randint(1, 10**9)


if tuple(map(int, keras.__version__.split(".")[:2])) < (2, 19):
    # These releases draw an integer up to the float 1e9, which Python 3.12 refuses: no layer after set_random_seed.
    keras.src.backend.RandomGenerator._create_seed = _create_seed


_normalize_weights = keras.layers.SpectralNormalization.normalize_weights


def _converted_normalize_weights(self: Any) -> Any:
    """Branches on a tensor, as no other layer, optimizer, loss or metric of tf_keras does. From 2.21 on, it returns."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(_normalize_weights, autograph.control_status_ctx(), user_requested=True)(self)


keras.layers.SpectralNormalization.normalize_weights = _converted_normalize_weights


def is_hdf5(path: str) -> bool:
    """Whether weights saved to this path become a legacy HDF5 file."""
    return keras.src.saving.legacy.saving_utils.is_hdf5_filepath(path)


def saves_whole_model(callback: Any) -> bool:
    """Whether a callback saves as keras.callbacks.ModelCheckpoint."""
    return getattr(type(callback), "_save_model", None) is keras.callbacks.ModelCheckpoint._save_model


def input_name(symbol: Any) -> str:
    """The name of an input of a functional model."""
    return symbol.node.layer.name


def spec_of(symbol: Any) -> tf.TypeSpec:
    """The shape, dtype and form of a symbol of a functional model."""
    return symbol.type_spec


def slots(optimizer: Any, weights: Sequence[Any]) -> dict[str, dict[int, Any]]:
    """An optimizer's variables by name: slots by the place of their weight in `weights`, and numbers at 0."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    by_name = {"iterations": {0: inner.iterations}}
    for name in ("learning_rate", "_u_product"):
        if isinstance(value := getattr(inner, name, None), tf.Variable):
            by_name[name.strip("_")] = {0: value}
    if isinstance(inner, keras.optimizers.legacy.Optimizer):
        for name in inner.get_slot_names():
            by_name[name] = {}
            for place, weight in enumerate(weights):
                with contextlib.suppress(KeyError):  # a weight without a step has no slots
                    by_name[name][place] = inner.get_slot(weight, name)
        return by_name
    places = getattr(inner, "_index_dict", {})
    known = {place: places[inner._var_key(w)] for place, w in enumerate(weights) if inner._var_key(w) in places}
    for name, value in vars(inner).items():
        is_slots = isinstance(value, list) and len(value) == len(places) > 0 and name != "_variables"
        if is_slots and all(isinstance(slot, tf.Variable) for slot in value):
            by_name[name.strip("_")] = {place: value[at] for place, at in known.items()}
    return by_name


def optimizer_to_dict(optimizer: Any) -> dict[str, Any]:
    """The class and the config of an optimizer, with the key "legacy"."""
    legacy = isinstance(optimizer, keras.optimizers.legacy.Optimizer)
    return {"legacy": legacy, **keras.optimizers.serialize(optimizer)}


def optimizer_from_dict(fields: Mapping[str, Any]) -> Any:
    """The optimizer of `optimizer_to_dict`."""
    described = {name: value for name, value in fields.items() if name != "legacy"}
    return keras.optimizers.deserialize(described, use_legacy_optimizer=fields["legacy"])


def why_not_summed(metric: Any) -> str | None:
    """The property of a metric by which its states may not be added; None without one."""
    return None if type(metric).merge_state is keras.metrics.Metric.merge_state else "its own merge_state"


def layer_of_other_keras() -> Any:
    """The layer or model of Keras 3 that calls; None outside. It does not see the weights of a legacy layer."""
    state = sys.modules.get("keras.src.backend.common.global_state")  # Keras 3 has no public name for its running call
    context = None if state is None else state.get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


def calling_optimizer() -> Any:
    """None: tf_keras does not tell which model calls a layer. The begin of fit looks at the optimizer instead."""
    return None


def tf_variable(weight: Any) -> tf.Variable:
    """The TensorFlow variable of a weight."""
    return weight


def variable_name(weight: Any) -> str:
    """The name of a weight in checkpoints and messages, such as "dense/kernel:0"."""
    return weight.name


def own_weights(layer: Any) -> list[Any]:
    """The weights of a layer without those of its inner layers. It may not be built."""
    return [*layer._trainable_weights, *layer._non_trainable_weights]


def modules_of(model: Any) -> Sequence[Any]:
    """The model or layer and all that it holds, in an order that is the same on all ranks."""
    return (model, *model.submodules)


def unique_layer_name(class_name: str) -> str:
    """A name as Keras gives to layers, but never one that a loaded or a user's layer has already."""
    base = keras.src.utils.generic_utils.to_snake_case(class_name)
    return keras.src.backend.unique_object_name(base, zero_based=True, avoid_observed_names=True)


def loss_scale(optimizer: Any) -> Any:
    """The number by which a LossScaleOptimizer multiplies the loss of this step."""
    return optimizer.loss_scale


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The variables of an optimizer, its counter of steps included."""
    return optimizer.variables()


def make_slots(optimizer: Any, weights: Sequence[Any]) -> None:
    """Makes the variables that the optimizer's first step would make."""
    if hasattr(optimizer, "_create_all_weights"):  # keras.optimizers.legacy
        optimizer._create_all_weights(weights)
    else:
        optimizer.build(weights)


def apply_gradients(optimizer: Any, loss: tf.Tensor, gradients: Sequence[Any], weights: Sequence[Any]) -> None:
    """Applies gradients that exist already, once for each update of the optimizer.

    Horovod's optimizers average gradients over ranks in `minimize` and nowhere else.
    """
    optimizer.minimize(loss, weights, tape=_Answers(gradients))


class _Answers:
    """Replaces a tape, and returns gradients that exist already."""

    def __init__(self, gradients: Sequence[Any]):
        self._gradients = gradients

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def gradient(self, *_: Any) -> Sequence[Any]:
        return self._gradients


def intercept(optimizer: Any, with_pairs: Callable[[Callable, list], Any]) -> Callable[[], None]:
    """Puts a function before the method of an optimizer that all gradients pass.

    Args:
      optimizer: It changes, not its class.
      with_pairs: Function of the former method, which takes pairs as well, and the pairs (gradient, weight).

    Returns:
      The function that takes the change back.
    """
    apply, replaced = optimizer.apply_gradients, optimizer.__dict__.get("apply_gradients")

    def intercepted(grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        return with_pairs(lambda pairs: apply(pairs, *args, **kwargs), list(grads_and_vars))

    def undo() -> None:
        del optimizer.__dict__["apply_gradients"]
        if replaced is not None:
            optimizer.__dict__["apply_gradients"] = replaced

    optimizer.__dict__["apply_gradients"] = intercepted
    return undo


def call_model(model: Any, x: Any) -> Any:
    """The outputs of a training call."""
    return model(x, training=True)


def track_loss(model: Any, loss: tf.Tensor, samples: Callable[[], tf.Tensor]) -> None:
    """Does nothing: compute_loss has counted the loss in the metric "loss"."""


def weighing_outputs(model: Any, samples: Callable[[], tf.Tensor]) -> contextlib.AbstractContextManager:
    """Does nothing: tf_keras weighs the loss of each output by its samples."""
    return contextlib.nullcontext()


def loss_metrics(model: Any) -> list[Any]:
    """The metrics of the losses of `compile`."""
    return getattr(getattr(model, "compiled_loss", None), "metrics", [])


def metrics_of_compile(model: Any) -> list[Any]:
    """The metrics of `compile`, which model.metrics lacks before the first step."""
    containers = [getattr(model, name, None) for name in ("compiled_loss", "compiled_metrics")]
    values = tf.nest.flatten([list(vars(container).values()) for container in containers if container is not None])
    return [value for value in values if isinstance(value, keras.metrics.Metric)]


def count_step(model: Any) -> None:
    """Counts a training step where Keras' callbacks and summaries read it."""
    model._train_counter.assign_add(1)


def call_of(node: Any) -> tuple[Any, tuple, dict[str, Any]]:
    """The layer and the positional and named arguments of a node of a functional model."""
    return node.layer, node.call_args, node.call_kwargs


def symbolic_inputs(model: Any) -> Any:
    """The inputs of a functional or sequential model, as it was given them."""
    return model._nested_inputs
