"""Oracle of jagged attention, of its channels, its gate and their gradients, float64: one dense row after another.

NumPy only, because a machine with a GPU need not have TensorFlow. A case has the arguments of the op by name:

    query, key, value, row_splits, scale, alpha, num_targets, masks (contextual_length, ...)
    position_weights; time (buckets or a function), time_weights, thresholds, asks, answers
    dropped, pair_seed; gate, per_head, gate_first, epsilon, norm_weight, norm_bias

Every token asks.
"""

from __future__ import annotations

import numpy as np

from tests.oracles.visible_pairs import masks_of_row, visible_pairs


def _sequences(case):
    """Yields the tokens, the number of targets and the mask of each row."""
    splits = np.asarray(case["row_splits"])
    targets = case.get("num_targets")
    for b, (begin, end) in enumerate(zip(splits[:-1], splits[1:])):
        count = 0 if targets is None else targets[b]
        seen = visible_pairs(end - begin, count, **masks_of_row(case.get("masks", {}), b))
        if case.get("dropped") and end > begin:
            seen = seen * _kept(case, b, end - begin)
        yield slice(begin, end), count, seen


def mixed(bits):
    """lowbias32 (Wellons), of numbers below 2^32."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D % 2**32
    bits = (bits ^ (bits >> 15)) * 0x846CA68B % 2**32
    return bits ^ (bits >> 16)


def dropout_of(dropout, seed):
    """Returns `dropped` and `pair_seed` of a share of hidden pairs and a seed <int64>."""
    low, high = seed % 2**32, (seed >> 32) % 2**32
    return {"dropped": int(float(np.float32(dropout)) * 2**31), "pair_seed": mixed(low ^ mixed(high))}


def _kept(case, row, length):
    """Returns <bool>[H, length, length] by head, query and key, False for pairs that dropout hides."""

    def after(bits, number):
        return mixed((bits + number * 0x9E3779B9) % 2**32)

    numbers = np.arange(length, dtype=np.uint64)
    of_row = after(np.full([1, 1, 1], case["pair_seed"], np.uint64), np.full([1, 1, 1], row, np.uint64))
    of_head = after(of_row, np.arange(case["value"].shape[1], dtype=np.uint64).reshape(-1, 1, 1))
    return after(after(of_head, numbers.reshape(1, 1, -1)), numbers.reshape(1, -1, 1)) >> 1 >= case["dropped"]


def _position(case, rows, targets):
    """Returns the map of the distances, and the index of the weight of every pair."""
    weights, length = np.asarray(case["position_weights"], np.float64), rows.stop - rows.start
    places = np.minimum(np.arange(length), length - targets)
    index = len(weights) // 2 + places[None, :] - places[:, None]
    return weights[index], index


def _seconds(case, rows):
    asks, answers = (np.asarray(case[name])[rows].astype(object) for name in ("asks", "answers"))
    return asks[:, None] - answers[None, :]  # Python integers: no difference overflows


def _buckets(case, rows):
    """Returns the map of the time buckets, and the bucket of every pair."""
    difference = np.abs(_seconds(case, rows))
    bucket = np.sum([difference >= int(t) for t in case["thresholds"]], axis=0).astype(np.int64)
    bucket = bucket.reshape(difference.shape)
    return np.asarray(case["time_weights"], np.float64)[bucket], bucket


def _function(case, rows):
    """Returns the map of a function of time, and its derivatives by the parameters."""
    past = np.maximum(_seconds(case, rows), 0).astype(np.float64)
    a, b, *more = np.asarray(case["time_weights"], np.float64)
    if case["time"] == "power":
        unit, inner = (past + 1) ** -b, [-np.log(past + 1)]
    elif case["time"] == "exponential":
        unit, inner = np.exp(-np.exp(b) * past), [-np.exp(b) * past]
    else:
        rate, power = np.log1p(np.exp(b)), (past + 1) ** more[0]
        unit = np.exp(-rate * power)
        inner = [-power / (1 + np.exp(-b)), -rate * power * np.log(past + 1)]
    return a * unit, [unit, *(a * unit * x for x in inner)]


def _time(case, rows):
    return (_buckets if case["time"] == "buckets" else _function)(case, rows)


def _bias(case, rows, targets):
    """Returns the position index, the bucket or derivatives of time, and the sum of weights of every pair."""
    position = bucket = None
    bias = np.zeros([rows.stop - rows.start] * 2)
    if case.get("position_weights") is not None:
        weights, position = _position(case, rows, targets)
        bias = bias + weights
    if case.get("time_weights") is not None:
        weights, bucket = _time(case, rows)
        bias = bias + weights
    return position, bucket, bias


def _scores(case, rows, targets):
    query, key = (np.asarray(case[name], np.float64)[rows] for name in ("query", "key"))
    position, bucket, bias = _bias(case, rows, targets)
    scores = case.get("alpha", 1.0) * np.einsum("ihd,jhd->hij", query, key) + bias
    scale = np.broadcast_to(np.asarray(case["scale"], np.float64), [len(case["value"])])[rows]
    return scores, scale, position, bucket


def attention(**case):
    """Returns [T, H, value_dim], before the gate."""
    out = np.zeros(case["value"].shape)
    for rows, targets, seen in _sequences(case):
        scores, scale, _, _ = _scores(case, rows, targets)
        weights = scores / (1.0 + np.exp(-scores)) * seen * scale[:, None]
        out[rows] = np.einsum("hij,jhd->ihd", weights, np.asarray(case["value"], np.float64)[rows])
    return out


def attention_grad(*, grads, **case):
    """query_grads, key_grads, value_grads, position_grads, time_grads by name."""
    out = {f"{name}_grads": np.zeros(case[name].shape) for name in ("query", "key", "value")}
    out.update({f"{name}_grads": np.zeros(len(case.get(f"{name}_weights", ()))) for name in ("position", "time")})
    for rows, targets, seen in _sequences(case):
        scores, scale, position, bucket = _scores(case, rows, targets)
        query, key, value = (np.asarray(case[name], np.float64)[rows] for name in ("query", "key", "value"))
        gate = 1.0 / (1.0 + np.exp(-scores))
        slope = gate * (1.0 + scores * (1.0 - gate)) * seen * scale[:, None]
        of_scores = np.einsum("ihd,jhd->hij", np.asarray(grads, np.float64)[rows], value) * slope
        out["value_grads"][rows] = np.einsum("hij,ihd->jhd", scores * gate * seen * scale[:, None], grads[rows])
        out["query_grads"][rows] = case.get("alpha", 1.0) * np.einsum("hij,jhd->ihd", of_scores, key)
        out["key_grads"][rows] = case.get("alpha", 1.0) * np.einsum("hij,ihd->jhd", of_scores, query)
        if position is not None:
            np.add.at(out["position_grads"], position, of_scores.sum(axis=0))
        if isinstance(bucket, list):
            out["time_grads"] += [np.sum(of_scores * slope) for slope in bucket]
        elif bucket is not None:
            np.add.at(out["time_grads"], bucket, of_scores.sum(axis=0))
    return out


def _channels(case, rows, targets):
    """Yields for each channel the name of its weights' gradients, the map, and the map's index or derivatives."""
    if case.get("position_weights") is not None:
        yield "position_grads", *_position(case, rows, targets)
    if case.get("time_weights") is not None:
        yield "time_grads", *_time(case, rows)


def bias_attention(**case):
    """Returns [T, H, channels * value_dim]."""
    tokens, heads, dim = case["value"].shape
    channels = sum(case.get(name) is not None for name in ("position_weights", "time_weights"))
    out = np.zeros([tokens, heads, channels, dim])
    for rows, targets, seen in _sequences(case):
        for c, (_, weights, _) in enumerate(_channels(case, rows, targets)):
            out[rows, :, c] = np.einsum("ij,jhd->ihd", weights * seen, np.asarray(case["value"], np.float64)[rows])
    return out.reshape(tokens, heads, channels * dim)


def bias_attention_grad(*, grads, **case):
    """value_grads, position_grads, time_grads by name."""
    out = {f"{name}_grads": np.zeros(len(case.get(f"{name}_weights", ()))) for name in ("position", "time")}
    out["value_grads"] = np.zeros(case["value"].shape)
    tokens, heads, dim = case["value"].shape
    channels = sum(case.get(name) is not None for name in ("position_weights", "time_weights"))
    parts = np.asarray(grads, np.float64).reshape(tokens, heads, channels, dim)
    for rows, targets, seen in _sequences(case):
        value = case["value"][rows]
        for c, (name, weights, made_of) in enumerate(_channels(case, rows, targets)):
            out["value_grads"][rows] += np.einsum("ij,ihd->jhd", weights * seen, parts[rows, :, c])
            of_map = np.einsum("ihd,jhd->ij", parts[rows, :, c], np.asarray(value, np.float64)) * seen
            if isinstance(made_of, list):
                out[name] += [np.sum(of_map * slope) for slope in made_of]
            else:
                np.add.at(out[name], made_of, of_map)
    return out


def gate(attended, *, grads, **case):
    """Returns the gated result, and the gradients of attended, gate and the norm's weights by name."""
    tokens, heads, dim = attended.shape
    groups = [tokens, heads if case["per_head"] else 1, -1]
    factor = np.asarray(case["gate"], np.float64)
    inputs = (attended * factor if case["gate_first"] else attended).reshape(groups)
    deviation = np.sqrt(inputs.var(-1, keepdims=True) + case["epsilon"])
    norm = ((inputs - inputs.mean(-1, keepdims=True)) / deviation).reshape(attended.shape)
    weight, bias = (
        (np.asarray(case.get(name, number), np.float64) * np.ones(heads * dim)).reshape(heads, dim)
        for name, number in (("norm_weight", 1.0), ("norm_bias", 0.0))
    )
    y = norm * weight + bias
    behind = grads if case["gate_first"] else grads * factor
    of_norm, flat = (behind * weight).reshape(groups), norm.reshape(groups)
    means = of_norm.mean(-1, keepdims=True), (of_norm * flat).mean(-1, keepdims=True)
    of_input = ((of_norm - means[0] - flat * means[1]) / deviation).reshape(attended.shape)
    return (y if case["gate_first"] else y * factor), {
        "attended_grads": of_input * factor if case["gate_first"] else of_input,
        "gate_grads": of_input * attended if case["gate_first"] else grads * y,
        "norm_weight_grads": (behind * norm).sum(axis=0).reshape(-1),
        "norm_bias_grads": behind.sum(axis=0).reshape(-1),
    }
