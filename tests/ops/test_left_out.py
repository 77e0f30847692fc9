"""Rows whose gradients are not finite stay as they are, slots and versions included, under every rule and storage."""

import numpy as np
import pytest

from tests.support.hash_tables import new_table
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

RULES = {
    "sgd": ([0.0], (), ()),
    "momentum": ([0.0, 0.9, 1.0], ("m",), ()),
    "adagrad": ([0.0, 0.1, 1e-7, 0.0, 0.0], ("v",), ()),
    "rowwise_adagrad": ([0.0, 0.1, 1e-7, 0.0, 1.0, 1.0], (), ("v",)),
    "adam": ([1.0, 0.1, 0.001, 1e-7, 0.0], ("m", "v"), ()),  # with clipnorm
    "ftrl": ([0.0, 0.1, -0.5, 0.0, 0.0, 0.0, 0.0], ("n", "z"), ()),
}
BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_the_row_and_its_slots_keep_their_bits(rule, storage):
    hyperparameters, wide, scalars = RULES[rule]
    with new_table(dim=19, rule=rule, hyperparameters=hyperparameters, storage=storage) as table:
        batch = [[list(range(20))], [list(range(5, 25))]]
        grads = np.random.default_rng(1).normal(size=(40, 19)).astype(np.float32)
        table.train(batch, grads)
        for column, bad in enumerate(BAD):
            ids, before = table.records(wide=wide, scalars=scalars)
            found = table.lookup(batch)
            spoilt = grads.copy()
            spoilt[7, column] = spoilt[22, 18 - column] = bad  # ids 7 and 7, of both sources
            spoilt[0, 16] = bad
            left_out = ops.table_apply_gradients(
                table.handle, found, spoilt, scale=0.5, learning_rate=0.1, step=tf.constant(2, tf.int64)
            )
            numbers = found.inverse.numpy()
            assert left_out.numpy().tolist() == sorted({numbers[7], numbers[0]})
            again, after = table.records(wide=wide, scalars=scalars)
            assert ids.tolist() == again.tolist()
            for id_, old, new in zip(ids, before, after):
                fields = ["updated", "row", *wide, *scalars]
                same = [np.array_equal(old[field], new[field]) for field in fields]
                assert all(same) if id_ in (0, 7) else not any(same[:2])
                assert all(np.isfinite(new[field].astype(np.float32)).all() for field in fields)


def test_a_sum_that_overflows_is_left_out_and_16_bit_gradients_are_looked_at():
    with new_table(dim=2) as table:
        found = table.lookup([[[1, 2]], [[1]]])
        large = np.array([[3e38, 0], [1, 1], [3e38, 0]], np.float32)
        step = {"scale": 1.0, "learning_rate": 1.0, "step": tf.constant(1, tf.int64)}
        (number,) = ops.table_apply_gradients(table.handle, found, large, **step).numpy()
        assert number == found.inverse.numpy()[0]
        half = tf.constant([[np.inf, 0], [1, 1], [1, 1]], tf.float16)
        (number,) = ops.table_apply_gradients(table.handle, found, half, **step).numpy()
        assert number == found.inverse.numpy()[0]
        np.testing.assert_array_equal(table.find([[[1]]])[0], table.initial((0, 1)))


def test_a_sum_that_waits_is_named_once_and_left_out():
    with new_table(dim=2) as table:
        found = table.lookup([[[1, 2]]])
        told = [
            ops.table_accumulate_gradients(table.handle, found, np.array(grads, np.float32), scale=1.0).numpy().tolist()
            for grads in ([[1, 1], [1, 1]], [[np.nan, 1], [1, 1]], [[1, 1], [1, 1]], [[np.inf, 1], [1, 1]])
        ]
        assert told == [[], [int(found.inverse[0])], [], []]
        ops.table_apply_accumulated(table.handle, learning_rate=0.25, step=tf.constant(1, tf.int64))
        rows = table.find([[[1, 2]]])
        np.testing.assert_array_equal(rows[0], table.initial((0, 1)))
        np.testing.assert_array_equal(rows[1], table.initial((0, 2)) - np.float32(1))
        told = ops.table_accumulate_gradients(table.handle, found, np.full([2, 2], np.nan, np.float32), scale=1.0)
        assert sorted(told.numpy().tolist()) == [0, 1]
