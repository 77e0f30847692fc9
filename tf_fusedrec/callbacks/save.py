"""A Keras callback that saves checkpoints during training. Collective: all ranks fit with the same list."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from logging import getLogger
from typing import Any

from tf_fusedrec import checkpoint
from tf_fusedrec._tf_compat import keras
from tf_fusedrec.callbacks.stopping import higher_is_better, mean_over_ranks
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.collectives import agree
from tf_fusedrec.files.manifest import exists
from tf_fusedrec.files.saves import read_manifest


class Checkpoint(keras.callbacks.Callback):
    """Writes a checkpoint at the end of every epoch, after every `every_steps` steps, and when training is stopped.

    The saved `extra` is the caller's plus "epoch" and "step", the position to resume from. The position is (e + 1, 0)
    at the end of epoch e, and (e, n) after n steps of epoch e.

    A killed job that resumes from its last checkpoint ends with bit-identical weights under two conditions. The data
    must be a function of (epoch, step), and random numbers must depend on state in the checkpoint:

        checkpoint = Checkpoint(folder, every_steps=1000)
        epoch, step = checkpoint.load(model)  # (0, 0) at the first start
        if step:  # One fit has the same number of steps in all epochs, so the rest of this epoch needs its own fit.
            model.fit(batches(epoch).skip(step), initial_epoch=epoch, epochs=epoch + 1, steps_per_epoch=steps - step,
                      callbacks=[checkpoint])
            epoch += 1
        model.fit(batches(epoch), initial_epoch=epoch, epochs=epochs, steps_per_epoch=steps, callbacks=[checkpoint])

    Args:
      folder: Folder of the checkpoint, on a file system that all ranks see.
      steps_per_epoch: Number of steps of a full epoch; None: Keras' number in fit. Where Keras does not know it, an
        epoch is full unless it ends with model.stop_training.
      extra: JSON-serializable dict, saved with every checkpoint.
      first_step: Steps of the first epoch that an earlier job trained; `load` sets it. It is negative if the rest
        of the epoch takes more steps than a full epoch.
      every_steps: Steps between two saves inside an epoch; 0 saves at the end of epochs only.
      full_every: Number of saves from one full save to the next; the others are deltas (checkpoint.Checkpointer).
      keep: Number of saves to keep, including the last one.
      not_finite: Policy for a save with a NaN or infinite number: "refuse" ends training, "skip" logs an error and goes
        on, "save" writes it (checkpoint.Checkpointer).
      background: True if a thread writes during training, from a copy in memory of all rows to save.
      input_position: Function from an epoch and its trained steps to the position of the input. The position is
        JSON-serializable and the same on all ranks (TokenBatches.position); it is saved as "input" in `extra`.
      layers: Trained FusedEmbedding layers outside the model.
      save_best: True to keep the save of the best epoch in addition to the last `keep` ones, until an epoch is better.
        `load(model, save="best")` and checkpoint.load(..., save="best") load it. The `extra` of this save and of all
        later ones has "best": {"monitor", "value", "epoch"}.
      restore_best: True to load that save when training ends, dense weights, optimizer and tables. Needs save_best.
      monitor: Name of the metric in the logs that decides, by its mean over the ranks that measured it.
      mode: "min", "max", or "auto" by the name, such as "max" for auc and "min" for loss.

    Attributes:
      best: {"monitor", "value", "epoch"} of the best save; None before the first. `load` sets it.

    Raises:
      ValueError: an argument is out of range; mode "auto" does not know the metric; in fit, no rank logs `monitor`.

    Examples:
      >>> callbacks = [fr.callbacks.Interrupt(), fr.callbacks.Checkpoint("every_epoch"), fr.callbacks.Throughput()]
      >>> callbacks += [fr.callbacks.EmbeddingMetrics(embedding), fr.callbacks.EarlyStopping("loss", patience=2)]
      >>> history = model.fit(x, y, batch_size=16, callbacks=callbacks, verbose=0).history
      >>> "table_rows" in history, "loss" in history
      (True, True)
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        steps_per_epoch: int | None = None,
        extra: Mapping[str, Any] | None = None,
        first_step: int = 0,
        *,
        every_steps: int = 0,
        full_every: int = 1,
        keep: int = 2,
        not_finite: str = "refuse",
        background: bool = True,
        input_position: Callable[[int, int], Any] | None = None,
        layers: Sequence[FusedEmbedding] = (),
        save_best: bool = False,
        restore_best: bool = False,
        monitor: str = "val_loss",
        mode: str = "auto",
    ):
        super().__init__()
        if steps_per_epoch is not None and not isinstance(steps_per_epoch, int):
            raise TypeError(
                f"steps_per_epoch must be an int or None, got {steps_per_epoch!r}. Use layers=[...] for layers."
            )
        if every_steps < 0:
            raise ValueError(f"every_steps must be >= 0, got {every_steps}.")
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}.")
        if restore_best and not save_best:
            raise ValueError("restore_best=True needs save_best=True, which keeps the best epoch.")
        higher = higher_is_better(monitor) if mode == "auto" else mode == "max"
        if save_best and higher is None:
            raise ValueError(f"mode 'auto' does not know the metric {monitor!r}. Use mode='min' or mode='max'.")
        self._monitor, self._higher = monitor, higher
        self._save_best, self._restore_best = save_best, restore_best
        self.best: dict[str, Any] | None = None
        self.folder = folder
        self._layers = list(layers)
        self._steps_per_epoch = steps_per_epoch
        self._steps: int | None = steps_per_epoch  # of the present epoch
        self._extra = dict(extra or {})
        self._every_steps = every_steps
        self._input_position = input_position
        self._options: dict[str, Any] = {
            "full_every": full_every, "keep": keep, "not_finite": not_finite, "background": background,
        }  # fmt: skip
        self._checkpointer: checkpoint.Checkpointer | None = None
        self._first_step = self._step = self._saved_step = first_step
        self._epoch = 0
        self._resumes = False

    def load(self, model: keras.Model, save: str | int | None = None) -> tuple[int, int]:
        """Loads the checkpoint if it exists. Collective; call it before fit.

        Args:
          model: Model to load and then fit.
          save: Name or number of a kept save (checkpoint.saves), or "best"; None: the last one.

        Returns:
          The epoch and its step to resume from.

        Raises:
          ValueError, RuntimeError: checkpoint.load refuses the checkpoint, or this callback did not write it.
        """
        # Rank 0 decides for all, because the file may appear between the checks of two ranks.
        if save is None and not collectives.all_gather_object(exists(self.folder))[0]:
            return 0, 0
        extra = agree(lambda: read_manifest(self.folder, save)["extra"])
        if not isinstance(extra, dict) or not all(isinstance(extra.get(name), int) for name in ("epoch", "step")):
            raise ValueError(
                f"extra of checkpoint {os.fspath(self.folder)} is {extra!r}, want the epoch and step to resume "
                "from: callbacks.Checkpoint did not write it. Use tf_fusedrec.checkpoint.load."
            )
        extra = checkpoint.load(self.folder, model, model.optimizer, save=save, layers=self._layers)
        self._first_step = self._step = self._saved_step = extra["step"]
        self._resumes = True
        best = extra.get("best")
        self.best = best if best is not None and best["monitor"] == self._monitor else None
        return extra["epoch"], extra["step"]

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._checkpointer is None:
            resumes = self._resumes or int(getattr(self.model.optimizer, "iterations", 0)) > 0
            if not resumes and collectives.rank() == 0 and exists(self.folder):
                getLogger(__name__).warning(
                    "%s holds a checkpoint, which this training will replace. Use Checkpoint.load(model) before fit to "
                    "resume it, or another folder.", os.fspath(self.folder),
                )  # fmt: skip
            self._checkpointer = checkpoint.Checkpointer(
                self.folder, self.model, self.model.optimizer, layers=self._layers, **self._options
            )

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self._steps_per_epoch is None:
            steps = (self.params or {}).get("steps")
            self._steps = None if steps is None else self._first_step + steps

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._step = self._first_step + batch + 1  # With steps_per_execution > 1 a call ends several steps.
        due = self._every_steps and self._step - self._saved_step >= self._every_steps
        if due and (self._steps is None or self._step < self._steps):
            self._save(is_full=False)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        is_full = not self.model.stop_training if self._steps is None else self._step >= self._steps
        self._save(is_full=is_full, best=self._save_best and self._is_best(epoch, logs))
        self._first_step = self._step = self._saved_step = 0

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if self._restore_best and self.best is not None:
            checkpoint.load(self.folder, self.model, self.model.optimizer, save="best", layers=self._layers)

    def _is_best(self, epoch: int, logs: Mapping[str, Any] | None) -> bool:
        """Whether this epoch is better than all before, the same on all ranks. Collective."""
        value = mean_over_ranks(logs, self._monitor).get(self._monitor, math.nan)
        # A signal may have stopped the epoch before its evaluation.
        if self._monitor not in (logs or {}) and math.isnan(value) and not self.model.stop_training:
            message = f"monitor {self._monitor!r} is not among the logs {sorted(logs or {})} of epoch {epoch + 1}"
            if not self._monitor.startswith("val_"):  # fit may validate in some epochs only
                raise ValueError(f"{message}. Use one of them.")
            getLogger(__name__).warning("%s, so it cannot be the best epoch.", message)
        before = (-math.inf if self._higher else math.inf) if self.best is None else self.best["value"]
        better = value > before if self._higher else value < before
        if better:
            self.best = {"monitor": self._monitor, "value": float(value), "epoch": epoch}
        return better

    def _save(self, *, is_full: bool, best: bool = False) -> None:
        position: dict[str, Any] = {"epoch": self._epoch, "step": self._step}
        if is_full:
            position = {"epoch": self._epoch + 1, "step": 0}
        if self.best is not None:
            position["best"] = self.best
        if self._input_position is not None:
            # The position counts trained steps, because the input itself is read ahead.
            position["input"] = self._input_position(position["epoch"], position["step"])
        assert self._checkpointer is not None
        self._checkpointer.save({**self._extra, **position}, best=best)
        self._saved_step = self._step
