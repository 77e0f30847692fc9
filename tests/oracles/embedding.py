"""Oracle for FusedEmbedding: dictionaries of rows, loops over ids. NumPy only; imports nothing from tf_fusedrec.

Forward and backward run in float64, with the formulas of legacy Keras' SGD and Adagrad.
"""

import numpy as np


class TableOracle:
    """One table with rows in a dict. initial(id) gives a new row, which the first update inserts."""

    def __init__(self, dim, initial, rule, learning_rate):
        self.dim, self.initial, self.rule, self.learning_rate = dim, initial, rule, learning_rate
        self.rows, self.accumulators = {}, {}

    def row(self, id_):
        return self.rows.get(id_, self.initial(id_).astype(np.float64))

    def apply(self, gradients):
        """Applies summed gradients {id: [D]}."""
        for id_, gradient in gradients.items():
            row = self.row(id_)
            if self.rule == "adagrad":
                accumulator = self.accumulators.get(id_, np.full(self.dim, 0.1)) + gradient**2
                self.accumulators[id_] = accumulator
                self.rows[id_] = row - self.learning_rate * gradient / (np.sqrt(accumulator) + 1e-7)
            else:
                self.rows[id_] = row - self.learning_rate * gradient


def pool(table, samples, weights, combiner):
    """Pools samples, a list of id lists, with equal lists of weights or None. Returns [B, D] and each id's factor."""
    factors = []
    for b, ids in enumerate(samples):
        w = np.ones(len(ids)) if weights is None else np.asarray(weights[b], np.float64)
        norm = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
        factors.append(w / norm if norm else w * 0.0)
    pooled = [
        sum((f * table.row(i) for f, i in zip(fs, ids)), np.zeros(table.dim)) for fs, ids in zip(factors, samples)
    ]
    return np.array(pooled).reshape(len(samples), table.dim), factors


def accumulate(gradients, samples, factors, upstream):
    """Adds d loss / d row of every id; upstream [B, D] is the gradient of the pooled rows."""
    for ids, fs, grad in zip(samples, factors, upstream):
        for i, f in zip(ids, fs):
            gradients[i] = gradients.get(i, 0.0) + f * grad
