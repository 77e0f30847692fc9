"""The device stream of benchmarks.overlap: ops take turns and time, and no core. Their gradients are right."""

import time

import numpy as np
import pytest

from benchmarks.overlap import device_stream
from tf_fusedrec import tf

LATE_S = 0.1  # a callback may be late by this much on a busy machine


@pytest.fixture(autouse=True)
def _forget_what_was_recorded():
    device_stream.take_record()


def seconds(forward, backward=0.0):
    return tf.constant([forward, backward], tf.float64)


def test_layer_and_gradients_equal_plain_ops():
    random = np.random.default_rng(0)
    rows = tf.constant(random.normal(size=[5, 37]), tf.float32)  # 37: two whole vectors and a rest
    weight = tf.constant(random.normal(size=[21]), tf.float32)
    upstream = tf.constant(random.normal(size=[5]), tf.float32)

    def plain(rows, weight, _):
        return tf.reduce_sum(rows, axis=1) / tf.sqrt(37.0) + tf.reduce_mean(weight)

    found = []
    for layer in (device_stream.layer, plain):
        with tf.GradientTape() as tape:
            tape.watch([rows, weight])
            hidden = layer(rows, weight, seconds(0.0))
        found.append((hidden, *tape.gradient(hidden, [rows, weight], upstream)))
    for got, want in zip(*found):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # sums in another order


def test_ops_wait_for_their_inputs_and_for_their_turn():
    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            late = device_stream.wait(rows + 1, tf.constant(0.2, tf.float64), device_stream.MEMORY)
            hidden = [device_stream.layer(x, tf.ones([1]), seconds(0.1, 0.05)) for x in (rows, late)]
            loss = tf.reduce_sum(tf.square(hidden[0]))  # a backward pass that needs the forward pass
        return tape.gradient(loss, rows), hidden[1]

    begin = time.monotonic()
    step(tf.ones([2, 3]))
    took = time.monotonic() - begin
    spans = device_stream.take_record()
    ((_, late_is_there),) = spans[device_stream.MEMORY]
    forward, backward, of_late = spans[device_stream.DEVICE]
    assert [end - begin for begin, end in (forward, backward, of_late)] == pytest.approx([0.1, 0.05, 0.1])
    assert backward[0] >= forward[1] and of_late[0] >= max(late_is_there, backward[1])
    assert took >= of_late[1] - forward[0]


def test_the_first_that_asks_is_the_first_that_runs():
    @tf.function
    def step(value):
        first = device_stream.wait(value, tf.constant(0.3, tf.float64), "fifo")
        later = device_stream.wait(value, tf.constant(0.05, tf.float64), "clock")
        return first, device_stream.wait(later, tf.constant(0.01, tf.float64), "fifo")

    step(tf.constant(1))
    first, second = device_stream.take_record()["fifo"]
    assert [first[1] - first[0], second[1] - second[0]] == pytest.approx([0.3, 0.01])
    assert second[0] == first[1], "the later one was asked for while the first one ran"


def test_no_core_works_while_the_stream_runs():
    rows, weight = tf.ones([4, 8]), tf.ones([1])
    device_stream.layer(rows, weight, seconds(0.0))
    cpu, begin = time.process_time(), time.monotonic()
    device_stream.layer(rows, weight, seconds(1.0))
    cpu, took = time.process_time() - cpu, time.monotonic() - begin
    assert 1.0 <= took < 1.0 + LATE_S + cpu
    assert cpu < 0.1


def test_a_value_without_a_time_has_no_turn():
    assert device_stream.wait(tf.constant(3), tf.constant(0.0, tf.float64), device_stream.MEMORY).numpy() == 3
    assert device_stream.take_record() == {}


def test_a_record_is_read_once():
    device_stream.wait(tf.constant(3), tf.constant(0.001, tf.float64), device_stream.MEMORY)
    assert list(device_stream.take_record()) == [device_stream.MEMORY]
    assert device_stream.take_record() == {}
