"""What the package needs of tf_keras, the legacy Keras, and what differs in keras_3.py, by the same names."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

OTHER_KERAS = (
    "comes from Keras 3. Use its counterpart in tf_fusedrec.keras, or set TF_USE_LEGACY_KERAS=0 in the environment "
    "for a program in Keras 3."
)

KerasTensor = keras.src.engine.keras_tensor.KerasTensor  # the symbol of a functional model
Functional = keras.Sequential.__base__  # the class of models of inputs and outputs
OPTIMIZERS = (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer)


def _create_seed(self: Any, given: int | None) -> int:
    """Draws a layer's seed from the generator of keras.utils.set_random_seed, or from Python's own."""
    if given is not None:
        return given
    return (getattr(keras.src.backend._SEED_GENERATOR, "generator", None) or random).randint(1, 10**9)


if tuple(map(int, keras.__version__.split(".")[:2])) < (2, 19):
    # These releases draw an integer up to the float 1e9, which Python 3.12 refuses: no layer after set_random_seed.
    keras.src.backend.RandomGenerator._create_seed = _create_seed


_normalize_weights = keras.layers.SpectralNormalization.normalize_weights


def _converted_normalize_weights(self: Any) -> None:
    """Branches on a tensor, as no other layer, optimizer, loss or metric of tf_keras does."""
    autograph = tf.__internal__.autograph
    autograph.tf_convert(_normalize_weights, autograph.control_status_ctx(), user_requested=True)(self)


keras.layers.SpectralNormalization.normalize_weights = _converted_normalize_weights


def layer_of_other_keras() -> Any:
    """The layer or model of Keras 3 that calls; None outside. It does not see the weights of a legacy layer."""
    state = sys.modules.get("keras.src.backend.common.global_state")  # Keras 3 has no public name for its running call
    context = None if state is None else state.get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


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


def unique_layer_name(class_name: str) -> str | None:
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
