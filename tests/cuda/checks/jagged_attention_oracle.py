"""Oracle of jagged attention and its gradients: the definitions, one dense sequence after another. NumPy, float64.

(tests/oracles/jagged_attention.py does it in TensorFlow, which a machine with a GPU need not have.)
"""

from __future__ import annotations

import numpy as np

from tests.oracles.visible_pairs import visible_pairs


def _sequences(case):
    splits = np.asarray(case["row_splits"])
    targets = case.get("num_targets")
    for b, (begin, end) in enumerate(zip(splits[:-1], splits[1:])):
        yield slice(begin, end), 0 if targets is None else targets[b]


def _bias(case, rows, targets):
    """Index of the position weight and bucket of every pair, and their sum of weights; 0 and None without."""
    length = rows.stop - rows.start
    position = bucket = None
    bias = np.zeros([length, length])
    if case.get("position_weights") is not None:
        weights = np.asarray(case["position_weights"], np.float64)
        places = np.minimum(np.arange(length), length - targets)
        position = len(weights) // 2 + places[None, :] - places[:, None]
        bias = bias + weights[position]
    if case.get("time_weights") is not None:
        asks, answers = (np.asarray(case[name])[rows].astype(object) for name in ("asks", "answers"))
        difference = np.abs(asks[:, None] - answers[None, :])  # Python integers: no difference overflows
        bucket = np.sum([difference >= int(t) for t in case["thresholds"]], axis=0).astype(np.int64)
        bucket = bucket.reshape(length, length)
        bias = bias + np.asarray(case["time_weights"], np.float64)[bucket]
    return position, bucket, bias


def _scores(case, rows, targets):
    query, key = (np.asarray(case[name], np.float64)[rows] for name in ("query", "key"))
    position, bucket, bias = _bias(case, rows, targets)
    scores = case.get("alpha", 1.0) * np.einsum("ihd,jhd->hij", query, key) + bias
    seen = visible_pairs(rows.stop - rows.start, targets, **case.get("masks", {}))
    scale = np.broadcast_to(np.asarray(case["scale"], np.float64), [len(case["value"])])[rows]
    return scores, seen, scale, position, bucket


def attention(**case):
    """[T, H, value_dim]."""
    out = np.zeros(case["value"].shape)
    for rows, targets in _sequences(case):
        scores, seen, scale, _, _ = _scores(case, rows, targets)
        weights = scores / (1.0 + np.exp(-scores)) * seen * scale[:, None]
        out[rows] = np.einsum("hij,jhd->ihd", weights, np.asarray(case["value"], np.float64)[rows])
    return out


def attention_grad(*, grads, **case):
    """query_grads, key_grads, value_grads, position_grads, time_grads by name."""
    out = {f"{name}_grads": np.zeros(case[name].shape) for name in ("query", "key", "value")}
    out["position_grads"] = np.zeros(len(case.get("position_weights", ())))
    out["time_grads"] = np.zeros(len(case.get("time_weights", ())))
    for rows, targets in _sequences(case):
        scores, seen, scale, position, bucket = _scores(case, rows, targets)
        query, key, value = (np.asarray(case[name], np.float64)[rows] for name in ("query", "key", "value"))
        gate = 1.0 / (1.0 + np.exp(-scores))
        slope = gate * (1.0 + scores * (1.0 - gate)) * seen * scale[:, None]
        of_scores = np.einsum("ihd,jhd->hij", np.asarray(grads, np.float64)[rows], value) * slope
        out["value_grads"][rows] = np.einsum("hij,ihd->jhd", scores * gate * seen * scale[:, None], grads[rows])
        out["query_grads"][rows] = case.get("alpha", 1.0) * np.einsum("hij,jhd->ihd", of_scores, key)
        out["key_grads"][rows] = case.get("alpha", 1.0) * np.einsum("hij,ihd->jhd", of_scores, query)
        if position is not None:
            np.add.at(out["position_grads"], position, of_scores.sum(axis=0))
        if bucket is not None:
            np.add.at(out["time_grads"], bucket, of_scores.sum(axis=0))
    return out
