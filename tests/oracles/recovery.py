"""Oracle for recover and recover_grad. NumPy only; imports nothing from tf_fusedrec."""

import numpy as np


def recover_oracle(rows, index):
    return np.stack([rows[i] for i in index]) if len(index) else np.zeros((0, rows.shape[1]), rows.dtype)


def recover_grad_oracle(grads, index, num_rows):
    """Sums in the order of n, in float32 for narrower types, rounded once: bit for bit what the op promises."""
    out = np.zeros((num_rows, grads.shape[1]), np.float32)
    for n, u in enumerate(index):
        out[u] += grads[n].astype(np.float32)
    return out.astype(grads.dtype)
