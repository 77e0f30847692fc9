"""Model FLOPs utilization (MFU), the fraction of the machine's matrix throughput that a training job uses.

Useful FLOPs are those of the model's matrix products for real tokens and pairs, without padding, masked pairs and
recomputation. The layers count them (`forward_flops`), and a model sums them in a metric.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_fusedrec import collectives, keras, tf

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
