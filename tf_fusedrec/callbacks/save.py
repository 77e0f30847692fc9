"""A Keras callback that saves checkpoints while a job trains. Collective: all ranks fit with the same list."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_fusedrec import checkpoint
from tf_fusedrec._tf_compat import keras
from tf_fusedrec.checkpoint.agreement import agree
from tf_fusedrec.checkpoint.layers import finds_layers
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives


class Checkpoint(keras.callbacks.Callback):
    """Writes a checkpoint at the end of every epoch, inside epochs if asked, and when training is stopped inside one.

    Its `extra` is the caller's, with "epoch" and "step": where to go on. They are (e + 1, 0) at the end of
    epoch e, and (e, n) after n steps of epoch e. Where steps read data that are a function of (epoch, step), and draw
    random numbers from state that the checkpoint holds, a job that was killed at any moment and goes on from its last
    checkpoint ends with the weights of one that was not, bit by bit:

        checkpoint = Checkpoint(directory, steps, extra={}, every_steps=1000)
        epoch, step = checkpoint.restore(model)  # (0, 0) at the first start
        if step:  # Keras knows one number of steps for all epochs: the rest of this one gets a fit of its own
            model.fit(batches(epoch).skip(step), initial_epoch=epoch, epochs=epoch + 1, steps_per_epoch=steps - step,
                      callbacks=[checkpoint])
            epoch += 1
        model.fit(batches(epoch), initial_epoch=epoch, epochs=epochs, steps_per_epoch=steps, callbacks=[checkpoint])

    Args:
      directory: where, on a file system that all ranks see.
      steps_per_epoch: of the whole epoch.
      extra: JSON-able; saved with every checkpoint.
      first_step: steps of the first epoch that were done before (a resumed job); `restore` sets it. Below 0 when
        what is left of the epoch takes more steps than an epoch has.
      every_steps: steps of an epoch between two saves inside it; 0 saves at its end only.
      full_every: every so many saves hold all rows, those between them what has changed (checkpoint.Checkpointer).
      keep: saves that stay, the last one included.
      not_finite: what becomes of a save with a number that is not finite: "refuse" ends training, "skip" logs an error
        and goes on, "save" writes it (checkpoint.Checkpointer).
      background: writes while training goes on, from a copy in memory of all rows that are saved.
      input_position: takes an epoch and its trained steps, gives where the input stands then, JSON-able and the same on
        all ranks (TokenBatches.position of tf_fusedrec.data); saved as "input" of `extra`.
      layers: FusedEmbedding layers that are trained and that the model does not hold; its own are found.
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
        """Loads the checkpoint if there is one. All ranks call it, before fit.

        Args:
          model: that will be fitted.
          save: which of the saves that are kept, by name or number (checkpoint.saves); None: the last one.

        Returns:
          The epoch, and the step in it, to go on from.

        Raises:
          ValueError, RuntimeError: as checkpoint.load; a checkpoint that this callback did not write.
        """
        # Rank 0 decides for all: the file may appear between the looks of two ranks.
        if save is None and not collectives.all_gather_object(checkpoint.exists(self.directory))[0]:
            return 0, 0
        extra = agree(lambda: checkpoint.read_manifest(self.directory, save)["extra"])
        if not isinstance(extra, dict) or not all(isinstance(extra.get(name), int) for name in ("epoch", "step")):
            raise ValueError(
                f"extra of checkpoint {os.fspath(self.directory)} must hold the epoch and step to go on from, got "
                f"{extra!r}: callbacks.Checkpoint did not write it. Load it with tf_fusedrec.checkpoint.load."
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
        self._step = self._first_step + batch + 1  # several steps of one execution end together
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
        done: dict[str, Any] = {"epoch": self._epoch, "step": self._step}
        if self._step >= self._steps_per_epoch:
            done = {"epoch": self._epoch + 1, "step": 0}
        if self._input_position is not None:
            # Of the steps that were trained: the input itself has been read further ahead.
            done["input"] = self._input_position(done["epoch"], done["step"])
        assert self._checkpointer is not None
        self._checkpointer.save({**self._extra, **done})
        self._saved_step = self._step
