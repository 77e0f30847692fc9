"""Oracles for layers/hstu.py: its forms, attention one pair of tokens at a time, float64. NumPy only."""

import numpy as np


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def layer_norm(x, epsilon=1e-6):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)


def causal_silu_attention(query, key, value, row_splits, scale, bias=lambda row, i, j: 0.0):
    """[T, H, D] queries, keys, values -> [T, H * Dv]. Tokens i and j of a row have this bias in all heads."""
    out = np.zeros(value.shape)
    for row, (begin, end) in enumerate(zip(row_splits[:-1], row_splits[1:])):
        for i in range(begin, end):
            for j in range(begin, i + 1):
                score = np.sum(query[i] * key[j], axis=-1) + bias(row, i - begin, j - begin)
                out[i] += scale * silu(score)[:, None] * value[j]
    return out.reshape(len(value), -1)


def _heads(x, num_heads):
    return x.reshape(len(x), num_heads, -1)


def mtgrboost_block_oracle(x, row_splits, weights, num_heads, qk_dim, value_dim, scale):
    """Equations 1-3 with residual. weights: projection kernel, bias, output kernel, bias (norm at its start)."""
    kernel, bias, out_kernel, out_bias = weights
    qk, inner = num_heads * qk_dim, num_heads * value_dim
    u, q, k, v = np.split(silu(x @ kernel + bias), np.cumsum([inner, qk, qk]), axis=1)
    attended = causal_silu_attention(*(_heads(part, num_heads) for part in (q, k, v)), row_splits, scale)
    return x + layer_norm(attended * u) @ out_kernel + out_bias


def production_block_oracle(x, row_splits, weights, num_heads, qk_dim, value_dim, scale):
    """weights: "input_norm" and "norm" (weight, bias), "projection" (kernel, bias), "output" (kernel,)."""
    scale_in, shift_in = weights["input_norm"]
    kernel, bias = weights["projection"]
    projected = (layer_norm(x) * scale_in + shift_in) @ kernel + bias
    qk, inner = num_heads * qk_dim, num_heads * value_dim
    u, v, q, k = np.split(projected, np.cumsum([inner, inner, qk]), axis=1)
    q = q / np.sqrt(qk_dim)
    attended = causal_silu_attention(*(_heads(part, num_heads) for part in (q, k, v)), row_splits, scale)
    weight, shift = weights["norm"]
    return x + (silu(u) * (layer_norm(attended) * weight + shift)) @ weights["output"][0]


def research_block_oracle(x, row_splits, weights, bias, num_heads, qk_dim, value_dim, scale):
    """weights: projection kernel, output kernel and bias. bias: as for causal_silu_attention."""
    kernel, out_kernel, out_bias = weights
    qk, inner = num_heads * qk_dim, num_heads * value_dim
    u, v, q, k = np.split(silu(layer_norm(x) @ kernel), np.cumsum([inner, inner, qk]), axis=1)
    attended = causal_silu_attention(*(_heads(part, num_heads) for part in (q, k, v)), row_splits, scale, bias)
    return x + (u * layer_norm(attended)) @ out_kernel + out_bias
