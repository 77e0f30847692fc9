"""Dense weights: a tf.train.Checkpoint of model and optimizer, copied to memory, then written with checksums.

tf_keras and Keras 3 name the weights of one model differently, and Keras 3 tells TensorFlow of no layers in lists. So
the checkpoint has all weights and slots in an order that is the same under both, too. The root's attributes are:

    dense_of_keras_3, dense_of_tf_keras   [all weights], by the Keras that wrote
    dense_slot_<name>                     {number of the weight: its slot}, or {0: a number of the optimizer}
    model, optimizer                      by tf_keras: they also restore weights that are made later
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, keras_api, tf
from tf_fusedrec.exchange import model_state
from tf_fusedrec.files import disk
from tf_fusedrec.tables.keras_savers import without_tables

PREFIX = "dense"
# Names in a tf.train.Checkpoint, the first by KERAS_IS_LEGACY. They sort before "model", so they are in the keys.
_WEIGHTS = {False: "dense_of_keras_3", True: "dense_of_tf_keras"}
_SLOTS = "dense_slot_"
_NUMBERS = ("iterations", "learning_rate", "u_product", "dynamic_scale", "step_counter")  # of an optimizer
# Names of slots in keras.optimizers.legacy, and in other optimizers.
_SLOT_NAMES = {
    "m": "momentums", "v": "velocities", "vhat": "velocity_hats", "momentum": "momentums", "rms": "velocities",
    "mg": "average_gradients", "accumulator": "accumulators", "linear": "linears",
}  # fmt: skip
_VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


class Weights(NamedTuple):
    """Copies of dense weights, [(name, value)]."""

    equal: list[tuple[str, np.ndarray]]  # weights and state of the model, which must be equal on all ranks
    rest: list[tuple[str, np.ndarray]]  # metrics and optimizer state
    vocabularies: Sequence[model_state.Digest] = ()  # which must be equal on all ranks


NO_WEIGHTS = Weights([], [])


def ordered_weights(model: Any) -> list[tf.Variable]:
    """All weights of a model without metrics, layer by layer as the model got them, the same under both Keras."""
    weights: dict[int, Any] = {}

    def collect(layer: Any) -> None:
        weights.update((id(weight), weight) for weight in keras_api.own_weights(layer))
        for inner in layer._flatten_layers(recursive=False, include_self=False):
            if not isinstance(inner, keras.metrics.Metric):
                collect(inner)

    collect(model)
    if getattr(model, "built", True):  # weights of a tf.Module
        of_metrics = {id(variable) for metric in getattr(model, "metrics", ()) for variable in metric.variables}
        weights.update((id(weight), weight) for weight in model.weights if id(weight) not in of_metrics)
    return [keras_api.tf_variable(weight) for weight in weights.values()]


def _ordered_slots(model: Any, optimizer: Any) -> dict[str, dict[str, tf.Variable]]:
    """The optimizer's variables by name: slots by the number of their weight in ordered_weights, and numbers at "0"."""
    trained = {id(keras_api.tf_variable(weight)): weight for weight in model.trainable_variables}
    slots = keras_api.slots(optimizer, [trained.get(id(variable), variable) for variable in ordered_weights(model)])
    return {
        _SLOT_NAMES.get(name, name): {str(number): keras_api.tf_variable(slot) for number, slot in of_weights.items()}
        for name, of_weights in slots.items()
    }


def _checkpoint(model: keras.Model, optimizer: Any, **further: Any) -> tf.train.Checkpoint:
    """The objects by which tf_keras restores its own weights, and further ones."""
    return tf.train.Checkpoint(model=model, **({} if optimizer is None else {"optimizer": optimizer}), **further)


def _write(model: keras.Model, optimizer: Any, prefix: str) -> None:
    roots: dict[str, Any] = {_WEIGHTS[KERAS_IS_LEGACY]: ordered_weights(model)}
    if optimizer is not None and getattr(model, "built", True):
        # TensorFlow saves the slots of keras.optimizers.legacy beside their weights and refuses them elsewhere.
        beside = hasattr(getattr(optimizer, "inner_optimizer", optimizer), "get_slot_names")
        for name, variables in _ordered_slots(model, optimizer).items():
            if name in _NUMBERS or not beside:
                roots[f"{_SLOTS}{name}"] = variables
    (_checkpoint(model, optimizer, **roots) if KERAS_IS_LEGACY else tf.train.Checkpoint(**roots)).write(prefix)


