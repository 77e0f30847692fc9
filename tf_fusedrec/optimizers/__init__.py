"""How rows of native tables are trained: records of the update rules, their Keras counterparts, their state."""

from tf_fusedrec.optimizers.keras_counterparts import from_keras, resolve
from tf_fusedrec.optimizers.rules import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad, Rule, from_dict
from tf_fusedrec.optimizers.trainer import Trainer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "RowWiseAdagrad",
    "Rule",
    "Trainer",
    "from_dict",
    "from_keras",
    "resolve",
]
