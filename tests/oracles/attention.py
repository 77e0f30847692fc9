"""Oracles for layers/attention.py, masks.py and hstu.py: one row, one pair of tokens at a time, float64. NumPy only."""

import numpy as np


def mask_oracle(length, num_targets, contextual_length):
    """Visible pairs [length, length]; num_targets None or int. The rule of the public operators, literally."""
    c = contextual_length

    def number(place):
        group = max(place - c + 1, 0) if c > 0 else place
        return group if num_targets is None else min(group, top)

    top = length - (num_targets or 0) - (c - 1 if c > 0 else 0)
    visible = np.zeros((length, length), bool)
    for asks in range(length):
        for answers in range(length):
            visible[asks, answers] = asks == answers or number(asks) > number(answers)
            if c > 0 and number(asks) == 0 and number(answers) < top:
                visible[asks, answers] = True
    return visible


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def attention_oracle(query, key, value, row_splits, scale, num_targets, contextual_length, biases=None):
    """out [T, H, Dv]. num_targets None or [B]; biases None or one [L, L] per row."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros(value.shape)
    for row, (begin, end) in enumerate(zip(row_splits[:-1], row_splits[1:])):
        targets = None if num_targets is None else int(num_targets[row])
        visible = mask_oracle(end - begin, targets, contextual_length)
        for i in range(end - begin):
            for j in range(end - begin):
                if visible[i, j]:
                    score = np.sum(query[begin + i] * key[begin + j], axis=-1)  # [H]
                    score = score + (0.0 if biases is None else biases[row][i, j])
                    out[begin + i] += scale * (score * sigmoid(score))[:, None] * value[begin + j]
    return out


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def mtgrboost_block_oracle(x, row_splits, weights, num_heads, qk_dim, value_dim, scale):
    """Equations 1-3 with residual. weights: projection kernel, bias, output kernel, bias (norm at its start)."""
    kernel, bias, out_kernel, out_bias = weights
    projected = x @ kernel + bias
    projected = projected * sigmoid(projected)
    qk, inner = num_heads * qk_dim, num_heads * value_dim
    u, q, k, v = np.split(projected, np.cumsum([inner, qk, qk]), axis=1)
    q, k = (part.reshape(-1, num_heads, qk_dim) for part in (q, k))
    attended = attention_oracle(q, k, v.reshape(-1, num_heads, value_dim), row_splits, scale, None, 0)
    return x + layer_norm(attended.reshape(-1, inner) * u) @ out_kernel + out_bias