def _variables(model: Any, optimizer: Any) -> list[Any]:
    """All existing variables. Reading the variables of an unbuilt model raises, so it has none here."""
    of_model = model.variables if getattr(model, "built", True) else []
    return [*of_model, *([] if optimizer is None else keras_api.optimizer_variables(optimizer))]


def copies(model: Any, optimizer: Any, everything: bool) -> Weights:
    """Copies what must be equal on all ranks, and with `everything` the rest of the model and the optimizer."""
    built = getattr(model, "built", True)
    equal = [*model_state.dense_weights(model), *model_state.state_of(model)] if built else []
    compared = {id(variable) for variable in equal}
    rest = [v for v in _variables(model, optimizer) if id(v) not in compared] if everything else []
    copied = [list(model_state.values_of(part)) for part in (equal, rest)]
    return Weights(copied[0], copied[1], model_state.vocabularies(model))


def snapshot(save: str, model: keras.Model, optimizer: Any) -> dict[str, bytes]:
    """Returns the files of a tf.train.Checkpoint, {name: bytes}, so that training can go on."""
    # tf.train.Checkpoint writes to a path only. The ram:// file system keeps the files in memory.
    folder = f"ram://tf_fusedrec/{save}"
    with without_tables():
        _write(model, optimizer, f"{folder}/{PREFIX}")
    files = {}
    for path in tf.io.gfile.glob(f"{folder}/*"):
        with tf.io.gfile.GFile(path, "rb") as file:
            files[path.rsplit("/", 1)[1]] = file.read()
        tf.io.gfile.remove(path)
    return files


def write(folder: pathlib.Path, files: Mapping[str, bytes]) -> dict[str, list]:
    """Writes and syncs the files. Returns {name: [bytes, xxh3_64]}, the form that `check` takes."""
    for name, data in files.items():
        with disk.new_file(folder / name) as file:
            disk.write(file, data)
    return {name: [len(data), disk.checksum(data)] for name, data in files.items()}


def check(folder: pathlib.Path, files: Mapping[str, list]) -> None:
    """Raises ValueError unless all files exist and are intact, and TensorFlow can read every tensor."""
    for name, (size, checksum) in files.items():
        disk.check_file(folder / name, size, checksum)
    try:
        reader = tf.train.load_checkpoint(str(folder / PREFIX))
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise disk.refusal(folder / PREFIX, f"(.index, .data-*) holds unreadable weights: {error}") from error


def read(folder: pathlib.Path, model: keras.Model, optimizer: Any, *, whole: bool = False) -> None:
    """Restores the weights. Those of tf_keras that do not exist yet are restored when they are made, as its slots are.

    Args:
      folder: Folder of the save.
      model, optimizer: Arguments of `checkpoint.load`.
      whole: True to refuse a checkpoint without a weight that exists.

    Raises:
      ValueError: Shapes or dtypes differ; weights are missing or do not exist, unless tf_keras wrote and reads them.
        Some weights may be restored already.
    """
    prefix = str(folder / PREFIX)
    try:
        if not KERAS_IS_LEGACY or _saved_by(prefix) == _WEIGHTS[False]:
            _read_ordered(prefix, model, optimizer)
            return
        # tf_keras numbers the slots of the trained weights, so it would mix them up after a change of `trainable`.
        by_order = optimizer is not None and _trains_other_weights(prefix, model)
        objects = _checkpoint(_without_optimizer(model), None) if by_order else _checkpoint(model, optimizer)
        with without_tables():
            status = objects.read(prefix)
        if whole:
            status.assert_existing_objects_matched()
        if by_order or optimizer is None:
            status.expect_partial()  # Otherwise TensorFlow would warn of each slot that nothing has read.
        if by_order:
            _assign(prefix, _slot_keys(prefix, model, optimizer))
    except (AssertionError, ValueError, TypeError, tf.errors.OpError) as error:
        raise ValueError(
            f"Dense weights of {folder} do not fit the model: {error}. Load them into the model that was saved."
        ) from error


