"""Batches by hand (Algorithm 1 of MTGRBoost, longest first of TurboGR), and EpochPlan on random weights.

Every row comes once, ranks have equal steps, and any sequence of stops on any number of ranks loses none.
"""

import numpy as np
import pytest

from tests.oracles.batching import batch_sizes_oracle, longest_first_oracle
from tf_fusedrec.data.plan import Cost, EpochPlan, all_positions, closest_cuts, longest_first


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


def _weights(rng, rows):
    return rng.integers(1, 10, rows)


def _positions(plan, ranks, steps):
    """Returns [step][rank] lists of positions."""
    return [[plan.batch(rank, step).tolist() for rank in range(ranks)] for step in steps]


def _flat(nested):
    return [position for step in nested for batch in step for position in batch]


@pytest.mark.parametrize("scope", ["rank", "global"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [0, 1, 5, 60])
def test_every_row_is_in_one_batch_and_the_batches_are_the_oracles(rows, ranks, scope):
    weights = _weights(np.random.default_rng(rows), rows)
    plan = EpochPlan(weights, 12, all_positions(rows), ranks, scope)
    batches = _positions(plan, ranks, range(plan.steps + 2))
    assert sorted(_flat(batches)) == list(range(rows))
    assert batches[plan.steps :] == [[[]] * ranks] * 2  # behind the end, no rank has a row
    if scope == "rank":
        for rank in range(ranks):
            part = range(rows * rank // ranks, rows * (rank + 1) // ranks)
            sizes = batch_sizes_oracle(weights[part].tolist(), 12) if part else []
            assert [len(step[rank]) for step in batches if step[rank]] == sizes
            assert [position for step in batches for position in step[rank]] == list(part)
        return
    begin = 0
    for step, size in enumerate(batch_sizes_oracle(weights.tolist(), 12 * ranks)):
        owner = longest_first_oracle(weights[begin : begin + size].tolist(), ranks)
        for rank in range(ranks):
            assert batches[step][rank] == [begin + row for row in range(size) if owner[row] == rank]
        begin += size


@pytest.mark.parametrize("seed", range(40))
def test_stops_on_any_numbers_of_ranks_lose_and_repeat_no_row(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 150))
    weights, left, trained = _weights(rng, rows), all_positions(rows), []
    for _ in range(5):
        ranks, scope = int(rng.integers(1, 6)), ["rank", "global"][rng.integers(2)]
        plan = EpochPlan(weights, 12, left, ranks, scope)
        steps = int(rng.integers(0, plan.steps + 2))
        trained += _flat(_positions(plan, ranks, range(steps)))
        left = plan.left_after(steps)
    last = EpochPlan(weights, 12, left, 2, "rank")
    trained += _flat(_positions(last, 2, range(last.steps)))
    assert sorted(trained) == list(range(rows))


def test_rows_of_no_weight_are_in_no_batch():
    weights = np.array([3, 0, 4, 0, 0, 5, 0])
    for scope in ("rank", "global"):
        plan = EpochPlan(weights, 5, all_positions(7), 2, scope)
        assert sorted(_flat(_positions(plan, 2, range(plan.steps)))) == [0, 2, 5]


def test_the_rest_is_shared_equally():
    def shared(streams, ranks):
        return EpochPlan(np.ones(40, np.int64), 12, streams, ranks, "rank").streams

    assert shared([[(3, 5)], [(10, 20), (30, 31)]], 2) == [[(3, 5)], [(10, 20), (30, 31)]]
    assert shared([[(3, 5)], [(10, 20), (30, 31)]], 3) == [[(3, 5), (10, 12)], [(12, 16)], [(16, 20), (30, 31)]]
    assert shared([[]], 2) == [[], []]
