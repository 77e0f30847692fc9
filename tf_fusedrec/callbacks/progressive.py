"""Progressive (test-then-train) metrics: every batch is scored by the weights that have not yet seen it.

The logits are those of the training step's own forward pass, which computes them before the update, as McMahan et al.
do ("Ad Click Prediction: a View from the Trenches", 2013, section 5.1): no second pass. A model with dropout is scored
with it. States are summed over ranks, so that the figures are those of one process with all data.
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

KINDS = ("window", "cumulative")
_LOG = logging.getLogger("tf_fusedrec.callbacks.progressive")


class ProgressiveMetrics(keras.callbacks.Callback):
    """AUC and NE of every task while it is trained: of the last window of steps, and of all steps so far.

    The model calls `update` in its training step. All ranks fit with one, which may serve several fits; a window also
    ends with an epoch, and what is cumulative begins with the job. Scalars are named
    progressive/<task>_<auc or ne>_<kind>, by the step that ends the window; each line of the log (logger
    "tf_fusedrec.callbacks.progressive", level INFO, rank 0) has all of them. The logs of an epoch get them too, with
    "_" for "/".

    Args:
      tasks: names of the model's tasks.
      every_steps: steps of a window.
      kinds: which of KINDS to tell.
      directory: of TensorBoard's files, written by rank 0; None writes none.
      first_step: steps that an earlier job trained.

    Raises:
      ValueError: no task, every_steps below 1, an unknown kind.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        every_steps: int = 100,
        kinds: Sequence[str] = KINDS,
        directory: str | os.PathLike | None = None,
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
        self._total: dict[str, np.ndarray] = {}  # states of all ranks and steps, by the name of the metric
        self._every, self._kinds, self._step = every_steps, tuple(kinds), first_step
        self._in_window = 0
        self._testing = False
        self._writer = None
        if directory is not None and collectives.rank() == 0:
            self._writer = tf.summary.create_file_writer(os.fspath(directory))
        self.latest: dict[str, float] = {}  # the scalars told last

    def update(self, labels: Mapping[str, tf.Tensor], logits: Mapping[str, tf.Tensor]) -> None:
        """Adds a batch: {task: <any>[n]} of 0 and 1, and {task: <float>[n]} log odds. Part of the training step."""
        if self._testing:
            return  # the loss of a validation, which has a graph of its own
        for task, metrics in self._metrics.items():
            for metric in metrics:
                metric.update_state(labels[task], tf.stop_gradient(logits[task]))

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._step += 1
        self._in_window += 1
        if self._in_window == self._every:
            self._tell()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._in_window:
            self._tell()
        if logs is not None:
            logs.update({name.replace("/", "_"): value for name, value in self.latest.items()})

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._testing = True

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._testing = False

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _tell(self) -> None:
        """Ends a window: all ranks call it after the same step."""
        self._in_window = 0
        told: dict[str, float] = {}
        for task, metrics in self._metrics.items():
            for metric in metrics:
                name = f"progressive/{task}_{metric.name}"
                window = metric.summed_states()
                self._total[name] = self._total.get(name, 0) + window
                for kind, states in (("window", window), ("cumulative", self._total[name])):
                    if kind in self._kinds:
                        told[f"{name}_{kind}"] = metric.value_of_states(states)
                metric.reset_state()
        self.latest = told
        if collectives.rank() == 0:
            _LOG.info("step %d: %s", self._step, " ".join(f"{name} {value:.5f}" for name, value in told.items()))
        if self._writer is not None:
            with self._writer.as_default(step=self._step):
                for name, value in told.items():
                    tf.summary.scalar(name, value)
