"""Callbacks in one process. tests/models/test_train.py runs them on two ranks."""

import os
import signal

import pytest

from tf_fusedrec import callbacks, keras, tf


class Counting(keras.Model):
    """A model that counts samples for Throughput."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self._samples = keras.metrics.Sum(name="samples")

    @property
    def metrics(self):
        return [self._samples]

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        self._samples.update_state(tf.shape(x)[0])
        return tf.reduce_mean(y_pred)


def fitted(listeners, epochs=1, build=True):
    model = Counting()
    model.compile(keras.optimizers.legacy.SGD(0.1))
    if build:
        model(tf.zeros([1, 3]))
    data = tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat(5)
    return model.fit(data, epochs=epochs, callbacks=listeners, verbose=0)


class SignalAfter(keras.callbacks.Callback):
    def __init__(self, steps, number):
        super().__init__()
        self.steps, self.number, self.seen = steps, number, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.steps:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_after_the_step_and_handlers_come_back(number):
    before = signal.getsignal(number)
    interrupt, sender = callbacks.Interrupt(), SignalAfter(2, number)
    fitted([sender, interrupt], epochs=3)
    assert sender.seen == 2
    assert interrupt.signal_name == number.name
    assert signal.getsignal(number) is before


def test_training_without_a_signal_is_left_alone():
    interrupt, sender = callbacks.Interrupt(), SignalAfter(-1, signal.SIGINT)
    fitted([sender, interrupt], epochs=2)
    assert (sender.seen, interrupt.signal_name) == (10, None)


def test_throughput_leaves_out_the_first_step():
    clock = callbacks.Throughput(counts=("samples",))
    history = fitted([clock], epochs=2).history
    # 4 steps of 4 samples follow the first one, then 5 steps. The rates give their durations.
    first, second = history["samples_per_s"]
    assert clock.rates["samples_per_s"] == pytest.approx(36 / (16 / first + 20 / second))


def test_throughput_counts_what_the_model_has():
    history = fitted([callbacks.Throughput()], epochs=2).history
    rates = [[history[f"{name}_per_s"][epoch] for name in ("batches", "samples")] for epoch in (0, 1)]
    assert [samples / batches for batches, samples in rates] == pytest.approx([4, 4])
    assert "tokens_per_s" not in history


def test_throughput_names_the_metric_that_is_missing():
    with pytest.raises(ValueError, match="Throughput counts .*'words'.*, but the model has no metric 'words'"):
        fitted([callbacks.Throughput(counts=("words",))])
