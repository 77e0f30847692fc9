"""metrics/exact.py equals the pairwise and list-sorting oracles; metrics of integers are exact."""

import numpy as np
import pytest

from tests.oracles.metrics import auc_oracle, gauc_oracle, rank_oracle
from tf_fusedrec.metrics import exact


def predictions(count, seed, levels=5):
    """Few score levels, so that ties are common."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    scores = generator.integers(0, levels, count) / 8.0
    return generator.integers(-3, 4, count), labels, scores


def equal_or_both_nan(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=1e-15, atol=0)  # one division each


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_auc_and_gauc_against_pairs(count, seed):
    groups, labels, scores = predictions(count, seed)
    equal_or_both_nan(exact.auc(labels, scores), auc_oracle(labels, scores))
    for weight in exact.WEIGHTS:
        ours = exact.gauc(groups, labels, scores, weight)
        np.testing.assert_allclose(ours, gauc_oracle(groups, labels, scores, weight), rtol=1e-14)


def test_auc_of_the_docstring_and_of_the_extremes():
    assert exact.auc([1, 0, 1, 0], [0.9, 0.9, 0.8, 0.1]) == 0.625
    assert exact.auc([0, 0, 1], [0.1, 0.2, 0.3]) == 1.0
    assert exact.auc([True, False], np.float32([-1, 1])) == 0.0
    assert exact.auc([1.0, 0.0], [5, 5]) == 0.5


def test_undefined_metrics_are_nan():
    assert np.isnan(exact.auc([], []))
    assert np.isnan(exact.auc([1, 1], [0.1, 0.2]))
    assert np.isnan(exact.gauc([1, 1, 2], [1, 1, 0], [0.1, 0.2, 0.3]))
    none = np.empty(0, np.int64)
    for value in (exact.hit_rate(none, 10), exact.ndcg(none, 10), exact.mrr(none)):
        assert np.isnan(value)


def test_gauc_weights_and_skips():
    groups = [1, 1, 2, 2, 2, 2, 3]
    labels = [1, 0, 0, 1, 1, 1, 1]
    scores = [0.9, 0.1, 0.9, 0.1, 0.1, 0.1, 0.5]  # AUC 1, 0, undefined
    assert exact.gauc(groups, labels, scores) == 0.5
    assert exact.gauc(groups, labels, scores, weight="impressions") == pytest.approx(2 / 6)


def test_large_counts_stay_exact_in_integers():
    count = 400_000  # the sum of doubled ranks, 1.6e11, is far beyond float32 and any int32
    labels = np.arange(count) % 2
    scores = np.arange(count)
    half = count // 2
    assert exact.auc(labels, scores) == (half * (half + 1) // 2) / half**2


@pytest.mark.parametrize("rows_at_once", [1, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_rank_against_sorted_lists(seed, rows_at_once, monkeypatch):
    monkeypatch.setattr(exact, "_SCORES_AT_ONCE", rows_at_once)
    generator = np.random.default_rng(seed)
    users, candidates = 9, 12
    # Small integers: products are exact, ties are common.
    queries = generator.integers(-2, 3, (users, 3)).astype(np.float32)
    items = generator.integers(-2, 3, (candidates, 3)).astype(np.float32)
    item_ids = generator.permutation(50)[:candidates]
    targets = generator.choice(np.append(item_ids, 99), users)
    lengths = generator.integers(0, 15, users)
    seen = generator.integers(0, 50, lengths.sum())
    seen = np.where(generator.random(len(seen)) < 0.5, generator.choice(item_ids, len(seen)), seen)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    ours = exact.rank_of_target(queries, items, item_ids, targets, seen, splits)
    unfiltered = exact.rank_of_target(queries, items, item_ids, targets)
    for user in range(users):
        scores = items @ queries[user]
        mine = set(seen[splits[user] : splits[user + 1]].tolist())
        ids = item_ids.tolist()
        assert ours[user] == rank_oracle(scores, ids, targets[user], mine)
        assert unfiltered[user] == rank_oracle(scores, ids, targets[user], set())


def test_rank_without_users_or_candidates():
    ids, none = np.array([4, 2]), np.empty(0, np.int64)
    assert exact.rank_of_target(np.ones((0, 1)), np.ones((2, 1)), ids, none).shape == (0,)
    assert exact.rank_of_target(np.ones((1, 1)), np.ones((0, 1)), none, [3]).tolist() == [1]


def test_equal_scores_do_not_flatter_a_collapsed_model():
    ids = np.arange(100)
    ranks = exact.rank_of_target(np.zeros((100, 2)), np.ones((100, 2)), ids, ids)
    assert exact.hit_rate(ranks, 10) == 0.1


def test_hit_rate_ndcg_mrr():
    ranks = np.array([1, 3, 11, 1000])
    assert exact.hit_rate(ranks, 10) == 0.5
    assert exact.hit_rate(ranks, 3) == 0.5 and exact.hit_rate(ranks, 2) == 0.25
    assert exact.ndcg(ranks, 10) == pytest.approx((1 + 0.5) / 4)
    assert exact.mrr(ranks) == pytest.approx((1 + 1 / 3 + 1 / 11 + 1 / 1000) / 4)


QUERIES, ITEMS = np.ones((2, 3)), np.ones((4, 3))


def ranked(queries=QUERIES, items=ITEMS, item_ids=(0, 1, 2, 3), target_ids=(0, 1), **seen):
    return exact.rank_of_target(queries, items, np.array(item_ids), target_ids, **seen)


REFUSALS = [
    (lambda: exact.auc([1, 0], [0.5]), "1-D and of one length"),
    (lambda: exact.auc([1, 2], [0.5, 0.1]), "labels must be 0 or 1, got 2"),
    (lambda: exact.auc([1, 0], [0.5, np.nan]), "scores must be finite, got nan"),
    (lambda: exact.gauc([1], [1], [1.0], weight="size"), "weight must be one of .*got 'size'"),
    (lambda: exact.hit_rate(np.array([1]), 0), "k must be an int >= 1, got 0"),
    (lambda: exact.ndcg(np.array([0, 3]), 10), "ranks count from 1, got 0"),
    (lambda: ranked(items=np.ones((4, 2))), r"must share D, got \(2, 3\) and \(4, 2\)"),
    (lambda: ranked(item_ids=(0, 1, 2)), "item_ids must name each of the 4 items"),
    (lambda: ranked(target_ids=[0]), "target_ids must hold one id per query"),
    (lambda: ranked(item_ids=(1, 1, 2, 3)), "item_ids must be distinct"),
    (lambda: ranked(seen_ids=[1]), "must be given together"),
    (lambda: ranked(np.full((2, 3), np.nan)), "scores of queries 0 .. 1 are not finite"),
]


@pytest.mark.parametrize(("call", "words"), REFUSALS)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("splits", [[0, 1], [0, 2, 1], [1, 1, 1], [0, 1, 2]])
def test_splits_that_lie_are_refused(splits):
    with pytest.raises(ValueError, match="seen_row_splits must run from 0 to len"):
        ranked(seen_ids=[1], seen_row_splits=splits)
