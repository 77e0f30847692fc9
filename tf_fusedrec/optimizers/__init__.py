"""Update rules of native tables: their records, their Keras counterparts and their state."""

from tf_fusedrec.optimizers.rules import SGD, Adagrad, Adam, AdamW, Ftrl, RMSprop, RowWiseAdagrad

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "RMSprop", "RowWiseAdagrad"]
