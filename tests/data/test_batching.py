"""Algorithm 1 of MTGRBoost and longest-first reallocation of TurboGR by hand; the cost of rows."""

import numpy as np
import pytest

from tests.oracles.batching import batch_sizes_oracle, longest_first_oracle
from tf_fusedrec.data.plan import Cost, closest_cuts, longest_first


def _sizes(lengths, target):
    return np.diff(closest_cuts(np.array(lengths, np.int64), target), prepend=0).tolist()


@pytest.mark.parametrize(
    "lengths, target, expected",
    [
        ([], 5, []),
        ([3], 5, [1]),  # the tail is flushed
        ([100], 5, [1]),  # a row longer than the target makes progress
        ([2, 100, 2], 5, [1, 1, 1]),
        ([4, 3], 6, [2]),  # the whole queue is closest: the listing would wait for ever
        ([5, 2, 5], 6, [1, 2]),  # 5 and 7 are equally close: the shorter
        ([5, 5, 5, 5], 10, [2, 2]),
        ([3, 3, 5, 4, 1, 9, 2], 6, [2, 1, 2, 1, 1]),  # the docstring's example
    ],
)
def test_cases_by_hand(lengths, target, expected):
    assert batch_sizes_oracle(lengths, target) == expected
    assert _sizes(lengths, target) == expected


def test_longest_first_by_hand():
    # The docstring's example, and one where two ranks get no row.
    for weights, ranks, owners in (([5, 9, 2, 4, 3], 2, [1, 0, 1, 1, 0]), ([7, 7], 4, [0, 1])):
        assert longest_first(np.array(weights), ranks).tolist() == longest_first_oracle(weights, ranks) == owners


def test_weights_are_tokens_unless_cost_is_quadratic():
    tokens = np.array([1, 10, 100, 0])
    for cost in (Cost(), Cost(3.0)):
        weights, target = cost.weights(tokens, 50)
        assert weights.tolist() == tokens.tolist() and target == 50
    weights, target = Cost(2.0, 0.5).weights(tokens, 50)
    cost = [2.0 * n + 0.5 * n * n for n in (1, 10, 100, 0)]
    # Rounded to integers: half of one in weights that sum to 111,000.
    np.testing.assert_allclose(weights, [c * 1000 * 111 / sum(cost) for c in cost], atol=0.5)
    assert target == 50_000
    assert Cost(0.0, 1.0).weights(np.empty(0, np.int64), 5)[1] == 5  # no rows


@pytest.mark.parametrize("fields", [(0.0, 0.0), (-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_costs_are_checked(fields):
    with pytest.raises(ValueError, match="Cost needs linear and quadratic >= 0 and one of them > 0, got Cost"):
        Cost(*fields)
