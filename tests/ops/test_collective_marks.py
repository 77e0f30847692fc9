"""Marks of collectives pass the tensor through and count the calls, in graphs and in Python."""

import numpy as np
import pytest

from tf_fusedrec import ops, tf


def mark(name):
    return next(one for one in ops.collective_marks() if one.name == name)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int32, tf.int64, tf.string])
def test_a_tensor_of_any_type_passes_through_unchanged(dtype):
    value = tf.constant(["1", "2"]) if dtype == tf.string else tf.cast([1, 2], dtype)
    same = ops.mark_collective(value, name="passes", ended=False)
    np.testing.assert_array_equal(same.numpy(), value.numpy())


def test_each_call_of_a_graph_counts_and_the_gradient_passes():
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            begun = ops.mark_collective(x, name="graph/a\tb", ended=False)
            ended = ops.mark_collective(begun * 2.0, name="graph/a\tb", ended=True)
        return ended, tape.gradient(ended, x)

    for _ in range(3):
        assert [part.numpy() for part in step(tf.constant([5.0]))] == [[10.0], [2.0]]
    now = mark("graph/a\tb")
    assert (now.begun, now.ended) == (3, 3) and 0 <= now.ended_ago_s <= now.begun_ago_s < 60


def test_python_marks_and_many_names_fit():
    names = [f"python.{'x' * 100}.{n}" for n in range(500)]
    for name in names:
        ops.mark_now(name, ended=False)
    ops.mark_now(names[7], ended=True)
    assert mark(names[7])[1:3] == (1, 1) and mark(names[8])[1:3] == (1, 0)
    assert mark(names[8]).ended_ago_s < 0, "it has never ended"


def test_a_call_that_failed_counts_as_ended_when_the_next_one_begins():
    for ended in (False, False, False, True):
        ops.mark_now("fails", ended=ended)
    assert mark("fails")[1:3] == (3, 3)
    ops.mark_now("fails", ended=False)
    assert mark("fails")[1:3] == (4, 3)
