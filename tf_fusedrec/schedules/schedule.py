"""What a schedule is: how a model and a batch become one training step."""

from __future__ import annotations

import abc
from typing import Any

from tf_fusedrec._tf_compat import tf


class Schedule(abc.ABC):
    """A record of how a training step is laid out in time. It keeps no state: many models may share one."""

    @abc.abstractmethod
    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        """One training step, traced once per signature of the batch; collective.

        Args:
          model: the PipelinedModel.
          data: a batch as `model.fit` gives it: x, (x, y) or (x, y, sample_weight).

        Returns:
          The logs, as keras.Model.train_step does.

        Raises:
          ValueError: the model cannot be trained under this schedule; the message says what it lacks.
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor, JSON-able."""
