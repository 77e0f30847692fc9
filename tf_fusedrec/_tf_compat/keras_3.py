"""What the package needs of Keras 3 on TensorFlow, and what differs in legacy.py, by the same names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

if keras.config.backend() != "tensorflow":
    raise ImportError(
        f"tf_fusedrec needs Keras 3 with its TensorFlow backend, but Keras was imported with {keras.config.backend()}. "
        'Remedy: set KERAS_BACKEND=tensorflow, or "backend": "tensorflow" in ~/.keras/keras.json.'
    )

OTHER_KERAS = (
    "comes from tf_keras. Use its counterpart in tf_fusedrec.keras, or set TF_USE_LEGACY_KERAS=1 in the environment "
    "for a program in tf_keras."
)

KerasTensor = keras.KerasTensor  # the symbol of a functional model
Functional = type(keras.Model.__new__(keras.Model, None, None))  # the class of models of inputs and outputs
OPTIMIZERS = (keras.optimizers.Optimizer,)


def layer_of_other_keras() -> Any:
    """The layer or model of tf_keras that calls; None outside. It does not see the weights of a layer of Keras 3."""
    calls = sys.modules.get("tf_keras.src.engine.base_layer_utils")  # tf_keras has no public name for its running call
    return None if calls is None else calls.call_context().layer


def tf_variable(weight: Any) -> tf.Variable:
    """The TensorFlow variable of a weight."""
    return weight if isinstance(weight, tf.Variable) else weight.value


def variable_name(weight: Any) -> str:
    """The name of a weight in checkpoints and messages, such as "dense/kernel:0"."""
    return weight.name if isinstance(weight, tf.Variable) else f"{weight.path}:0"


def own_weights(layer: Any) -> list[Any]:
    """The weights of a layer without those of its inner layers. It may not be built."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def modules_of(model: Any) -> Sequence[Any]:
    """The model or layer and all that it holds, in an order that is the same on all ranks."""
    return model._flatten_layers()


def unique_layer_name(class_name: str) -> str | None:
    """None: Keras gives the name."""
    return None


def loss_scale(optimizer: Any) -> Any:
    """The number by which a LossScaleOptimizer multiplies the loss of this step."""
    return optimizer.dynamic_scale.value if optimizer.built else optimizer.initial_scale


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The variables of an optimizer, its counter of steps included."""
    return optimizer.variables


def make_slots(optimizer: Any, weights: Sequence[Any]) -> None:
    """Makes the variables that the optimizer's first step would make."""
    if not optimizer.built:
        optimizer.build(weights)
