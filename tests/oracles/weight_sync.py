"""Oracle of Topology(rule="weight_sync"): 2D-SP, Algorithm 1, in float64. NumPy only; imports nothing of tf_fusedrec.

The model is linear. A sample is an id with x [D] and y, and its loss is (w[id] . x - y)^2. A group's loss is the mean
over its samples.
"""

import numpy as np


def adagrad(state, gradient, t, *, lr, c, epsilon, initial_accumulator_value):
    v = state["accumulator"] + gradient**2
    scaled = initial_accumulator_value + (v - initial_accumulator_value) / c
    return {"row": state["row"] - lr / (np.sqrt(scaled) + epsilon) * gradient, "accumulator": v}


def rowwise_adagrad(state, gradient, t, *, lr, c, epsilon):
    w, v = state["row"], state["accumulator"]
    v = v + (gradient**2).mean()  # the form of TorchRec; Algorithm 1 has the sum
    return {"row": w - lr / (np.sqrt(v / c) + epsilon) * gradient, "accumulator": v}


def adam(state, gradient, t, *, lr, c, epsilon, beta_1=0.9, beta_2=0.999):
    m = beta_1 * state["m"] + (1 - beta_1) * gradient
    v = beta_2 * state["v"] + (1 - beta_2) * gradient**2
    rate = lr * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    return {"row": state["row"] - rate * m / (np.sqrt(v / c) + epsilon), "m": m, "v": v}


def average(tables, start):
    """Gives all tables the mean of their rows. An id without a row counts as its start."""
    for i, mean in mean_of(tables, start, set().union(*tables)).items():
        for table in tables:
            table[i] = mean


def mean_of(tables, start, ids):
    found = {}
    for i in ids:
        states = [table.get(i, start(i)) for table in tables]
        found[i] = {slot: sum(state[slot] for state in states) / len(tables) for slot in states[0]}
    return found


def with_own_change(mean, before, now):
    """A row of the mean that was begun when the row was `before`. It is `now` when the mean is merged."""
    moved = {slot: mean[slot] + now[slot] - before[slot] for slot in mean}
    if "v" in moved:  # v decays, and must not become negative
        moved["v"] = np.maximum(moved["v"], np.minimum(mean["v"], now["v"]))
    return moved


def train(batches, start, update, sync_every, *, late=False, accumulate=1):
    """Trains groups apart and averages them.

    Args:
      batches: [steps][groups] of (ids [n], x [n, D], y [n]), over all ranks of a group.
      start: Function from an id to its state before training, a dict of arrays.
      update: adagrad, rowwise_adagrad or adam with bound hyperparameters; takes state, gradient and step from 1.
      sync_every: k, updates between two averages.
      late: True if the mean behind an update is merged at the end of the next step.
      accumulate: Steps whose mean gradient makes one update.

    Returns:
      A dict from id to state for each group.
    """
    tables, waiting, updates = [{} for _ in batches[0]], [{} for _ in batches[0]], 0
    for step, by_group in enumerate(batches, start=1):
        due = late and updates > 0 and updates % sync_every == 0 and step % accumulate == 1 % accumulate
        trained = set().union(*tables)  # ids that come in this step for the first time are of the next mean
        for table, gradients, (ids, x, y) in zip(tables, waiting, by_group):
            for i, x_i, y_i in zip(ids.tolist(), x.astype(np.float64), y):
                w = table.setdefault(i, start(i))["row"]
                gradients[i] = gradients.get(i, 0) + 2 * (w @ x_i - y_i) * x_i / len(ids) / accumulate
        before, means = [dict(table) for table in tables], mean_of(tables, start, trained) if due else {}
        if step % accumulate == 0:
            updates += 1
            for table, gradients in zip(tables, waiting):
                for i, gradient in gradients.items():
                    table[i] = update(table[i], gradient, updates)
                gradients.clear()
            if not late and updates % sync_every == 0:
                average(tables, start)
        for i, mean in means.items():
            for table, of_table in zip(tables, before):
                table[i] = with_own_change(mean, of_table.get(i, start(i)), table.get(i, start(i)))
    return tables
