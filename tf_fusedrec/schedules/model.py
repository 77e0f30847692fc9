"""PipelinedModel: a Keras model whose training step is laid out by a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.schedules.frozen_window import FrozenWindow
from tf_fusedrec.schedules.micro_batch import WHOLE, MicroBatch, num_samples
from tf_fusedrec.schedules.schedule import Schedule
from tf_fusedrec.schedules.sync import Sync

_KINDS = {"sync": Sync, "frozen_window": FrozenWindow}


class PipelinedModel(keras.Model):
    """A keras.Model with one argument more; compile, fit, callbacks, evaluate and predict are Keras' own.

    Functional, `PipelinedModel(inputs, outputs, schedule=FrozenWindow(4))`, or subclassed with a `call`; a subclass
    passes `schedule` on. The schedule may be set anew between runs of `compile`.

    Args:
      schedule: "sync", the default, or a record of tf_fusedrec.schedules.
      others: as those of keras.Model.

    Raises:
      ValueError: an unknown schedule; inputs and outputs given to a subclass.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> PipelinedModel:
        # keras.Model turns into a functional model by itself. Its subclasses do so by a change of their base classes,
        # after which the class is good for functional models only; hence a class of its own.
        if cls is PipelinedModel and _is_functional(args, kwargs):
            cls = FunctionalPipelinedModel
        return super().__new__(cls)

    def __init__(self, *args: Any, schedule: Schedule | str = "sync", **kwargs: Any):
        if _is_functional(args, kwargs) and not isinstance(self, FunctionalPipelinedModel):
            raise ValueError(
                f"{type(self).__name__} is a subclass of PipelinedModel and cannot be given inputs and outputs. "
                "Remedy: PipelinedModel(inputs, outputs, schedule=...) itself, or a subclass with a call method."
            )
        super().__init__(*args, **kwargs)
        self.schedule = schedule

    @property
    def schedule(self) -> Schedule:
        """The schedule of training steps that are traced from now on."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule | str) -> None:
        if schedule == "sync":
            schedule = Sync()
        if not isinstance(schedule, Schedule):
            raise ValueError(f"schedule must be 'sync' or a record of tf_fusedrec.schedules, got {schedule!r}.")
        self._schedule = schedule

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        return self.schedule.train_step(self, data)

    def loss_shares(self, pieces: Sequence[Any]) -> tf.Tensor:
        """What part of the batch's loss each micro-batch makes; override where the loss is no mean over samples.

        Args:
          pieces: M micro-batches, each as `data` of train_step.

        Returns:
          <float32>[M] with sum 1, or zeros for a batch of nothing: loss of batch = sum of share * loss of micro-batch.
        """
        samples = tf.cast(tf.stack([num_samples(piece) for piece in pieces]), tf.float32)
        return tf.math.divide_no_nan(samples, tf.reduce_sum(samples))

    @property
    def micro_batch(self) -> MicroBatch:
        """What the model works on now, for a compute_loss or call that wants to know. Whole batches are piece 0."""
        return self.__dict__.get("_micro_batch", WHOLE)

    @contextlib.contextmanager
    def working_on(self, micro_batch: MicroBatch) -> Iterator[None]:
        """For schedules: sets `micro_batch` inside."""
        # Past Keras' __setattr__, which would track the tuple.
        self.__dict__["_micro_batch"] = micro_batch
        try:
            yield
        finally:
            del self.__dict__["_micro_batch"]


@keras.saving.register_keras_serializable("tf_fusedrec")
class FunctionalPipelinedModel(PipelinedModel, keras.Sequential.__base__):
    """A PipelinedModel of inputs and outputs. Made by PipelinedModel(inputs, outputs); saved and restored by Keras."""

    # Keras keeps the layers in the config of models only whose constructor has these arguments, by these names.
    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, trainable: bool = True, **kwargs: Any):
        super().__init__(inputs, outputs, name=name, trainable=trainable, **kwargs)

    def get_config(self) -> dict[str, Any]:
        kind = next(name for name, kind in _KINDS.items() if type(self.schedule) is kind)
        return {**super().get_config(), "schedule": {"kind": kind, **self.schedule.get_config()}}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> FunctionalPipelinedModel:
        config = dict(config)
        schedule = dict(config.pop("schedule"))
        model = super().from_config(config, custom_objects)
        model.schedule = _KINDS[schedule.pop("kind")](**schedule)
        return model


def _is_functional(args: tuple, kwargs: dict[str, Any]) -> bool:
    return len(args) >= 2 or "outputs" in kwargs
