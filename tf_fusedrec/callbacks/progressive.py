"""Progressive (test-then-train) metrics: every batch is scored by weights that have not been trained on it.

The logits are those of the forward pass of the training step, so no second pass is needed (McMahan et al., "Ad Click
Prediction: a View from the Trenches", 2013, section 5.1). A model with dropout is scored with dropout. States are
summed over ranks, so the values equal the values of one process with all data.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.metrics.streaming import AUC, NormalizedEntropy, SummedMetric

KINDS = ("window", "cumulative", "epoch")
_LOG = logging.getLogger("tf_fusedrec.callbacks.progressive")


class ProgressiveMetrics(keras.callbacks.Callback):
    """AUC and normalized entropy (NE) of every task during training, by window of steps, by epoch and cumulative.

    The model calls `update` in its training step. All ranks must fit with the callback, which may serve several fits. A
    window also ends with an epoch; cumulative values cover the entire job.

    Scalars are named progressive/<task>_<auc or ne>_<kind>, at the step that ends the window. Those of kind "epoch"
    cover the epoch up to this step. Rank 0 also logs them in one line (logger "tf_fusedrec.callbacks.progressive",
    level INFO). The logs of an epoch have them with "_" for "/".

    Args:
      tasks: Names of the model's tasks.
      every_steps: Steps per window, >= 1.
      kinds: Values to report, some of KINDS.
      folder: Folder of rank 0's TensorBoard files; None writes none.
      first_step: Number of steps trained by an earlier job.

    Raises:
      ValueError: no task is named; every_steps is below 1; a kind is unknown.

    Examples:
      >>> progress = fr.callbacks.ProgressiveMetrics(["click"], every_steps=100)
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        every_steps: int = 100,
        kinds: Sequence[str] = ("window", "cumulative"),
        folder: str | os.PathLike | None = None,
        first_step: int = 0,
    ) -> None:
        super().__init__()
        if not tasks:
            raise ValueError("tasks must name at least one task of the model, got none.")
        if every_steps < 1:
            raise ValueError(f"every_steps must be >= 1, got {every_steps}.")
        if not kinds or set(kinds) - set(KINDS):
            raise ValueError(f"kinds must be some of {KINDS}, got {tuple(kinds)}.")
        self._metrics: dict[str, list[SummedMetric]] = {task: [AUC("auc"), NormalizedEntropy("ne")] for task in tasks}
        self._total: dict[str, np.ndarray] = {}  # by metric, its states summed over all ranks and steps
        self._epoch: dict[str, np.ndarray] = {}  # and over the steps of the epoch
        self._every, self._kinds, self._step = every_steps, tuple(kinds), first_step
        self._in_window = 0
        self._testing = False
        self._writer = None
        if folder is not None and collectives.rank() == 0:
            self._writer = tf.summary.create_file_writer(os.fspath(folder))
        self.latest: dict[str, float] = {}  # the scalars of the last window

    def update(self, labels: Mapping[str, tf.Tensor], logits: Mapping[str, tf.Tensor]) -> None:
        """Adds a batch. The training step of the model calls it.

        Args:
          labels: By task, <any>[n] of 0 and 1.
          logits: By task, <float>[n] log odds.
        """
        if self._testing:
            return  # Validation traces the model's loss, too.
        for task, metrics in self._metrics.items():
            for metric in metrics:
                metric.update_state(labels[task], tf.stop_gradient(logits[task]))

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = {}

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._step += 1
        self._in_window += 1
        if self._in_window == self._every:
            self._end_window()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._in_window:
            self._end_window()
        if logs is not None:
            logs.update({name.replace("/", "_"): value for name, value in self.latest.items()})

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._testing = True

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._testing = False

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _end_window(self) -> None:
        """Reports a window and begins the next one. Collective, after the same step on all ranks."""
        self._in_window = 0
        scalars: dict[str, float] = {}
        for task, metrics in self._metrics.items():
            for metric in metrics:
                name = f"progressive/{task}_{metric.name}"
                window = metric.summed_states()
                for sums in (self._epoch, self._total):
                    sums[name] = sums.get(name, 0) + window
                for kind, states in zip(KINDS, (window, self._total[name], self._epoch[name])):
                    if kind in self._kinds:
                        scalars[f"{name}_{kind}"] = metric.value_of_states(states)
                metric.reset_state()
        self.latest = scalars
        if collectives.rank() == 0:
            _LOG.info("step %d: %s", self._step, " ".join(f"{name} {value:.5f}" for name, value in scalars.items()))
        if self._writer is not None:
            with self._writer.as_default(step=self._step):
                for name, value in scalars.items():
                    tf.summary.scalar(name, value)
