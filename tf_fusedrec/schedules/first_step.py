"""Before the first step: the optimizer's slots, and the same weights on all ranks."""

from __future__ import annotations

from typing import Any

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.exchange import collectives, weight_equality


def make_optimizer_slots(model: keras.Model) -> None:
    """Makes the variables of the model's optimizer that its first step would make; does nothing where they are there.

    A function whose first trace makes variables is traced a second time.
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


def start_equal(model: keras.Model) -> None:
    """collectives.equal_start of the model's dense weights and its optimizer's slots, where they are there. Collective.

    Weights that the first step makes are left to collectives.distributed_optimizer.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if optimizer is not None and model.built:
        collectives.equal_start(
            [*weight_equality.dense_weights(model), *optimizer.variables()], int(optimizer.iterations)
        )
