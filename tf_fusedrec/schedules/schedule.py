"""What a schedule is: how a model and the batches of a data set become training steps."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf


class Schedule(abc.ABC):
    """A record of how a training step is laid out in time. It keeps no state: many models may share one.

    A schedule of single batches says what `train_step` does. One that works on coming batches while one computes also
    sets `looks_ahead` and says `start` and `step`; what it has begun passes from step to step as `state`.
    """

    @property
    def looks_ahead(self) -> bool:
        """Whether the schedule has a `start` and a `step`."""
        return False

    @property
    def lead(self) -> int:
        """Batches that are read before the first one computes, >= 1; so many are ahead of the one that computes."""
        return 1

    def check(self, model: Any) -> None:  # noqa: B027, because most schedules refuse nothing
        """Checks that the tables of a model can be trained under this schedule; called when the two meet.

        A subclassed model may not have made its layers by then; it is checked again when it is compiled.

        Raises:
          ValueError: they cannot.
        """

    @abc.abstractmethod
    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        """One training step of one batch, traced once per signature of the batch; collective.

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

    def start(self, model: Any, batches: Sequence[Any]) -> Any:
        """Begins the work on the first batches of an iterator; traced, collective.

        Args:
          model: the PipelinedModel.
          batches: the first `lead` ones.

        Returns:
          Any structure of tensors and constants, for the first `step`.
        """
        return ()

    def step(self, model: Any, batches: Sequence[Any], state: Any) -> tuple[dict[str, tf.Tensor], Any]:
        """One training step of batches[0], and the work on coming batches that goes on meanwhile; traced, collective.

        Trains by `model.train_step`, which a subclass may have made its own.

        Args:
          model: the PipelinedModel.
          batches: `lead` + 1: the one that computes, and those behind it. After the last one come empty batches.
          state: of the step before, or of `start`.

        Returns:
          The logs, and the state for the next step, made of the same tensors every time.
        """
        return model.train_step(batches[0]), ()

    def drain(self, model: Any, state: Any) -> Any:
        """Ends what would change weights or tables if it were left undone; training may go on with the state returned.

        Traced, collective; called before weights or tables are read: evaluation, saves, checkpoints, the end of fit.
        """
        return state
