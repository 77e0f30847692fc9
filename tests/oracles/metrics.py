"""Oracles for metrics/exact.py, which compare every pair and sort every list. NumPy only."""

import numpy as np


def auc_oracle(labels, scores):
    positives = [score for label, score in zip(labels, scores) if label == 1]
    negatives = [score for label, score in zip(labels, scores) if label == 0]
    if not positives or not negatives:
        return float("nan")
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return wins / (len(positives) * len(negatives))


def gauc_oracle(groups, labels, scores, weight):
    areas, weights = [], []
    for group in sorted(set(groups.tolist())):
        mine = groups == group
        area = auc_oracle(labels[mine], scores[mine])
        if not np.isnan(area):
            areas.append(area)
            weights.append(mine.sum() if weight == "impressions" else 1)
    if not areas:
        return float("nan")
    return sum(a * w for a, w in zip(areas, weights)) / sum(weights)


def rank_oracle(scores, item_ids, target_id, seen):
    """Returns the rank of one user's target in the list sorted stably by score, without `seen`."""
    if target_id not in item_ids:
        return len(item_ids) + 1
    by_score = sorted(range(len(item_ids)), key=lambda i: -scores[i])
    shown = [item_ids[i] for i in by_score if item_ids[i] == target_id or item_ids[i] not in seen]
    return shown.index(target_id) + 1
