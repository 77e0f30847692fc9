"""Oracle for layers/fuxi.py: a block of either form, one pair of tokens at a time, float64. NumPy only."""

import numpy as np


def silu(x):
    return x / (1.0 + np.exp(-x))


def rms_norm(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def fuxi_block_oracle(x, row_splits, maps, weights, num_heads, qk_dim, value_dim, scale):
    """Returns [T, D].

    maps: Pairs of [L, L] arrays per row, position and time.
    weights: "projection", "channel" (kernel, bias) and optionally "ffn" (gate, value, output). The form is alpha when
      the projection has columns for q and k.
    """
    inner, qk = num_heads * value_dim, num_heads * qk_dim
    projected = silu(rms_norm(x) @ weights["projection"])
    alpha = projected.shape[1] == 4 * inner + 2 * qk
    channels = 3 if alpha else 2
    u, v, q, k = np.split(projected, np.cumsum([channels * inner, inner, qk if alpha else 0]), axis=1)
    v = v.reshape(len(x), num_heads, value_dim)
    out = np.zeros((len(x), num_heads, channels, value_dim))
    for row, (begin, end) in enumerate(zip(row_splits[:-1], row_splits[1:])):
        for i in range(begin, end):
            for j in range(begin, i + 1):
                for channel in range(2):
                    out[i, :, channel] += maps[row][channel][i - begin, j - begin] * v[j]
                if alpha:
                    score = np.sum(q[i].reshape(num_heads, -1) * k[j].reshape(num_heads, -1), axis=-1)
                    out[i, :, 2] += scale * silu(score)[:, None] * v[j]
    kernel, bias = weights["channel"]
    hidden = x + (u * rms_norm(out.reshape(len(x), -1))) @ kernel + bias
    if "ffn" not in weights:
        return hidden
    gate, value, output = weights["ffn"]
    g = rms_norm(hidden)
    return hidden + (silu(g @ gate) * (g @ value)) @ output
