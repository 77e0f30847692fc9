"""The counts of benchmarks.topology agree with counts by hand on small batches."""

import numpy as np
import pytest

from benchmarks.topology.counts import DIM, REAL_GROUPS, batches, count, counted, imbalance


def test_ranks_ask_owners_of_their_group():
    same = np.arange(1_000, dtype=np.int64)
    sent = [[same] * 4]
    one, two, four = (count(sent, groups) for groups in REAL_GROUPS)
    # In a group of one, a rank receives all of its own ids. In one group of four, it receives a quarter of all ids.
    np.testing.assert_array_equal(four.received, [[1_000] * 4])
    np.testing.assert_array_equal(one.received, 4 * one.distinct)
    np.testing.assert_array_equal(two.received, 2 * two.distinct)
    assert one.received.sum() == two.received.sum() == 4_000 and one.rows.sum() == 1_000
    # A group holds all rows, half of them on each of its two ranks.
    assert two.rows[0] == two.rows[2] and two.rows[0] + two.rows[1] == 1_000
    lines = [counted(sent, groups) for groups in REAL_GROUPS]
    assert [line["all_to_all_peers"] for line in lines] == [3, 1, 0]
    assert [line["of_which_to_replicas"] for line in lines][::2] == [0, 1]
    # A rank receives nothing from its group. Each of four replicas sums a quarter of the rows: it receives three
    # gradients for each, and the sums of the other three quarters.
    assert lines[2]["id_imbalance"] == 1 and lines[2]["float32_kb"] == pytest.approx(4e-3 * DIM * 2 * 3 * 250)
    # Two groups send copies of their sums. 500 gradients go to the replica, and half of 1,000 rows come from the group.
    assert lines[1]["float32_kb"] == pytest.approx(4e-3 * DIM * (500 + 2 * 500))
    # A rank owns 1,000 ids in the mean. Three of four come from other ranks, with a row and a gradient each.
    assert lines[0]["float32_kb"] == pytest.approx(4e-3 * DIM * 2 * 750) == 2 * lines[0]["bfloat16_kb"]


def test_replicas_have_what_other_groups_have_seen():
    sent = [[np.array([1, 2]), np.array([3])], [np.array([2]), np.array([4, 5])]]
    two = count(sent, 2)
    np.testing.assert_array_equal(two.received, [[2, 1], [1, 2]])
    np.testing.assert_array_equal(two.rows, [5, 5])
    np.testing.assert_array_equal(two.distinct_of_all, [[3, 3], [3, 3]])


def test_imbalance_is_the_mean_over_steps():
    assert imbalance(np.array([[1, 3], [2, 2]])) == (1.5 + 1) / 2


def test_batches_are_a_pure_function_of_step_and_rank():
    first, again = (batches(2, 2, 100) for _ in range(2))
    for of_step, of_step_again in zip(first, again):
        for ids, ids_again in zip(of_step, of_step_again):
            np.testing.assert_array_equal(ids, ids_again)
    assert not np.array_equal(first[0][0], first[0][1])
