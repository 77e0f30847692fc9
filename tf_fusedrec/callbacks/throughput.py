"""A Keras callback that measures the training throughput of all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.exchange import collectives


class Throughput(keras.callbacks.Callback):
    """Measures the training throughput of all ranks. After every epoch the logs have "<name>_per_s".

    The first step, which traces the graph, and the time between epochs do not count. `rates` covers the whole training.

    Args:
      counts: Names of the model's metrics that count since the epoch began. None: "batches", which every model has,
        and those of "samples" and "tokens" that the model has. All ranks must have the same.

    Raises:
      ValueError: in fit, the model lacks a metric of `counts`.
    """

    def __init__(self, counts: Sequence[str] | None = None):
        super().__init__()
        self._counts = ("batches",) if counts is None else tuple(counts)
        self._takes_any = counts is None
        self._total, self._seconds = np.zeros(len(self._counts)), 0.0  # of all timed steps
        self._is_warm = False

    @property
    def rates(self) -> dict[str, float]:
        """Rates {"<name>_per_s": sum over ranks} by the slowest rank's clock; nan if nothing was timed. Collective."""
        return self._rates(self._total, self._seconds)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._begin = self._now = time.perf_counter()
        self._before = self._latest = np.zeros(len(self._counts))

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        logs = {"batches": batch + 1, **(logs or {})}
        if self._takes_any and not self._is_warm:
            self._counts += tuple(name for name in ("samples", "tokens") if name in logs)
            self._total = np.zeros(len(self._counts))
        missing = [name for name in self._counts if name not in logs]
        if missing:
            raise ValueError(
                f"Throughput counts {list(self._counts)}, but the model has no metric {missing[0]!r}; "
                f"it has {sorted(logs)}. Use a keras.metrics.Sum of that name, or different counts."
            )
        self._now = time.perf_counter()
        self._latest = np.array([float(logs[name]) for name in self._counts])
        if not self._is_warm:
            self._is_warm = True
            self._begin, self._before = self._now, self._latest

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        counts, seconds = self._latest - self._before, self._now - self._begin
        self._total, self._seconds = self._total + counts, self._seconds + seconds
        rates = self._rates(counts, seconds)
        if logs is not None:
            logs.update(rates)

    def _rates(self, counts: np.ndarray, seconds: float) -> dict[str, float]:
        ranks = collectives.all_gather(np.append(counts, seconds)[np.newaxis])
        slowest, totals = ranks[:, -1].max(), ranks[:, :-1].sum(axis=0)
        rates = totals / slowest if slowest > 0 else np.full(len(totals), np.nan)
        return {f"{name}_per_s": float(rate) for name, rate in zip(self._counts, rates)}
