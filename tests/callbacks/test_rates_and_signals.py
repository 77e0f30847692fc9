"""Callbacks in one process: rates of work and of the machine, and signals. test_monitoring.py has two ranks."""

import math
import os
import signal

import numpy as np
import pytest

from tf_fusedrec import callbacks, keras, tf
from tf_fusedrec.callbacks import throughput
from tf_fusedrec.models import utilization

GFLOPS = 3.0  # the model's own count, per step


class Counting(keras.Model):
    """A model that counts samples and a number of its own."""

    def __init__(self, metric):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.counts = [keras.metrics.Sum(name="samples"), keras.metrics.Sum(name=metric)]

    @property
    def metrics(self):
        return self.counts

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        self.counts[0].update_state(tf.shape(x)[0])
        self.counts[1].update_state(GFLOPS)
        return tf.reduce_mean(y_pred)


def fitted(listeners, metric="gflops", epochs=1):
    """Returns the logs of epochs with five batches of four samples."""
    model, data = Counting(metric), tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat(5)
    model.compile(keras.optimizers.SGD(0.1))
    return model.fit(data, epochs=epochs, callbacks=listeners, verbose=0).history


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


class SignalAfter(keras.callbacks.Callback):
    def __init__(self, steps, number):
        super().__init__()
        self.steps, self.number, self.seen = steps, number, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.steps:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "after", "steps"), [(signal.SIGINT, 2, 2), (signal.SIGTERM, 2, 2), (signal.SIGINT, None, 15)]
)
def test_a_signal_ends_training_after_the_step_and_handlers_come_back(number, after, steps):
    before = signal.getsignal(number)
    interrupt, sender = callbacks.Interrupt(), SignalAfter(after, number)
    fitted([sender, interrupt], epochs=3)
    assert sender.seen == steps
    assert interrupt.signal_name == (number.name if after else None)
    assert signal.getsignal(number) is before


def test_throughput_counts_what_the_model_has_after_the_first_step():
    history = fitted([clock := callbacks.Throughput()], epochs=2)
    # 4 steps of 4 samples follow the first one, then 5 steps. The rates give their durations.
    first, second = history["samples_per_s"]
    assert clock.rates["samples_per_s"] == pytest.approx(36 / (16 / first + 20 / second))
    rates = [[history[f"{name}_per_s"][epoch] for name in ("batches", "samples")] for epoch in (0, 1)]
    assert [samples / batches for batches, samples in rates] == pytest.approx([4, 4])
    assert "tokens_per_s" not in history


def test_throughput_names_the_metric_that_is_missing():
    with pytest.raises(ValueError, match="Throughput counts .*'words'.*, but the model has no metric 'words'"):
        fitted([callbacks.Throughput(counts=("words",))])
