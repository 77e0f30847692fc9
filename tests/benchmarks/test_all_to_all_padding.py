"""The rows that ranks of benchmarks.all_to_all_padding send are a pure function of step and rank."""

import numpy as np

from benchmarks.all_to_all_padding.__main__ import DIM, rows_of


def test_rows_are_a_pure_function_of_step_and_rank():
    rows, splits = rows_of(1, 4, 1000)
    again, _ = rows_of(1, 4, 1000)
    np.testing.assert_array_equal(rows, again)
    assert rows.shape == (splits.sum(), DIM) and rows.dtype == np.float32 and splits.dtype == np.int32


def test_sizes_change_from_step_to_step_within_five_percent():
    sizes = {len(rows_of(0, step, 1000)[0]) for step in range(20)}
    assert len(sizes) > 10
    assert min(sizes) >= 950
    assert max(sizes) <= 1050
