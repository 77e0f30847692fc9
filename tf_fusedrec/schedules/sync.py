"""The reference schedule: ids, rows, compute, gradients and update run one after another."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.schedules.registry import register
from tf_fusedrec.schedules.schedule import Schedule


@register("sync")
@dataclasses.dataclass(frozen=True)
class Sync(Schedule):
    """The training step of keras.Model on whole batches. Other schedules are compared to it."""

    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        return keras.Model.train_step(model, data)

    def get_config(self) -> dict[str, Any]:
        return {}
