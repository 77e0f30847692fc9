"""Keras callbacks that measure the training throughput of all ranks.

Model FLOPs utilization (MFU) is the fraction of the machine's matrix throughput that a training job uses. Useful FLOPs
are those of the model's matrix products for real tokens and pairs, without padding, masked pairs and recomputation. The
layers count them (`forward_flops`), and a model sums them in a metric.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
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


_SIDE = 1024


def gemm_rate(repeats: int = 5) -> float:
    """FLOP/s of a float32 product of two [1024, 1024] matrices on this process's device, the best of `repeats`."""
    if repeats < 1:
        raise ValueError(f"repeats must be >= 1, got {repeats}.")
    left, right = (tf.random.stateless_normal([_SIDE, _SIDE], [number, 0]) for number in (1, 2))
    best = np.inf
    for _ in range(repeats + 1):  # The first product only starts the threads.
        begin = time.perf_counter()
        tf.matmul(left, right).numpy()
        best = min(best, time.perf_counter() - begin)
    return 2.0 * _SIDE**3 / best


class ModelFlopsUtilization(keras.callbacks.Callback):
    """After every epoch, logs["mfu"] = useful FLOP/s of all ranks / sum of their measured gemm_rate.

    Put it after callbacks.Throughput, which must count `metric`, and before callbacks that read the logs.

    Args:
      metric: Name of the model's metric that counts useful GFLOPs (1e9) of the forward and the backward pass.

    Raises:
      ValueError: at the end of an epoch, Throughput does not count the metric.
    """

    def __init__(self, metric: str = "gflops"):
        super().__init__()
        self._rate_name = f"{metric}_per_s"
        self.machine_flops_per_s = 0.0  # sum over ranks, measured when training begins

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        # All ranks measure at once, because they also share the machine in training.
        collectives.barrier()
        self.machine_flops_per_s = float(collectives.all_gather(np.array([gemm_rate()])).sum())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        if self._rate_name not in logs:
            raise ValueError(
                f"ModelFlopsUtilization reads {self._rate_name!r} from the logs, but they have {sorted(logs)}. "
                f"Use callbacks.Throughput with {self._rate_name.removesuffix('_per_s')!r} among its counts before it."
            )
        logs["mfu"] = self.utilization(logs[self._rate_name])

    def utilization(self, gflops_per_s: float) -> float:
        """MFU of a rate in GFLOP/s, summed over ranks; nan before training."""
        return 1e9 * float(gflops_per_s) / self.machine_flops_per_s if self.machine_flops_per_s else float("nan")
