"""Tables in the lists of weights of Keras 3, by a variable that gives and takes the rows of its layer."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.tables.keras_savers import TableState


class Anchor(keras.Variable):
    """The weight of a FusedEmbedding. Keras reads it for get_weights, and assigns it for set_weights.

    Optimizers and checkpoints use its `value`.
    """

    def __init__(self, layer: Any, trainable: bool):
        self._layer = weakref.ref(layer)
        super().__init__("zeros", shape=(), dtype="float32", trainable=trainable, name="anchor")

    @property
    def _state(self) -> TableState | None:
        return getattr(self._layer(), "_table_state", None)

    def numpy(self) -> np.ndarray:
        return super().numpy() if self._state is None else self._state.in_weights()

    def assign(self, value: Any) -> Any:
        """As in Keras; restores the rows of get_weights. Raises ValueError for a number that has lost them."""
        if not isinstance(value, (np.ndarray, np.generic)):  # of an optimizer, such as Muon's weight decay
            return super().assign(value)
        rows = None if self._state is None else self._state.rows_in(value)
        assigned = super().assign(np.array(value))
        if rows is not None and self._state is not None:
            self._state.put_back(rows)
        return assigned


def make_anchor(layer: Any, *, trainable: bool) -> Anchor:
    """The weight of a FusedEmbedding."""
    with keras.name_scope(layer.name):
        return Anchor(layer, trainable)
