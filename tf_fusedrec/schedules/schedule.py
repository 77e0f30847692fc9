"""The base class of schedules, which lay out training steps in time."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf


class Schedule(abc.ABC):
    """A record that lays out a training step in time. It keeps no state, so models may share one.

    A schedule of single batches overrides `train_step`. A schedule that works on coming batches while one computes also
    sets `looks_ahead` and overrides `start` and `step`. Its unfinished work passes from step to step as `state`.
    registry.py gives a user's own schedule a name, under which models are saved.
    """

    @property
    def looks_ahead(self) -> bool:
        """True if the schedule has a `start` and a `step`."""
        return False

    @property
    def lead(self) -> int:
        """Number of batches, >= 1, that are read before the first one computes. Reading stays that far ahead."""
        return 1

    def check(self, model: Any) -> None:  # noqa: B027, because most schedules refuse nothing
        """Checks that the tables of a model can be trained under this schedule. Called when a model gets the schedule.

        A subclassed model may not have made its layers by then, so `compile` checks it again.

        Raises:
          ValueError: the tables cannot be trained under it.
        """

    @abc.abstractmethod
    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        """One training step of one batch, traced once per signature of the batch; collective.

        Args:
          model: The PipelinedModel.
          data: A batch as `model.fit` gives it: x, (x, y) or (x, y, sample_weight).

        Returns:
          The logs, as keras.Model.train_step.

        Raises:
          ValueError: the model cannot be trained under this schedule.
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor, JSON-able."""

    def start(self, model: Any, batches: Sequence[Any]) -> Any:
        """Begins the work on the first batches of an iterator. Traced, collective.

        Args:
          model: The PipelinedModel.
          batches: The first `lead` batches.

        Returns:
          The state for the first `step`: any structure of tensors and constants.
        """
        return ()

    def step(self, model: Any, batches: Sequence[Any], state: Any) -> tuple[dict[str, tf.Tensor], Any]:
        """Trains batches[0], and meanwhile works on coming batches. Traced, collective.

        Trains by `model.train_step`, which a subclass of the model may override.

        Args:
          model: The PipelinedModel.
          batches: `lead` + 1 batches. The first one computes. Empty batches follow the last one of the data.
          state: The state that the step before, or `start`, returned.

        Returns:
          The logs, and the state for the next step, made of the same tensors every time.
        """
        return model.train_step(batches[0]), ()

    def drain(self, model: Any, state: Any) -> Any:
        """Makes the updates that wait in `state`. Returns the state to go on with. Traced, collective.

        Called before evaluation, saves and checkpoints, and at the end of fit.
        """
        return state
