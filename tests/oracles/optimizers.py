"""Oracle for the update rules of native tables: dictionaries and loops over columns, in float64.

NumPy only; imports nothing from tf_fusedrec. The formulas follow the papers and Keras, column by column.
"""

import math
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """A record of tf_fusedrec.optimizers with these options, and the oracle's rule with equal options."""

    record: str
    rule: str
    options: dict[str, Any]


# Epsilons are large, so that a misplaced one shows.
CASES = {
    "sgd": Case("SGD", "sgd", {}),
    "momentum": Case("SGD", "sgd", {"momentum": 0.9}),
    "nesterov": Case("SGD", "sgd", {"momentum": 0.9, "nesterov": True}),
    "adagrad": Case("Adagrad", "adagrad", {"epsilon": 0.05, "initial_accumulator_value": 0.25}),
    "adagrad.defaults": Case("Adagrad", "adagrad", {}),
    "adagrad.inside": Case("Adagrad", "adagrad", {"epsilon": 0.05, "epsilon_inside": True}),
    # Accumulators start as high as these gradients lift them, so that a scale of the start shows.
    "adagrad.scale2": Case(
        "Adagrad", "adagrad", {"epsilon": 0.05, "initial_accumulator_value": 2.0, "moment_scale": 2.0}
    ),
    "adagrad.inside.scale4": Case(
        "Adagrad", "adagrad",
        {"epsilon": 0.05, "epsilon_inside": True, "initial_accumulator_value": 2.0, "moment_scale": 4.0},
    ),
    "rowwise": Case("RowWiseAdagrad", "rowwise_adagrad", {}),
    "rowwise.2d_sp": Case(
        "RowWiseAdagrad", "rowwise_adagrad",
        {"variant": "2d_sp", "epsilon": 0.2, "moment_scale": 4.0, "initial_accumulator_value": 20.0},
    ),
    "rowwise.torchrec": Case(
        "RowWiseAdagrad", "rowwise_adagrad", {"variant": "torchrec", "epsilon": 0.2, "moment_scale": 3.0}
    ),
    "rowwise.torchrec.scale2": Case(
        "RowWiseAdagrad", "rowwise_adagrad", {"initial_accumulator_value": 2.0, "moment_scale": 2.0}
    ),
    "rowwise.hsp": Case("RowWiseAdagrad", "rowwise_adagrad", {"variant": "hsp", "epsilon": 5.0}),
    "rmsprop": Case("RMSprop", "rmsprop", {}),
    "rmsprop.inside": Case("RMSprop", "rmsprop", {"rho": 0.8, "epsilon": 0.05, "epsilon_inside": True}),
    "rmsprop.scale4": Case("RMSprop", "rmsprop", {"epsilon": 0.05, "moment_scale": 4.0}),
    "rmsprop.inside.scale2": Case("RMSprop", "rmsprop", {"epsilon": 0.05, "epsilon_inside": True, "moment_scale": 2.0}),
    "adam": Case("Adam", "adam", {}),
    "adam.scale4": Case("Adam", "adam", {"epsilon": 0.05, "moment_scale": 4.0}),
    "adam.options": Case("Adam", "adam", {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 0.05}),
    "adamw": Case("AdamW", "adamw", {"weight_decay": 0.1}),
    "adamw.scale4": Case("AdamW", "adamw", {"weight_decay": 0.1, "epsilon": 0.05, "moment_scale": 4.0}),
    "rowwise_adam": Case("RowWiseAdam", "rowwise_adam", {"beta_2": 0.99}),
    "rowwise_adam.scale4": Case(
        "RowWiseAdam", "rowwise_adam", {"beta_1": 0.8, "epsilon": 0.05, "weight_decay": 0.1, "moment_scale": 4.0}
    ),
    "ftrl": Case("Ftrl", "ftrl", {}),
    "ftrl.options": Case(
        "Ftrl", "ftrl", {"l1": 0.5, "l2": 0.1, "l2_shrinkage": 0.2, "beta": 0.3, "initial_accumulator_value": 0.25}
    ),
    "ftrl.power": Case("Ftrl", "ftrl", {"learning_rate_power": -0.7, "l1": 0.1}),
}  # fmt: skip
OF_EACH_RULE = list({case.rule: name for name, case in CASES.items()}.values())


class OptimizerOracle:
    """One table with one rule.

    initial: [D], a new row. rule: "sgd", "adagrad", "rowwise_adagrad", "rmsprop", "adam", "adamw",
    "rowwise_adam" or "ftrl", with its options.
    """

    def __init__(self, initial, rule, clipnorm=0.0, **options):
        self.initial, self.clipnorm, self.options = np.asarray(initial, np.float64), clipnorm, options
        self.train_row = globals()[f"_{rule}"]
        self.rows, self.slots, self.updates = {}, {}, 0

    def row(self, id_):
        return self.rows.setdefault(id_, self.initial.copy())

    def step(self, ids, grads, lr):
        """Makes one update with grads [N, D] of ids [N], which may repeat. Only the rows of `ids` change."""
        self.updates += 1
        sums = {}
        for id_, grad in zip(ids, np.asarray(grads, np.float64)):
            sums[id_] = sums.get(id_, 0.0) + grad
        for id_, g in sums.items():
            norm = math.sqrt(sum(x * x for x in g))
            if self.clipnorm and norm > self.clipnorm:
                g = g * (self.clipnorm / norm)
            self.train_row(self.row(id_), g, self.slots.setdefault(id_, {}), lr, self.updates, **self.options)


