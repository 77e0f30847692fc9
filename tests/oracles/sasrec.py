"""Oracle for layers/sasrec.py: one block, one token at a time, float64. NumPy only."""

import numpy as np


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-8)


def sasrec_block_oracle(x, row_splits, weights, num_heads):
    """weights: "query", "key", "value", "output", "hidden", "ffn"; each (kernel [in, out], bias)."""

    def dense(name, inputs):
        kernel, bias = weights[name]
        return inputs @ kernel + bias

    asks = layer_norm(x)
    query, key, value = (
        dense(name, part).reshape(len(x), num_heads, x.shape[1] // num_heads)
        for name, part in (("query", asks), ("key", x), ("value", x))
    )
    attended = np.zeros(x.shape)
    for begin, end in zip(row_splits[:-1], row_splits[1:]):
        for i in range(begin, end):
            scores = np.sum(query[i] * key[begin : i + 1], axis=-1) / np.sqrt(query.shape[-1])  # [i + 1, H]
            weight = np.exp(scores - scores.max(axis=0))
            weight /= weight.sum(axis=0)
            attended[i] = np.sum(weight[:, :, None] * value[begin : i + 1], axis=0).reshape(-1)
    hidden = layer_norm(asks + dense("output", attended))
    return hidden + dense("ffn", np.maximum(dense("hidden", hidden), 0.0))
