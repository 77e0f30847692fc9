"""Clocks inside a graph: a stage counts the time until its op ends, and stages add up to the step."""

import time

import pytest

from benchmarks.harness.stage_times import BEFORE, DENSE, REST, MarkedStep, stage_ms
from tf_fusedrec import ops, tf

SLEEP_S = 0.05


def _slowly(x):
    def sleep(value):
        time.sleep(SLEEP_S)
        return value

    return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype, stateful=False), x.shape)


def test_time_goes_to_the_stage_that_waited():
    def step(ids):
        unique = ops.segment_unique(ids, tf.constant([0, 3], tf.int64))
        rows = ops.recover(_slowly(tf.zeros([2, 4]) + tf.cast(ids[0], tf.float32)), unique.inverse)
        gradients = _slowly(tf.ensure_shape(rows, [3, 4]))
        return ops.recover_grad(gradients, unique.inverse, tf.size(unique.ids, out_type=tf.int64))

    marked = MarkedStep(step)
    runs = [marked.run(tf.constant([7, 8, 7], tf.int64)) for _ in range(4)][1:]
    ms = stage_ms(runs)
    assert list(ms) == [
        BEFORE, "deduplicate ids", "rows in the order of ids", DENSE, "sum gradients by id", REST
    ]  # fmt: skip
    slow = 0.9e3 * SLEEP_S
    assert ms["rows in the order of ids"] > slow and ms[DENSE] > slow
    assert max(ms[stage] for stage in ("deduplicate ids", "sum gradients by id", REST)) < slow


def test_a_stateful_condition_behind_the_stages_is_no_circle():
    def step(ids):
        unique = ops.segment_unique(ids, tf.constant([0, 3], tf.int64))
        with tf.control_dependencies([tf.cond(tf.size(unique.ids) > 5, lambda: tf.print("many"), tf.no_op)]):
            return ops.recover(tf.zeros([2, 4]), unique.inverse)

    run = MarkedStep(step).run(tf.constant([7, 8, 7], tf.int64))
    assert list(run) == [BEFORE, "deduplicate ids", "rows in the order of ids", REST]


def test_stages_add_up_to_the_median_step_in_the_order_in_which_they_end():
    runs = [
        {"b": [0.003], "a": [0.001, 0.004], "end": [0.005]},
        {"b": [0.003], "a": [0.001, 0.004], "end": [0.007]},
        {"b": [0.003], "a": [0.001, 0.004], "end": [0.006]},
    ]
    assert stage_ms(runs) == pytest.approx({"a": 2.0, "b": 2.0, "end": 2.0})
    assert list(stage_ms(runs)) == ["a", "b", "end"]
