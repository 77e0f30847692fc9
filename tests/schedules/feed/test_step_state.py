"""Tensors that a step leaves for the next."""

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.schedules.feed import StepState


def value(number):
    """Returns a structure whose parts are made on the host, anywhere, and outside of TensorFlow."""
    with tf.device("/CPU:0"):
        on_host = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64).with_values(tf.range(3, dtype=tf.int64) + number)
    return {"ids": on_host, "rows": tf.fill([2, 3], tf.cast(number, tf.float32)), "names": tf.constant(["a"]), "no": 7}


@pytest.fixture
def state():
    made = []

    @tf.function
    def start(number):
        made.append(StepState(value(number)))
        made[-1].put(value(number))

    start(tf.constant(1, tf.int64))
    return made[-1]


def test_a_step_takes_what_the_one_before_has_put_in(state):
    @tf.function
    def step(number):
        taken = state.take()
        state.put(value(number))
        assert taken["no"] == 7 and taken["rows"].shape == [2, 3]
        return taken["ids"], taken["rows"], taken["names"]

    for before, number in ((1, 5), (5, 9)):
        ids, rows, names = step(tf.constant(number, tf.int64))
        assert ids.to_list() == [[before, before + 1], [before + 2]] and names.numpy().tolist() == [b"a"]
        np.testing.assert_array_equal(rows, np.full([2, 3], before, np.float32))


def test_host_tensors_and_strings_wait_in_host_memory(state):
    made = []

    @tf.function
    def step():
        taken = state.take()
        made.extend((taken["ids"].values.op, taken["rows"].op, taken["names"].op))

    step.get_concrete_function()
    ids, rows, names = made
    assert "CPU" in ids.device and "CPU" in names.device and "CPU" not in rows.device
    assert {ids.type, rows.type, names.type} == {"QueueDequeueV2"}


def test_a_step_that_failed_halfway_leaves_no_state(state):
    assert state.full
    next(iter(state._queues.values())).dequeue()
    assert not state.full
    state.clear()
    state.clear()
    assert [int(queue.size()) for queue in state._queues.values()] == [0, 0]
