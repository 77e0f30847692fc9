"""A peek and a touch make one training lookup: a peek reads rows of some ids, a touch changes the table by all ids."""

import functools

import numpy as np
import pytest

from tests.oracles.hash_table import pack
from tests.support.hash_tables import new_table
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

STEPS, SEGMENTS = 25, 2
SPECS = {
    "plain": {},
    "zeros_for_unknown_ids": {"unknown": "zeros"},
    "ttl": {"ttl": 2},
    "ttl_of_seldom_sweeps": {"ttl": 32},
    "admission": {"admission_count": 2, "max_candidates": 64, "ttl": 3},
    "least_often": {"max_rows": 40, "eviction": "lfu", "record_tombstones": True},
    "longest_ago_in_a_window": {"max_rows": 60, "eviction": "lru", "window": 2, "ttl": 4},
    "hot_rows": {"hot_after": 3},
    "hot_rows_that_cool": {"hot_after": 2, "frequency_decay_steps": 8},
    "rows_in_a_file": {"memory_budget": 60 * 32},
}


touch = functools.partial(ops.table_lookup, with_rows=False, dim=4)


def _batch(random):
    """Returns ids of the own group, and of another one, by segment."""
    return [[random.integers(-40, 40, random.integers(0, 12)).tolist() for _ in range(SEGMENTS)] for _ in range(2)]


def _peek(table, own, ahead):
    message, splits, received = pack([own])
    rows = ops.table_read(table.handle, message, splits, ahead, as_training=True, dim=table.dim)
    assert rows.shape[0] >= len(received) and not np.any(rows[len(received) :])
    return rows.numpy()[: len(received)]


def _compare(table, wanted):
    for segment in range(SEGMENTS):
        for got, want in zip(table.records(segment), wanted.records(segment)):
            np.testing.assert_array_equal(got, want)
        for op in (ops.table_candidates, ops.table_tombstones):
            for got, want in zip(op(table.handle, segment), op(wanted.handle, segment)):
                np.testing.assert_array_equal(got, want)
    assert table.statistics() == wanted.statistics()
    np.testing.assert_array_equal(ops.table_clock(table.handle), ops.table_clock(wanted.handle))


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_both_are_one_lookup(name, looks_ahead, tmp_path):
    spec = dict(SPECS[name])
    if "memory_budget" in spec:
        spec["tier_folder"] = str(tmp_path)
    random = np.random.default_rng(len(name))
    batches = [_batch(random) for _ in range(STEPS + 1)]
    ahead = None
    with new_table(SEGMENTS, **spec) as table, new_table(SEGMENTS, **spec) as wanted:
        for step in range(STEPS):
            batch = batches[step]
            found = wanted.lookup(batch)
            rows = _peek(table, batch[0], ahead)
            np.testing.assert_array_equal(rows, found.rows[: len(rows)], err_msg=f"step {step}")
            touched = touch(table.handle, *pack(batch)[:2])._replace(rows=rows)
            np.testing.assert_array_equal(touched.inverse, found.inverse)
            if looks_ahead:
                ahead = ops.table_look_ahead(table.handle, *pack(batches[step + 1][:1])[:2], dim=table.dim)
            grads = random.normal(size=[len(found.inverse), table.dim]).astype(np.float32)
            for one, of_table in ((table, touched), (wanted, found)):
                one.apply(of_table, grads, step=step + 1)
            _compare(table, wanted)
        kinds = np.sum(table.statistics(), axis=0)
    _, hits, inserts, evictions, refused, _ = kinds
    assert hits > 20 and inserts > 20  # otherwise all compared rows would be initial ones
    assert (refused > 0) == ("admission_count" in spec)
    assert (evictions > 0) == bool(spec.get("ttl", 32) < 32 or "max_rows" in spec)


def test_a_row_that_left_after_the_look_ahead_is_not_answered():
    batch = [[[1, 2, 3], []]]
    with new_table(SEGMENTS) as table:
        table.train(batch, np.ones([3, table.dim], np.float32))
        ahead = ops.table_look_ahead(table.handle, *pack(batch)[:2], dim=table.dim)
        before = table.find(batch)
        ops.table_remove(table.handle, 0, tf.constant([2], tf.int64))
        rows = _peek(table, batch[0], ahead)
        np.testing.assert_array_equal(rows[[0, 2]], before[[0, 2]])
        np.testing.assert_array_equal(rows[1], table.initial((0, 2)))


def test_unsuitable_arguments_are_refused():
    message, splits = tf.constant([1, 0, 7], tf.int64), tf.constant([3])
    with new_table(SEGMENTS) as table:
        ahead = ops.table_look_ahead(table.handle, message, splits, dim=4)
        other = tf.constant([2, 0, 7, 8], tf.int64), tf.constant([4])
        with pytest.raises(tf.errors.InvalidArgumentError, match="of a TableLookAhead of the same 2 ids, got shapes"):
            ops.table_read(table.handle, *other, ahead, as_training=True, dim=4)
        with pytest.raises(tf.errors.InvalidArgumentError, match="dim must be that of the table, 4, got 3"):
            ops.table_read(table.handle, message, splits, as_training=True, dim=3)
        foreign = ahead._replace(handles=tf.constant([99], tf.int64))
        with pytest.raises(tf.errors.InvalidArgumentError, match="handles_ahead must be of a TableLookAhead of this"):
            ops.table_read(table.handle, message, splits, foreign, as_training=True, dim=4)
        for op in (touch, lambda *bad: ops.table_read(*bad, as_training=True, dim=4)):
            with pytest.raises(tf.errors.InvalidArgumentError, match="rank 0"):
                op(table.handle, tf.constant([5, 0, 7], tf.int64), splits)
        assert table.statistics() == [[0] * 6] * 2


def test_shapes():
    inputs = (tf.resource, []), (tf.int64, [None]), (tf.int32, [None])
    assert inferred(lambda *inputs: ops.table_read(*inputs, as_training=True, dim=3), *inputs) == [[None, 3]]
    assert inferred(touch, *inputs) == [[0, 4], [None], [None]]
    with pytest.raises(ValueError, match="Shape must be rank 1 but is rank 2"):
        inferred(touch, inputs[0], (tf.int64, [3, 3]), inputs[2])
