"""Optimizer slots before the first step: a function whose first trace makes variables is traced a second time."""

from __future__ import annotations

from typing import Any

from tf_fusedrec._tf_compat import keras


def make_slots(model: keras.Model) -> None:
    """Makes the variables of the model's optimizer that its first step would make; does nothing where they are there.

    A step of FrozenWindow(M) holds the model M times, so that a second trace would take as long as M steps of others.
    A model that has no weights yet, or no optimizer, is left as it is.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if optimizer is None or not model.built:
        return
    if hasattr(optimizer, "_create_all_weights"):  # of Keras 2.10 and before, still there as keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    else:
        optimizer.build(model.trainable_variables)
