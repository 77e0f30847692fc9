"""ModelFlopsUtilization: the logged quotient, the sources of its parts, and its refusals."""

import math

import numpy as np
import pytest

from models import utilization
from tf_fusedrec import callbacks, keras, tf
from tf_fusedrec.callbacks import throughput

GFLOPS = 3.0  # the model's own count, per step


class Counting(keras.Model):
    def __init__(self, metric):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self._gflops = keras.metrics.Sum(name=metric)

    @property
    def metrics(self):
        return [self._gflops]

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        self._gflops.update_state(GFLOPS)
        return tf.reduce_mean(y_pred)


def fitted(listeners, metric="gflops"):
    model = Counting(metric)
    model.compile(keras.optimizers.legacy.SGD(0.1))
    return model.fit(tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat(5), callbacks=listeners, verbose=0).history


@pytest.mark.parametrize(("metric", "arguments"), [("gflops", {}), ("products", {"metric": "products"})])
def test_an_epoch_logs_useful_work_over_the_measured_rate(metric, arguments, monkeypatch):
    monkeypatch.setattr(utilization, "gemm_rate", lambda: 50_000.0)
    callback = utilization.ModelFlopsUtilization(**arguments)
    assert math.isnan(callback.utilization(1.0))
    history = fitted([callbacks.Throughput(counts=(metric,)), callback], metric)
    assert callback.machine_flops_per_s == 50_000.0
    assert history["mfu"][0] == pytest.approx(history[f"{metric}_per_s"][0] * 1e9 / 50_000.0)
    assert callback.utilization(0.000_025) == 0.5


def test_ranks_add_their_counts_and_the_slowest_clock_divides_them(monkeypatch):
    clock = iter([0.0, 5.0, 7.0, 9.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    # Another rank made 6 steps in 8 s.
    monkeypatch.setattr(throughput.collectives, "all_gather", lambda mine: np.concatenate([mine, [[6.0, 8.0]]]))
    callback, logs = callbacks.Throughput(), {}
    callback.on_epoch_begin(0)
    for batch in range(3):  # the first one does not count: this rank made 2 steps in 4 s
        callback.on_train_batch_end(batch)
    callback.on_epoch_end(0, logs)
    assert logs == callback.rates == {"batches_per_s": (2 + 6) / 8}


def test_the_rate_of_the_machine_is_that_of_a_matrix_product():
    # From a slow core under load to a large server.
    assert 1e8 < utilization.gemm_rate(1) < 1e14
    with pytest.raises(ValueError, match="repeats must be >= 1, got 0"):
        utilization.gemm_rate(0)


def test_without_the_count_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(utilization, "gemm_rate", lambda: 1.0)
    with pytest.raises(ValueError, match="reads 'gflops_per_s' from the logs.* Use callbacks.Throughput with 'gflops'"):
        fitted([utilization.ModelFlopsUtilization()])
