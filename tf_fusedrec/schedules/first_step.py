"""Prepares the first step: makes the variables of the optimizer, and gives all ranks the same weights."""

from __future__ import annotations

from typing import Any

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.exchange import collectives, gradient_accumulation, model_state, weight_equality


def make_optimizer_slots(model: keras.Model) -> None:
    """Makes the variables that the optimizer's first step would make. Does nothing for a model without weights.

    TensorFlow traces a function twice if its first trace makes variables. A step of FrozenWindow(M) holds the model M
    times, so a second trace would take as long as M traces of another schedule.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if optimizer is None or not model.built:
        return
    if hasattr(optimizer, "_create_all_weights"):  # keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    else:
        optimizer.build(model.trainable_variables)
    gradient_accumulation.make_sums(optimizer, model.trainable_variables)


def start_equal(model: keras.Model) -> None:
    """Calls collectives.equal_start for the model's weights, its state and its optimizer's slots. Collective.

    collectives.distributed_optimizer does so for weights that the first step makes.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if optimizer is not None and model.built:
        weights = [*weight_equality.dense_weights(model), *weight_equality.state(model)]
        others = model_state.vocabularies(model)
        if collectives.equal_start([*weights, *optimizer.variables()], int(optimizer.iterations), others):
            model_state.finish_adapting(model)
            model.test_function = model.predict_function = None  # they may have traced the constants
