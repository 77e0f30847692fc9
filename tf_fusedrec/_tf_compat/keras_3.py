"""This module adapts Keras 3 on TensorFlow to the package. legacy.py does so for tf_keras, by the same names."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
LEGACY_OPTIMIZERS: dict[str, type] = {}


class Dropout(keras.layers.Dropout):
    """Draws by TensorFlow's generator, as tf_keras does. Keras' own counts its calls in a variable: eight more ops."""

    def call(self, inputs: tf.Tensor, training: bool | None = False) -> tf.Tensor:
        return tf.nn.dropout(inputs, self.rate) if training and self.rate else inputs


def is_hdf5(path: str) -> bool:
    """Whether weights saved to this path become a legacy HDF5 file. Keras 3 refuses all paths but .weights.h5."""
    return True


def saves_whole_model(callback: Any) -> bool:
    """Whether a callback saves as keras.callbacks.ModelCheckpoint."""
    return isinstance(callback, keras.callbacks.ModelCheckpoint)


def input_name(symbol: Any) -> str:
    """The name of an input of a functional model."""
    return symbol._keras_history.operation.name


def spec_of(symbol: Any) -> tf.TypeSpec:
    """The shape, dtype and form of a symbol of a functional model."""
    shape, dtype = tf.TensorShape(symbol.shape), tf.as_dtype(symbol.dtype)
    if symbol.sparse:
        return tf.SparseTensorSpec(shape, dtype)
    if symbol.ragged:  # symbols of Keras 3.9 and 3.10 have no ragged_rank
        return tf.RaggedTensorSpec(shape, dtype, ragged_rank=getattr(symbol, "ragged_rank", None) or 1)
    return tf.TensorSpec(shape, dtype)


def slots(optimizer: Any, weights: Sequence[Any]) -> dict[str, dict[int, Any]]:
    """An optimizer's variables by name: slots by the place of their weight in `weights`, and numbers at 0.

    Names of the n-th optimizer in a MultiOptimizer begin with n, as "1_momentums".

    Raises:
      ValueError: a checkpoint would lack a variable, because it is in no list with a slot for each weight.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    by_name = {name: {0: getattr(optimizer, name, None)} for name in ("dynamic_scale", "step_counter")}
    for number, part in enumerate([inner, *getattr(inner, "optimizers", ())]):
        prefix, trained = f"{number}_" if number else "", part._trainable_variables
        numbers = {name: getattr(part, name, None) for name in ("_iterations", "_learning_rate", "_u_product")}
        lists = {
            name: value
            for name, value in vars(part).items()
            if isinstance(value, list) and len(value) == len(trained) and value is not part._variables
        }
        named = {id(variable) for variables in (numbers.values(), *lists.values()) for variable in variables}
        if unnamed := [variable.path for variable in part._variables if id(variable) not in named]:
            raise ValueError(
                f"Optimizer {type(part).__name__} has variables {unnamed} that are in no list with a slot for each "
                "weight, so a checkpoint would lack them. Use lists such as add_optimizer_variables returns."
            )
        by_name |= {f"{prefix}{name.strip('_')}": {0: value} for name, value in numbers.items()}
        for name, value in lists.items():
            slot_of = dict(zip(map(id, trained), value)) if value is not trained else {}
            slots_by_place = {place: slot_of.get(id(weight)) for place, weight in enumerate(weights)}
            by_name[f"{prefix}{name.strip('_')}"] = slots_by_place
    are_variables = {
        name: {place: value for place, value in values.items() if isinstance(value, keras.Variable)}
        for name, values in by_name.items()
    }
    return {name: variables for name, variables in are_variables.items() if variables}


def optimizer_to_dict(optimizer: Any) -> dict[str, Any]:
    """The class and the config of an optimizer, with the key "legacy"."""
    return {"legacy": False, **keras.optimizers.serialize(optimizer)}


def optimizer_from_dict(fields: Mapping[str, Any]) -> Any:
    """The optimizer of `optimizer_to_dict`."""
    if fields["legacy"]:
        raise ValueError(
            f"optimizer {fields['class_name']} is one of tf_keras.optimizers.legacy, which Keras 3 lacks. Use a record "
            "of tf_fusedrec.optimizers, or set TF_USE_LEGACY_KERAS=1 in the environment."
        )
    return keras.optimizers.deserialize({name: value for name, value in fields.items() if name != "legacy"})


