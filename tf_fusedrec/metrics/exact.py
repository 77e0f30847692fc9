"""Exact offline metrics in NumPy: AUC and GAUC for ranking, full-catalogue ranks for retrieval.

Call them at the end of an epoch, on all predictions of a held-out split. They neither bin nor sample. A metric that
its input leaves undefined (no user, one class only) is nan, never 0 or 1. Ranks of a distributed job gather their
predictions first (collectives.all_gather).
"""

from __future__ import annotations

import numbers

import numpy as np

WEIGHTS = ("none", "impressions")
_SCORES_AT_ONCE = 1 << 24  # Scores in memory at a time: 64 MiB of float32.


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: the share of pairs in which the positive scores above the negative; ties count half.

    Args:
      labels: <any>[n], 0 or 1.
      scores: <float>[n], finite. Only their order matters.

    Returns:
      0 .. 1, exact up to one division, or nan without a positive or without a negative.

    Raises:
      ValueError: The shapes differ, a label is not 0 or 1, or a score is not finite.

    Example: labels 1 0 1 0, scores .9 .9 .8 .1  ->  (0.5 + 1 + 0 + 1) / 4 = 0.625
    """
    areas, _ = _area_per_group(np.zeros(np.shape(labels), np.int64), labels, scores)
    return float(areas[0]) if len(areas) else float("nan")


def entropy_ratio(entropy: np.ndarray, baseline: np.ndarray, times: np.ndarray | float = 1.0) -> float:
    """Normalized entropy of given entropies: the sum of `entropy` over the sum of `baseline`, without nan entries.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014. There, the baseline
    predicts the mean rate of clicks. Here, it predicts items by their popularity.

    Args:
      entropy, baseline: <float64>[B] of model and baseline, nan at the same places.
      times: <int64>[B], the number of times that each entry counts.
    """
    total = float(np.nansum(times * baseline))
    return float(np.nansum(times * entropy)) / total if total else np.nan


def gauc(groups: np.ndarray, labels: np.ndarray, scores: np.ndarray, weight: str = "none") -> float:
    """Mean AUC of the groups (users). A group with one class only has no AUC and does not count.

    Args:
      groups: <int>[n], the group of each prediction, in any order.
      labels, scores: Arguments of `auc`.
      weight: "none" counts each group once, as in TorchRec. "impressions" weighs a group by its number of
        predictions, as many CTR papers do. A group with equal scores counts 0.5, like any tie; TorchRec omits it.

    Returns:
      0 .. 1, or nan when no group has both classes.

    Raises:
      ValueError: `weight` is unknown, or `auc` refuses labels or scores.
    """
    if weight not in WEIGHTS:
        raise ValueError(f"weight must be one of {WEIGHTS}, got {weight!r}.")
    areas, sizes = _area_per_group(groups, labels, scores)
    valid = ~np.isnan(areas)
    if not valid.any():
        return float("nan")
    return float(np.average(areas[valid], weights=None if weight == "none" else sizes[valid]))


def normalized_entropy(labels: np.ndarray, logits: np.ndarray) -> float:
    """Mean cross entropy divided by the entropy of the labels' mean rate.

    It is 1 for a model that predicts this rate, and nan when the labels have one class.

    Args:
      labels: <any>[n], 0 or 1.
      logits: <float>[n], log odds, finite.

    Source: He et al., Practical Lessons from Predicting Clicks on Ads at Facebook (ADKDD 2014), section 2.1.
    """
    labels, logits = np.asarray(labels, np.float64), np.asarray(logits, np.float64)
    _check_predictions(labels, labels, logits)
    rate = _mean(labels)
    if not 0 < rate < 1:
        return float("nan")
    rate_entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return _mean(np.logaddexp(0.0, logits) - labels * logits) / rate_entropy


def calibration(labels: np.ndarray, logits: np.ndarray) -> float:
    """Sum of predicted probabilities divided by the number of positives: 1 is calibrated, nan without positives.

    Args and source: see normalized_entropy.
    """
    labels, logits = np.asarray(labels, np.float64), np.asarray(logits, np.float64)
    _check_predictions(labels, labels, logits)
    # This form of 1 / (1 + e^-x) does not overflow.
    predicted = np.exp(-np.logaddexp(0.0, -logits)).sum()
    return float(predicted / labels.sum()) if labels.any() else float("nan")


def rank_of_target(
    queries: np.ndarray,
    items: np.ndarray,
    item_ids: np.ndarray,
    target_ids: np.ndarray,
    seen_ids: np.ndarray | None = None,
    seen_row_splits: np.ndarray | None = None,
) -> np.ndarray:
    """Rank of each user's target among all candidates by dot product, without the items that the user has seen.

    The rank is 1 + the number of candidates ahead. A candidate is ahead if its score is larger. Among equal scores, the
    earlier in `item_ids` is ahead, as in a stable sort. A model that scores all items alike therefore gains nothing.
    The target itself always stays a candidate. A target outside the candidates gets rank I + 1. For a popularity
    baseline, pass queries = ones [B, 1] and items = counts [I, 1].

    Args:
      queries: <float>[B, D], one per user.
      items: <float>[I, D], one per candidate.
      item_ids: <int64>[I], distinct.
      target_ids: <int64>[B].
      seen_ids: None or <int64>[any], the seen items of all users, user by user. Repeats and unknown ids are allowed.
      seen_row_splits: None exactly without seen_ids, or <int64>[B+1], the bounds of each user's items in seen_ids.

    Returns:
      <int64>[B], 1 .. I + 1.

    Raises:
      ValueError: The shapes do not match, item_ids repeat, seen_row_splits does not cover seen_ids, or a score is not
        finite.
    """
    queries, items = np.asarray(queries), np.asarray(items)
    item_ids, target_ids = np.asarray(item_ids, np.int64), np.asarray(target_ids, np.int64)
    _check_ranking(queries, items, item_ids, target_ids)
    if seen_ids is None and seen_row_splits is None:
        seen_ids, seen_row_splits = np.empty(0, np.int64), np.zeros(len(queries) + 1, np.int64)
    seen_ids, splits = _checked_seen(seen_ids, seen_row_splits, len(queries))
    order = np.argsort(item_ids, kind="stable")
    target_at = _indices(item_ids, order, target_ids)
    seen_at = _indices(item_ids, order, seen_ids)
    ranks = np.full(len(queries), len(items) + 1, np.int64)
    step = max(1, _SCORES_AT_ONCE // max(len(items), 1))
    for begin in range(0, len(queries) if len(items) else 0, step):
        end = min(begin + step, len(queries))
        scores = queries[begin:end] @ items.T
        if not np.isfinite(scores).all():
            raise ValueError(f"scores of queries {begin} .. {end - 1} are not finite; look for NaN in queries.")
        target = target_at[begin:end, None]
        # Index -1 (no candidate) reads a score that is not used.
        target_scores = np.take_along_axis(scores, target, axis=1)
        ahead = (scores > target_scores) | ((scores == target_scores) & (np.arange(len(items)) < target))
        user = np.repeat(np.arange(end - begin), np.diff(splits[begin : end + 1]))
        removed = seen_at[splits[begin] : splits[end]]
        ahead[user[removed >= 0], removed[removed >= 0]] = False
        ranks[begin:end] = np.where(target[:, 0] >= 0, 1 + ahead.sum(axis=1), ranks[begin:end])
    return ranks


def hit_rate(ranks: np.ndarray, k: int) -> float:
    """HR@K: share of the ranks <int64>[B], counted from 1, that are <= k; nan without users."""
    return _mean(_checked_ranks(ranks) <= checked_k(k))


def ndcg(ranks: np.ndarray, k: int) -> float:
    """NDCG@K with one relevant item: mean of 1 / log2(rank + 1) where rank <= k, else 0; nan without users."""
    ranks = _checked_ranks(ranks)
    return _mean(np.where(ranks <= checked_k(k), 1.0 / np.log2(ranks + 1.0), 0.0))


def mrr(ranks: np.ndarray) -> float:
    """Mean reciprocal rank: mean of 1 / rank without a cut-off; nan without users."""
    return _mean(1.0 / _checked_ranks(ranks))


def _area_per_group(groups, labels, scores) -> tuple[np.ndarray, np.ndarray]:
    """Returns AUC and size of each distinct group, by ascending group. AUC is nan for groups with one class only.

    The AUC has the Mann-Whitney form, a sum of the positives' ranks in their group. Equal scores share their middle
    rank. Ranks are doubled so that all sums are exact integers.
    """
    groups, labels, scores = np.asarray(groups), np.asarray(labels), np.asarray(scores)
    _check_predictions(groups, labels, scores)
    if not len(scores):
        return np.empty(0), np.empty(0, np.int64)
    order = np.lexsort((scores, groups))
    groups, labels, scores = groups[order], labels[order].astype(np.int64), scores[order]
    new_group = np.concatenate([[True], groups[1:] != groups[:-1]])
    new_score = new_group | np.concatenate([[True], scores[1:] != scores[:-1]])
    group_begins, tie_begins = np.flatnonzero(new_group), np.flatnonzero(new_score)
    tie_ends = np.append(tie_begins[1:], len(scores))
    before_group = group_begins[np.cumsum(new_group) - 1]
    # Inside its group, a tie has the ranks begin + 1 to end. Their sum is twice the middle rank.
    doubled_rank = (tie_begins + 1 + tie_ends)[np.cumsum(new_score) - 1] - 2 * before_group
    sizes = np.diff(np.append(group_begins, len(scores)))
    positives = np.add.reduceat(labels, group_begins)
    doubled_area = np.add.reduceat(labels * doubled_rank, group_begins) - positives * (positives + 1)
    pairs = positives * (sizes - positives)
    with np.errstate(invalid="ignore"):
        return np.where(pairs > 0, doubled_area / (2.0 * pairs), np.nan), sizes


def _indices(item_ids, order, ids) -> np.ndarray:
    """Returns the index of each id in item_ids, or -1 for an unknown id."""
    if not len(item_ids):
        return np.full(len(ids), -1, np.int64)
    at = np.searchsorted(item_ids, ids, sorter=order)
    at = order[np.minimum(at, len(item_ids) - 1)]
    return np.where(item_ids[at] == ids, at, -1)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def checked_k(k: int) -> int:
    if not isinstance(k, numbers.Integral) or k < 1:
        raise ValueError(f"k must be an int >= 1, got {k!r}.")
    return k


def _checked_ranks(ranks) -> np.ndarray:
    ranks = np.asarray(ranks)
    if len(ranks) and ranks.min() < 1:
        raise ValueError(f"ranks count from 1, got {ranks.min()}. Make them with rank_of_target.")
    return ranks


def _check_predictions(groups, labels, scores) -> None:
    if labels.ndim != 1 or not groups.shape == labels.shape == scores.shape:
        raise ValueError(
            "groups, labels and scores must be 1-D and of one length, "
            f"got {groups.shape}, {labels.shape}, {scores.shape}."
        )
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(f"labels must be 0 or 1, got {labels[~np.isin(labels, (0, 1))][0]}.")
    if not np.isfinite(scores).all():
        raise ValueError(f"scores must be finite, got {scores[~np.isfinite(scores)][0]}. Did training diverge?")


def _checked_seen(seen_ids, seen_row_splits, rows: int) -> tuple[np.ndarray, np.ndarray]:
    if seen_ids is None or seen_row_splits is None:
        raise ValueError("seen_ids and seen_row_splits must be given together, got one of them.")
    seen_ids, splits = np.asarray(seen_ids, np.int64), np.asarray(seen_row_splits, np.int64)
    bounds = splits.shape == (rows + 1,) and splits[0] == 0 and splits[-1] == len(seen_ids)
    if not bounds or (np.diff(splits) < 0).any():
        raise ValueError(
            f"seen_row_splits must run from 0 to len(seen_ids) = {len(seen_ids)} and not decrease, "
            f"with one bound more than the {rows} queries, got shape {splits.shape}. "
            "Use row_splits of the ragged history."
        )
    return seen_ids, splits


def _check_ranking(queries, items, item_ids, target_ids) -> None:
    if queries.ndim != 2 or items.ndim != 2 or queries.shape[1] != items.shape[1]:
        raise ValueError(f"queries [B, D] and items [I, D] must share D, got {queries.shape} and {items.shape}.")
    if item_ids.shape != items.shape[:1]:
        raise ValueError(f"item_ids must name each of the {len(items)} items once, got shape {item_ids.shape}.")
    if target_ids.shape != queries.shape[:1]:
        raise ValueError(f"target_ids must hold one id per query ({len(queries)}), got shape {target_ids.shape}.")
    if len(np.unique(item_ids)) != len(item_ids):
        raise ValueError("item_ids must be distinct, got repeated ids. Keep one row per item.")
