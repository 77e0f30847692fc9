"""A Keras callback that saves checkpoints during training. Collective: all ranks fit with the same list."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_fusedrec import checkpoint
from tf_fusedrec._tf_compat import keras
from tf_fusedrec.checkpoint.consensus import agree
from tf_fusedrec.checkpoint.layers import finds_layers
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives


class Checkpoint(keras.callbacks.Callback):
    """Writes a checkpoint at the end of every epoch, after every `every_steps` steps, and when training is stopped.

    The saved `extra` is the caller's plus "epoch" and "step", the position to resume from. The position is (e + 1, 0)
    at the end of epoch e, and (e, n) after n steps of epoch e.

    A killed job that resumes from its last checkpoint ends with bit-identical weights under two conditions. The data
    must be a function of (epoch, step), and random numbers must come from state in the checkpoint:

        checkpoint = Checkpoint(directory, steps, extra={}, every_steps=1000)
        epoch, step = checkpoint.restore(model)  # (0, 0) at the first start
        if step:  # One fit has the same number of steps in all epochs, so the rest of this epoch needs its own fit.
            model.fit(batches(epoch).skip(step), initial_epoch=epoch, epochs=epoch + 1, steps_per_epoch=steps - step,
                      callbacks=[checkpoint])
            epoch += 1
        model.fit(batches(epoch), initial_epoch=epoch, epochs=epochs, steps_per_epoch=steps, callbacks=[checkpoint])

    Args:
      directory: Folder of the checkpoint, on a file system that all ranks see.
      steps_per_epoch: Number of steps of a whole epoch.
      extra: JSON-serializable dict, saved with every checkpoint.
      first_step: Steps of the first epoch that an earlier job trained; `restore` sets it. It is negative if the rest
        of the epoch takes more steps than a whole epoch.
      every_steps: Steps between two saves inside an epoch; 0 saves at the end of epochs only.
      full_every: Number of saves from one full save to the next; the others are deltas (checkpoint.Checkpointer).
      keep: Number of saves to keep, including the last one.
      not_finite: Policy for a save with a NaN or infinite number: "refuse" ends training, "skip" logs an error and goes
        on, "save" writes it (checkpoint.Checkpointer).
      background: True if a thread writes during training, from a copy in memory of all rows to save.
      input_position: Function from an epoch and its trained steps to the position of the input. The position is
        JSON-serializable and the same on all ranks (TokenBatches.position); it is saved as "input" in `extra`.
      layers: Trained FusedEmbedding layers outside the model.
    """

    @finds_layers(2)
    def __init__(
        self,
        directory: str | os.PathLike,
        steps_per_epoch: int,
        extra: Mapping[str, Any],
        first_step: int = 0,
        *,
        every_steps: int = 0,
        full_every: int = 1,
        keep: int = 2,
        not_finite: str = "refuse",
        background: bool = True,
        input_position: Callable[[int, int], Any] | None = None,
        layers: Sequence[FusedEmbedding] = (),
    ):
        super().__init__()
        if every_steps < 0:
            raise ValueError(f"every_steps must be >= 0, got {every_steps}.")
        self.directory = directory
        self._layers = list(layers)
        self._steps_per_epoch = steps_per_epoch
        self._extra = dict(extra)
        self._every_steps = every_steps
        self._input_position = input_position
        self._options: dict[str, Any] = {
            "full_every": full_every, "keep": keep, "not_finite": not_finite, "background": background,
        }  # fmt: skip
        self._checkpointer: checkpoint.Checkpointer | None = None
        self._first_step = self._step = self._saved_step = first_step
        self._epoch = 0

    def restore(self, model: keras.Model, save: str | int | None = None) -> tuple[int, int]:
        """Loads the checkpoint if it exists. Collective; call it before fit.

        Args:
          model: Model to restore and then fit.
          save: Name or number of a kept save (checkpoint.saves); None: the last one.

        Returns:
          The epoch and its step to resume from.

        Raises:
          ValueError, RuntimeError: checkpoint.load refuses the checkpoint, or this callback did not write it.
        """
        # Rank 0 decides for all, because the file may appear between the checks of two ranks.
        if save is None and not collectives.all_gather_object(checkpoint.exists(self.directory))[0]:
            return 0, 0
        extra = agree(lambda: checkpoint.read_manifest(self.directory, save)["extra"])
        if not isinstance(extra, dict) or not all(isinstance(extra.get(name), int) for name in ("epoch", "step")):
            raise ValueError(
                f"extra of checkpoint {os.fspath(self.directory)} is {extra!r}, want the epoch and step to resume "
                "from: callbacks.Checkpoint did not write it. Load it with tf_fusedrec.checkpoint.load."
            )
        extra = checkpoint.load(self.directory, model, model.optimizer, save=save, layers=self._layers)
        self._first_step = self._step = self._saved_step = extra["step"]
        return extra["epoch"], extra["step"]

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._checkpointer is None:
            self._checkpointer = checkpoint.Checkpointer(
                self.directory, self.model, self.model.optimizer, layers=self._layers, **self._options
            )

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._step = self._first_step + batch + 1  # With steps_per_execution > 1 a call ends several steps.
        due = self._every_steps and self._step - self._saved_step >= self._every_steps
        if due and self._step < self._steps_per_epoch:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._save()
        self._first_step = self._step = self._saved_step = 0

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def _save(self) -> None:
        position: dict[str, Any] = {"epoch": self._epoch, "step": self._step}
        if self._step >= self._steps_per_epoch:
            position = {"epoch": self._epoch + 1, "step": 0}
        if self._input_position is not None:
            # The position counts trained steps, because the input itself is read ahead.
            position["input"] = self._input_position(position["epoch"], position["step"])
        assert self._checkpointer is not None
        self._checkpointer.save({**self._extra, **position})
        self._saved_step = self._step
