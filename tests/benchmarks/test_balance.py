"""benchmarks.balance has the documented lengths, gaps as computed by hand, and the expected balance."""

import numpy as np
import pytest

from benchmarks.balance import __main__ as balance
from benchmarks.balance import reader as balance_reader
from tests.support.ranks import run_ranks


def test_lengths_are_as_promised():
    tokens = balance.lengths(100_000)
    assert abs(tokens.mean() - 600) < 1 and tokens.max() == 3000 and tokens.min() >= 1
    assert np.median(tokens) < 450  # long-tailed


def test_gaps_by_hand():
    work = np.array([1.0, 2.0, 3.0, 4.0])
    mean, p99 = balance.gaps([[np.array([0, 1]), np.array([2])], [np.array([0]), np.array([3])]], work)
    assert mean == pytest.approx((0 / 3 + 3 / 2.5) / 2)
    assert p99 == pytest.approx(0.99 * 1.2)


def test_memory_use_by_hand():
    tokens = np.array([1, 2, 3, 4])
    assert balance.memory_use([[np.array([0, 1]), np.array([2])], [np.array([0]), np.array([3])]], tokens) == 11 / 4 / 4


def test_balance_is_as_good_as_expected():
    fields = balance.simulated()
    assert fields["memory_use_fixed"] < 0.8 < 0.97 < fields["memory_use_dynamic"] < fields["memory_use_global"] <= 1
    assert fields["max_token_gap_dynamic"] <= 0.02
    assert fields["max_token_gap_global"] <= 0.0005
    assert fields["max_cost_gap_cost_model"] <= 0.01
    assert fields["max_token_gap_global_8_rows"] <= 0.015
    assert fields["max_token_gap_fixed"] > 0.1


def test_the_pipeline_reads_what_was_written(tmp_path):
    tokens = balance_reader.write(tmp_path, 400)
    balance_reader._pipeline(tmp_path, tokens)


def steps_of_two_ranks():
    from benchmarks.balance import steps as balance_steps

    return balance_steps.measure(32, 1)


def test_steps_on_two_ranks():
    first, second = run_ranks(steps_of_two_ranks, 2)
    assert first == second
    assert first["step_time_ratio"] > 0 and set(first) >= {"ms_per_step_fixed", "step_time_ratio_dynamic"}