def _saved_by(prefix: str) -> str | None:
    """The root with all weights; None in a checkpoint of an earlier version."""
    roots = {name.split("/")[0] for name, _ in tf.train.list_variables(prefix)}
    return next((root for root in _WEIGHTS.values() if root in roots), None)


def _trains_other_weights(prefix: str, model: Any) -> bool:
    """Whether a checkpoint has slots, but not of the weights that this model trains."""
    names = [name.split("/") for name, _ in tf.train.list_variables(prefix) if name.startswith(_SLOTS)]
    saved = {number for slot, number, *_ in names if slot.removeprefix(_SLOTS) not in _NUMBERS}
    if not saved or not getattr(model, "built", True):
        return False
    trained = {id(keras_api.tf_variable(weight)) for weight in model.trainable_variables}
    return saved != {str(number) for number, weight in enumerate(ordered_weights(model)) if id(weight) in trained}


def _without_optimizer(model: Any) -> tf.train.Checkpoint:
    """The objects of a model of tf_keras but the optimizer of `compile`, which it tracks, too."""
    children = model._trackable_children()
    return tf.train.Checkpoint(**{name: child for name, child in children.items() if name != "optimizer"})


def _read_ordered(prefix: str, model: Any, optimizer: Any) -> None:
    """Restores weights and slots by their order, from a checkpoint of either Keras."""
    root, weights = _saved_by(prefix), ordered_weights(model)
    names = [name for name, _ in tf.train.list_variables(prefix)]
    count = sum(name.startswith(f"{root}/") and name.count("/") == 3 for name in names)
    if count != len(weights):
        remedy = "Call the model on a batch first, which makes its weights. " if count > len(weights) else ""
        raise ValueError(f"it has the order of {count} weights, but the model has {len(weights)}. {remedy}")
    keys = [(variable, f"{root}/{number}/{_VALUE}") for number, variable in enumerate(weights)]
    _assign(prefix, keys + ([] if optimizer is None else _slot_keys(prefix, model, optimizer)))


def _slot_keys(prefix: str, model: Any, optimizer: Any) -> list[tuple[tf.Variable, str]]:
    """The variables of an optimizer that the checkpoint has, and their keys in it."""
    root, names = _saved_by(prefix), {name for name, _ in tf.train.list_variables(prefix)}
    keras_api.make_slots(optimizer, model.trainable_variables)
    beside = sorted({name.split("/")[-3] for name in names if "/.OPTIMIZER_SLOT/" in name})
    keys = []
    for slot, variables in _ordered_slots(model, optimizer).items():
        aliases = [name for name in beside if _SLOT_NAMES.get(name, name) == slot]
        for number, variable in variables.items():
            places = [f"{_SLOTS}{slot}/{number}/{_VALUE}"]
            places += [f"{root}/{number}/.OPTIMIZER_SLOT/optimizer/{alias}/{_VALUE}" for alias in aliases]
            keys += [(variable, place) for place in places if place in names][:1]
    return keys


def _assign(prefix: str, keys: Sequence[tuple[tf.Variable, str]]) -> None:
    """Restores variables by their keys, if all their shapes agree."""
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    for variable, key in keys:
        if variable.shape != shapes[key]:
            raise ValueError(f"{key} is {shapes[key]}, want {variable.shape.as_list()} of {variable.name!r}")
    for variable, key in keys:
        variable.assign(reader.get_tensor(key))


State = list[tuple[Any, np.ndarray]]  # variables and copies of their values


def state(model: Any, optimizer: Any) -> State:
    """All existing variables, with copies of their values."""
    return [(variable, variable.numpy()) for variable in map(keras_api.tf_variable, _variables(model, optimizer))]


def put_back(before: State) -> None:
    """Restores the values that `state` copied."""
    for variable, value in before:
        variable.assign(value)
