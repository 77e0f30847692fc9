"""All update rules by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.optimizers.adagrad import Adagrad, RowWiseAdagrad
from tf_fusedrec.optimizers.adam import Adam, AdamW, RMSprop
from tf_fusedrec.optimizers.ftrl import Ftrl
from tf_fusedrec.optimizers.rule import Rule
from tf_fusedrec.optimizers.sgd import SGD

RULES = {rule.__name__: rule for rule in (SGD, Adagrad, RowWiseAdagrad, RMSprop, Adam, AdamW, Ftrl)}


def from_dict(fields: Mapping[str, Any]) -> Rule:
    """Returns the record that `to_dict` described.

    Raises:
      ValueError: The class name is unknown, or an argument is out of its range.
    """
    fields = dict(fields)
    name = fields.pop("class_name", None)
    if name not in RULES:
        raise ValueError(f"class_name must be one of {sorted(RULES)}, got {name!r}.")
    if isinstance(fields["learning_rate"], Mapping):
        fields["learning_rate"] = keras.optimizers.schedules.deserialize(fields["learning_rate"])
    return RULES[name](**fields)
