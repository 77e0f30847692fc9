"""Keras callbacks of a training job on several ranks: checkpoints, speed, interruption.

Every callback here talks to the other ranks, so all ranks must fit with the same list. The order that works:
Interrupt, Checkpoint, Throughput, then those of Keras (TensorBoard, on rank 0).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np

from tf_fusedrec import checkpoint, collectives
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint.agreement import agree
from tf_fusedrec.checkpoint.layers import finds_layers
from tf_fusedrec.embedding import FusedEmbedding


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


class Throughput(keras.callbacks.Callback):
    """Measures how much all ranks train per second, without the first step (it traces the graph) and without what
    happens between epochs. The model must have metrics that count since the epoch began; `counts` names them.

    After every epoch the logs hold "<name>_per_s". `rates` has the figures of the whole training.
    """

    def __init__(self, counts: Sequence[str] = ("samples", "tokens")):
        super().__init__()
        self._counts = tuple(counts)
        self._total = np.zeros(len(self._counts))
        self._seconds = 0.0
        self._warm = False
        self._begin = 0.0
        self._before = np.zeros(len(self._counts))
        self._latest = np.zeros(len(self._counts))
        self._now = 0.0

    @property
    def rates(self) -> dict[str, float]:
        """{"<name>_per_s": of all ranks}, by the slowest rank's clock; nan when nothing was timed. Collective."""
        return self._rates(self._total, self._seconds)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._begin = self._now = time.perf_counter()
        self._before = self._latest = np.zeros(len(self._counts))

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        logs = logs or {}
        missing = [name for name in self._counts if name not in logs]
        if missing:
            raise ValueError(
                f"Throughput counts {list(self._counts)}, but the model has no metric {missing[0]!r}; "
                f"it has {sorted(logs)}. Add a keras.metrics.Sum of that name, or name others."
            )
        self._now = time.perf_counter()
        self._latest = np.array([float(logs[name]) for name in self._counts])
        if not self._warm:
            self._warm = True
            self._begin, self._before = self._now, self._latest

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        done, seconds = self._latest - self._before, self._now - self._begin
        self._total = self._total + done
        self._seconds += seconds
        rates = self._rates(done, seconds)
        if logs is not None:
            logs.update(rates)

    def _rates(self, done: np.ndarray, seconds: float) -> dict[str, float]:
        ranks = collectives.all_gather(np.append(done, seconds)[np.newaxis])
        slowest = ranks[:, -1].max()
        total = ranks[:, :-1].sum(axis=0)
        return {
            f"{name}_per_s": float(count / slowest) if slowest > 0 else float("nan")
            for name, count in zip(self._counts, total)
        }


class Interrupt(keras.callbacks.Callback):
    """Ends training on all ranks after the same step when any rank gets SIGINT (Ctrl-C) or SIGTERM.

    Ranks agree by an all-reduced flag after every step. Put it before Checkpoint, which then saves where training
    stopped. The handlers that stood before come back when training ends; a second signal goes to them at once.

    After fit, `signal_name` is None or the name of the signal ("another rank's signal" where it came elsewhere).
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        super().__init__()
        self.signal_name: str | None = None
        self._received: str | None = None
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._handlers = {number: signal.signal(number, self._note) for number in self.SIGNALS}

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._restore()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        flag = tf.constant(0 if self._received is None else 1, tf.int32)
        if int(collectives.all_reduce_sum(flag, name="fusedrec.interrupt")) > 0:
            self.signal_name = self._received or "another rank's signal"
            self.model.stop_training = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