def why_not_summed(metric: Any) -> str | None:
    """The property of a metric by which its states may not be added; None without one."""
    others = [variable for variable in metric.variables if variable.aggregation != "sum"]
    return f"the state {others[0].name!r} with aggregation {others[0].aggregation!r}" if others else None


def layer_of_other_keras() -> Any:
    """The layer or model of tf_keras that calls; None outside. It does not see the weights of a layer of Keras 3."""
    calls = sys.modules.get("tf_keras.src.engine.base_layer_utils")  # tf_keras has no public name for its running call
    return None if calls is None else calls.call_context().layer


def calling_optimizer() -> Any:
    """The optimizer of the model whose call runs; None outside of one."""
    state = sys.modules["keras.src.backend.common.global_state"]  # Keras has no public name for its running call
    context = state.get_global_attribute("current_call_ctx")
    return None if context is None else getattr(context.entry_layer, "optimizer", None)


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


def unique_layer_name(class_name: str) -> str:
    """The name that Keras would give the next layer of this class."""
    base = re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()
    number = keras.backend.get_uid(base) - 1
    return f"{base}_{number}" if number else base


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


def apply_gradients(optimizer: Any, loss: tf.Tensor, gradients: Sequence[Any], weights: Sequence[Any]) -> None:
    """Applies gradients that exist already, once for each update of the optimizer."""
    if weights:  # Keras 3 takes no empty list, which a frozen model has
        optimizer.apply_gradients(zip(gradients, weights))


def intercept(optimizer: Any, with_pairs: Callable[[Callable, list], Any]) -> Callable[[], None]:
    """Puts a function before the method of an optimizer that all gradients pass. As in legacy.py."""
    apply, replaced = optimizer.apply, optimizer.__dict__.get("apply")

    def apply_pairs(pairs: Sequence[tuple[Any, Any]]) -> Any:
        return apply(*map(list, zip(*pairs)))

    def intercepted(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        weights = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        return with_pairs(apply_pairs, list(zip(grads, weights)))

    def undo() -> None:
        del optimizer.__dict__["apply"]
        if replaced is not None:
            optimizer.__dict__["apply"] = replaced

    optimizer.__dict__["apply"] = intercepted
    return undo


def call_model(model: Any, x: Any) -> Any:
    """The outputs of a training call."""
    return model(x, training=True) if "training" in inspect.signature(model.call).parameters else model(x)


def track_loss(model: Any, loss: tf.Tensor, samples: Callable[[], tf.Tensor]) -> None:
    """Counts a loss in the metric "loss", as Keras' own train_step does, unless the model's metrics leave it out."""
    if any(metric is model._loss_tracker for metric in model.metrics):
        model._loss_tracker.update_state(loss, sample_weight=samples())


@contextlib.contextmanager
def weighing_outputs(model: Any, samples: Callable[[], tf.Tensor]) -> Iterator[None]:
    """Inside, compute_loss counts the loss of each output by its samples, as it counts the metric "loss".

    Keras weighs batches of unknown size equally, and with them the parts of a batch on ranks and in micro-batches.
    """
    losses = model._compile_loss
    if losses is None:
        yield
        return
    trackers: list[Any] = []  # none for one output

    def weigh() -> None:
        trackers.extend(getattr(losses, "metrics", []))  # not all releases have it
        for tracker in trackers:

            def update(value: Any, sample_weight: Any = None, count: Callable = tracker.update_state) -> Any:
                return count(value, sample_weight=samples())

            tracker.update_state = update

    def build(*args: Any) -> None:  # which makes the trackers, in the first call
        type(losses).build(losses, *args)
        weigh()

    if losses.built:
        weigh()
    else:
        losses.build = build
    try:
        yield
    finally:
        for tracker in trackers:
            del tracker.update_state
        vars(losses).pop("build", None)


def loss_metrics(model: Any) -> list[Any]:
    """The metrics of the losses of `compile`."""
    return [model._loss_tracker] if model.compiled else []


def metrics_of_compile(model: Any) -> list[Any]:
    """Returns no metrics: model.metrics has those of compile."""
    return []


def count_step(model: Any) -> None:
    """Does nothing: Keras 3 counts the calls of train_function."""


def call_of(node: Any) -> tuple[Any, tuple, dict[str, Any]]:
    """The layer and the positional and named arguments of a node of a functional model."""
    return node.operation, node.arguments.args, node.arguments.kwargs


def symbolic_inputs(model: Any) -> Any:
    """The inputs of a functional or sequential model, as it was given them."""
    return getattr(model, "_functional", model)._inputs_struct
