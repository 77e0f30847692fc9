"""Update rules of native tables: their records, their Keras counterparts and their state."""

from tf_fusedrec.optimizers.keras_counterparts import from_keras, resolve
from tf_fusedrec.optimizers.rules import SGD, Adagrad, Adam, AdamW, Ftrl, RMSprop, RowWiseAdagrad, Rule, from_dict
from tf_fusedrec.optimizers.trainer import Trainer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "RMSprop",
    "RowWiseAdagrad",
    "Rule",
    "Trainer",
    "from_dict",
    "from_keras",
    "resolve",
]
