"""tf_keras' own savers refuse tables that they would lose, or keep them. Keras 3 has public ways for all of it.

These functions read a layer's variables or its call, and call no method of the layer that could raise. Lists of weights
bypass the methods of the layers, and a fit of any model begins with its callbacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, keras_api
from tf_fusedrec.tables.keras_savers import TableState, refuse_fit, refuse_scale, states_of


def _guard(
    module: Any,
    name: str,
    model_at: int,
    refuse: Callable[[TableState], None],
    applies: Callable[..., bool] = lambda *arguments, **options: True,
) -> None:
    """Makes a writer or reader of Keras refuse tables where `applies`. Its argument `model_at` is the model."""
    write = getattr(module, name)

    @functools.wraps(write)
    def guarded(*arguments: Any, **options: Any) -> None:
        if applies(*arguments, **options):
            for state in states_of(arguments[model_at]):
                refuse(state)
        write(*arguments, **options)

    setattr(module, name, guarded)


def _writes_hdf5(model: Any, filepath: Any, overwrite: bool = True, save_format: str | None = None, **_: Any) -> bool:
    if save_format is None:
        return keras_api.is_hdf5(str(filepath))
    return save_format.lower().strip() in ("hdf5", "h5", "keras")


def _names_layer_with_tables(file: Any, model: Any, *_: Any, **__: Any) -> bool:
    names = _hdf5.load_attributes_from_hdf5_group(file, "layer_names")
    return any(layer.name in names and any(states_of(layer)) for layer in model.layers)


# Writers of files raise before they open the file, which would truncate an existing file.
_hdf5, _archive, _files = (
    keras.src.saving.legacy.hdf5_format, keras.src.export.export_lib, keras.src.saving.legacy.save
)  # fmt: skip
_guard(_hdf5, "save_weights_to_hdf5_group", 1, TableState.refuse_hdf5)
_guard(_hdf5, "save_model_to_hdf5", 0, TableState.refuse_hdf5)
_guard(_hdf5, "load_weights_from_hdf5_group", 1, TableState.refuse_hdf5)
_guard(_hdf5, "load_weights_from_hdf5_group_by_name", 1, TableState.refuse_hdf5, _names_layer_with_tables)
_guard(_files, "save_weights", 0, TableState.refuse_hdf5, _writes_hdf5)
_guard(_archive, "export_model", 0, TableState.refuse_saved_model)


def make_anchor(layer: Any, *, trainable: bool) -> Any:
    """The weight of a FusedEmbedding."""
    return layer.add_weight(name="anchor", shape=(), initializer="zeros", dtype="float32", trainable=trainable)


_keras_get, _keras_set = keras.layers.Layer.get_weights, keras.layers.Layer.set_weights
_begin_fit = keras.callbacks.CallbackList.on_train_begin


def _get_weights(self: Any) -> list[np.ndarray]:
    """As in Keras; with one process, the number of a FusedEmbedding's anchor has a copy of its rows."""
    values = _keras_get(self)
    for state in states_of(self):
        if (at := state.position_in(self.weights)) is not None:
            values[at] = state.in_weights()
    return values


def _set_weights(self: Any, weights: Sequence[Any]) -> None:
    """As in Keras; restores the rows of such a list. Raises ValueError for a list that has lost them."""
    places = sum(getattr(weight, "num_tensors", 1) for weight in self.weights)
    states = [(state, state.position_in(self.weights)) for state in states_of(self) if len(weights) == places]
    rows = [(state, state.rows_in(weights[at])) for state, at in states if at is not None]
    _keras_set(self, weights)
    for state, copy in rows:
        if copy is not None:
            state.put_back(copy)


def _on_train_begin(self: Any, logs: Any = None) -> None:
    if isinstance(self.model, keras.Model):
        refuse_fit(self.model, self.callbacks)
        # A train_step of one's own may take the scale off.
        scaled = isinstance(getattr(self.model, "optimizer", None), keras.mixed_precision.LossScaleOptimizer)
        if scaled and type(self.model).train_step is keras.Model.train_step:
            for state in states_of(self.model):
                refuse_scale(state.names(), "a LossScaleOptimizer")
    _begin_fit(self, logs)


keras.layers.Layer.get_weights, keras.layers.Layer.set_weights = _get_weights, _set_weights
keras.callbacks.CallbackList.on_train_begin = _on_train_begin
