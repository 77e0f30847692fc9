"""Dense weights: a tf.train.Checkpoint of model and optimizer, copied to memory, then written with checksums."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import model_state
from tf_fusedrec.files import disk
from tf_fusedrec.tables.keras_savers import without_tables

PREFIX = "dense"


class Weights(NamedTuple):
    """Copies of dense weights, [(name, value)]."""

    equal: list[tuple[str, np.ndarray]]  # weights and state of the model, which must be equal on all ranks
    rest: list[tuple[str, np.ndarray]]  # metrics and optimizer state
    vocabularies: Sequence[model_state.Digest] = ()  # which must be equal on all ranks


NO_WEIGHTS = Weights([], [])


def _checkpoint(model: keras.Model, optimizer: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=model, **({} if optimizer is None else {"optimizer": optimizer}))


def _variables(model: Any, optimizer: Any) -> list[Any]:
    """All existing variables. Reading the variables of an unbuilt model raises, so it has none here."""
    of_model = model.variables if getattr(model, "built", True) else []
    of_optimizer = [] if optimizer is None else optimizer.variables
    return [*of_model, *(of_optimizer() if callable(of_optimizer) else of_optimizer)]


def copies(model: Any, optimizer: Any, everything: bool) -> Weights:
    """Copies what must be equal on all ranks, and with `everything` the rest of the model and the optimizer."""
    built = getattr(model, "built", True)
    equal = [*model_state.dense_weights(model), *model_state.state_of(model)] if built else []
    compared = {id(variable) for variable in equal}
    rest = [v for v in _variables(model, optimizer) if id(v) not in compared] if everything else []
    copied = [[(variable.name, variable.numpy()) for variable in part] for part in (equal, rest)]
    return Weights(copied[0], copied[1], model_state.vocabularies(model))


def snapshot(save: str, model: keras.Model, optimizer: Any) -> dict[str, bytes]:
    """Returns the files of a tf.train.Checkpoint, {name: bytes}, so that training can go on."""
    # tf.train.Checkpoint writes to a path only. The ram:// file system keeps the files in memory.
    folder = f"ram://tf_fusedrec/{save}"
    with without_tables():
        _checkpoint(model, optimizer).write(f"{folder}/{PREFIX}")
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
        path = folder / name
        data = disk.read_whole(path)
        if len(data) != size:
            fault = "is truncated" if len(data) < size else "has too much"
            raise disk.refusal(path, f"{fault}: {len(data)} bytes, want {size}")
        if disk.checksum(data) != checksum:
            raise disk.refusal(path, "is damaged: it differs from its checksum")
    try:
        reader = tf.train.load_checkpoint(str(folder / PREFIX))
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise disk.refusal(folder / PREFIX, f"(.index, .data-*) holds unreadable weights: {error}") from error


def read(folder: pathlib.Path, model: keras.Model, optimizer: Any) -> None:
    """Restores the existing weights now and the rest when they are created, such as slots before the first step.

    Raises ValueError if shapes or dtypes differ. Some weights may be restored already.
    """
    try:
        with without_tables():
            status = _checkpoint(model, optimizer).read(str(folder / PREFIX))
        if optimizer is None:
            status.expect_partial()  # Otherwise TensorFlow would warn of each slot that nothing has read.
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ValueError(
            f"Dense weights of {folder} do not fit the model: {error}. Load them into the model that was saved."
        ) from error


State = list[tuple[Any, np.ndarray]]  # variables and copies of their values


def state(model: Any, optimizer: Any) -> State:
    """All existing variables, with copies of their values."""
    return [(variable, variable.numpy()) for variable in _variables(model, optimizer)]


def put_back(before: State) -> None:
    """Restores the values that `state` copied."""
    for variable, value in before:
        variable.assign(value)