def _sgd(w, g, slots, lr, t, momentum=0.0, nesterov=False):
    m = slots.setdefault("momentum", np.zeros(len(w)))
    for d in range(len(w)):
        m[d] = momentum * m[d] - lr * g[d]
        w[d] += momentum * m[d] - lr * g[d] if nesterov else m[d]


def _root(start, v, scale, epsilon, inside):
    """The divisor of a step. 2D sparse parallelism divides what the gradients added to `start` by the scale."""
    scaled = start + (v - start) / scale
    return math.sqrt(scaled + epsilon) if inside else math.sqrt(scaled) + epsilon


def _adagrad(w, g, slots, lr, t, initial_accumulator_value=0.1, epsilon=1e-7, epsilon_inside=False, moment_scale=1.0):
    v = slots.setdefault("accumulator", np.full(len(w), float(initial_accumulator_value)))
    for d in range(len(w)):
        v[d] += g[d] ** 2
        w[d] -= lr * g[d] / _root(initial_accumulator_value, v[d], moment_scale, epsilon, epsilon_inside)


def _rmsprop(w, g, slots, lr, t, rho=0.9, epsilon=1e-7, epsilon_inside=False, moment_scale=1.0):
    """Tieleman and Hinton, lecture 6.5."""
    v = slots.setdefault("v", np.zeros(len(w)))
    for d in range(len(w)):
        v[d] = rho * v[d] + (1 - rho) * g[d] ** 2
        w[d] -= lr * g[d] / _root(0, v[d], moment_scale, epsilon, epsilon_inside)


def _rowwise_adagrad(
    w, g, slots, lr, t, initial_accumulator_value=0.0, epsilon=1e-8, variant="torchrec", moment_scale=1.0
):
    """2D sparse parallelism, Algorithm 1, lines 5 and 6; TorchRec: the mean; TurboGR, eq. 1: epsilon inside."""
    squares = sum(x**2 for x in g)
    if variant == "torchrec":
        squares /= len(w)
    v = slots["accumulator"] = slots.get("accumulator", initial_accumulator_value) + squares
    root = _root(initial_accumulator_value, v, moment_scale, epsilon, variant == "hsp")
    for d in range(len(w)):
        w[d] -= lr / root * g[d]


def _adam(w, g, slots, lr, t, beta_1=0.9, beta_2=0.999, epsilon=1e-7, moment_scale=1.0):
    """Kingma and Ba, the end of section 2: the corrections are put into the learning rate."""
    m, v = (slots.setdefault(name, np.zeros(len(w))) for name in ("m", "v"))
    rate = lr * math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    for d in range(len(w)):
        m[d] = beta_1 * m[d] + (1 - beta_1) * g[d]
        v[d] = beta_2 * v[d] + (1 - beta_2) * g[d] ** 2
        w[d] -= rate * m[d] / _root(0, v[d], moment_scale, epsilon, False)


def _adamw(w, g, slots, lr, t, weight_decay=0.004, **adam):
    for d in range(len(w)):
        w[d] -= lr * weight_decay * w[d]
    _adam(w, g, slots, lr, t, **adam)


def _rowwise_adam(w, g, slots, lr, t, beta_1=0.9, beta_2=0.999, epsilon=1e-7, weight_decay=0.0, moment_scale=1.0):
    """FBGEMM, PARTIAL_ROWWISE_ADAM: v is one number, the mean of g^2 over the row; corrections and epsilon as _adam."""
    m = slots.setdefault("m", np.zeros(len(w)))
    v = slots["v"] = beta_2 * slots.get("v", 0.0) + (1 - beta_2) * sum(x**2 for x in g) / len(w)
    rate = lr * math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    for d in range(len(w)):
        m[d] = beta_1 * m[d] + (1 - beta_1) * g[d]
        w[d] -= lr * weight_decay * w[d] + rate * m[d] / _root(0, v, moment_scale, epsilon, False)


def _ftrl(
    w, g, slots, lr, t,
    learning_rate_power=-0.5, initial_accumulator_value=0.1, l1=0.0, l2=0.0, l2_shrinkage=0.0, beta=0.0,
):  # fmt: skip
    """McMahan et al., Algorithm 1, where sigma = (n'^p - n^p) / lr, w_i = 0 if |z_i| <= l1, and lr is their alpha."""
    n = slots.setdefault("accumulator", np.full(len(w), float(initial_accumulator_value)))
    z = slots.setdefault("linear", np.zeros(len(w)))
    for d in range(len(w)):
        before, n[d] = n[d] ** -learning_rate_power, n[d] + g[d] ** 2
        after = n[d] ** -learning_rate_power
        z[d] += g[d] + 2 * l2_shrinkage * w[d] - (after - before) / lr * w[d]
        w[d] = 0.0 if abs(z[d]) <= l1 else (math.copysign(l1, z[d]) - z[d]) / ((beta + after) / lr + 2 * l2)
