"""Oracle of Topology(rule="weight_sync"): 2D-SP, Algorithm 1, in float64. NumPy only; imports nothing of tf_fusedrec.

The model is linear. A sample is an id with x [D] and y, and its loss is (w[id] . x - y)^2. A group's loss is the mean
over its samples.
"""

import numpy as np


def rowwise_adagrad(state, gradient, t, *, lr, c, epsilon):
    w, v = state["row"], state["accumulator"]
    v = v + (gradient**2).sum()
    return {"row": w - lr / (np.sqrt(v / c) + epsilon) * gradient, "accumulator": v}


def adam(state, gradient, t, *, lr, c, epsilon, beta_1=0.9, beta_2=0.999):
    m = beta_1 * state["m"] + (1 - beta_1) * gradient
    v = beta_2 * state["v"] + (1 - beta_2) * gradient**2
    rate = lr * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    return {"row": state["row"] - rate * m / (np.sqrt(v / c) + epsilon), "m": m, "v": v}


def train(batches, start, update, sync_every):
    """Trains groups apart and averages them.

    Args:
      batches: [steps][groups] of (ids [n], x [n, D], y [n]), over all ranks of a group.
      start: Function from an id to its state before training, a dict of arrays.
      update: rowwise_adagrad or adam with bound hyperparameters; takes state, gradient and step from 1.
      sync_every: k, steps between two averages.

    Returns:
      A dict from id to state for each group.
    """
    groups = len(batches[0])
    tables = [{} for _ in range(groups)]
    for t, by_group in enumerate(batches, start=1):
        for table, (ids, x, y) in zip(tables, by_group):
            gradients = {}
            for i, x_i, y_i in zip(ids.tolist(), x.astype(np.float64), y):
                w = table.setdefault(i, start(i))["row"]
                gradients[i] = gradients.get(i, 0) + 2 * (w @ x_i - y_i) * x_i / len(ids)
            for i, gradient in gradients.items():
                table[i] = update(table[i], gradient, t)
        if t % sync_every == 0:
            for i in set().union(*tables):
                states = [table.get(i, start(i)) for table in tables]
                mean = {slot: sum(state[slot] for state in states) / groups for slot in states[0]}
                for table in tables:
                    table[i] = mean
    return tables
