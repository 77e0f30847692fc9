"""Oracle for recover, recover_grad and their pooled forms. NumPy only; imports nothing from tf_fusedrec."""

import numpy as np


def recover_oracle(rows, index):
    return np.stack([rows[i] for i in index]) if len(index) else np.zeros((0, rows.shape[1]), rows.dtype)


def recover_grad_oracle(grads, index, num_rows):
    """Sums in the order of n, in float32 for narrower dtypes, and rounds once, bit for bit like the op."""
    out = np.zeros((num_rows, grads.shape[1]), np.float32)
    for n, u in enumerate(index):
        out[u] += grads[n].astype(np.float32)
    return out.astype(grads.dtype)


def pooled_recover_oracle(rows, index, bag_splits, bag_scale):
    """Sums in the order of n, in float32 for narrower dtypes, scales, and rounds once."""
    out = np.zeros((len(bag_scale), rows.shape[1]), np.float32)
    for g, (begin, end) in enumerate(zip(bag_splits, bag_splits[1:])):
        for n in range(begin, end):
            out[g] += rows[index[n]].astype(np.float32)
        out[g] *= np.float32(bag_scale[g])
    return out.astype(rows.dtype)


def pooled_recover_grad_oracle(grads, index, bag_splits, bag_scale, num_rows):
    out = np.zeros((num_rows, grads.shape[1]), np.float32)
    for g, (begin, end) in enumerate(zip(bag_splits, bag_splits[1:])):
        for n in range(begin, end):
            out[index[n]] += np.float32(bag_scale[g]) * grads[g].astype(np.float32)
    return out.astype(grads.dtype)
