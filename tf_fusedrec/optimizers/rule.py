"""The base of every update rule of a native table: a frozen record that custom_ops/hash_table applies.

Every rule is sparse ("lazy"): a step changes the rows and slots of its batch and no others. In the formulas, w is a
row, g its gradient summed over the batch and all ranks, and lr the learning rate. t is the number of the update,
counted per table from 1.

All records share two arguments:
  learning_rate: A number, or a Keras LearningRateSchedule over the number of past updates.
  clipnorm: Largest L2 norm of a row's gradient g, to which a longer g is scaled; 0 for no limit. One row's norm does
    not depend on the rest of the batch, the number of ranks or the grouping of tables. Keras' clipnorm takes the norm
    of a whole variable.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, Union

from tf_fusedrec._tf_compat import keras

Schedule = keras.optimizers.schedules.LearningRateSchedule
LearningRate = Union[float, "keras.optimizers.schedules.LearningRateSchedule"]


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """Base of the records. custom_ops/hash_table/cpu/rows/optimizer.h is their C++ counterpart.

    Args:
      learning_rate: lr >= 0, or a schedule of keras.optimizers.schedules over the tables' updates.
      epsilon: Term that keeps the divisor above 0.
      beta_1, beta_2: Decay rates of the mean gradient and of the mean squared gradient.
      weight_decay: Share of a row, times the learning rate, that a step subtracts.
      clipnorm: Largest norm of one row's gradient, to which a longer gradient is scaled. 0 for no limit.

    Raises:
      ValueError: An argument is out of its range.
    """

    learning_rate: LearningRate

    def __post_init__(self) -> None:
        if not isinstance(self.learning_rate, Schedule):
            wanted = ">= 0, or a LearningRateSchedule of keras.optimizers.schedules"
            self._require("learning_rate", wanted, lambda value: value >= 0)
        self._require_not_negative("clipnorm")

    @property
    @abc.abstractmethod
    def rule(self) -> str:
        """Name of the rule in the op."""

    @property
    @abc.abstractmethod
    def hyperparameters(self) -> list[float]:
        """Hyperparameters of the rule in the op's order, clipnorm first."""

    @property
    def rate_scale(self) -> float:
        """Factor of the learning rate in the op.

        For a moment scale c of an element-wise v, the factor is sqrt(c), and epsilon is scaled by it too. The op then
        needs no c: lr / (sqrt(v / c) + epsilon) = sqrt(c) lr / (sqrt(v) + sqrt(c) epsilon). Adagrad's v starts at v0,
        which the scale leaves alone: its op takes one number more.
        """
        return 1.0

    @property
    def wide_slots(self) -> tuple[str, ...]:
        """Names of the slots that hold D numbers per row."""
        return ()

    @property
    def scalar_slots(self) -> tuple[str, ...]:
        """Names of the slots that hold one number per row."""
        return ()

    @property
    def slot_starts(self) -> dict[str, float]:
        """Initial value of each slot in a new row."""
        start = getattr(self, "initial_accumulator_value", 0.0)
        return {slot: start if slot == "accumulator" else 0.0 for slot in (*self.wide_slots, *self.scalar_slots)}

    @property
    def spec(self) -> dict[str, Any]:
        """Description of the slots' meaning, JSON-able. Records with equal specs can take over each other's slots.

        Options that may change in the course of training (rate, clipping, decay, epsilon) are not part of it.
        """
        return {"rule": self.rule}

    def with_moment_scale(self, moment_scale: float) -> Rule:
        """Returns the record with this moment scale if its own is 1, else the record itself."""
        if getattr(self, "moment_scale", None) != 1.0:
            return self
        fields = {"moment_scale": moment_scale}
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able dict. `from_dict` is the inverse."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        kept = {name: v if isinstance(v, (bool, str, Schedule)) else float(v) for name, v in values.items()}
        if isinstance(self.learning_rate, Schedule):
            kept["learning_rate"] = keras.optimizers.schedules.serialize(self.learning_rate)
        return {"class_name": type(self).__name__, **kept}

    def _require(self, name: str, wanted: str, holds: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not holds(float(value)):
            raise ValueError(f"{type(self).__name__}.{name} must be a finite number {wanted}, got {value!r}.")

    def _require_not_negative(self, *names: str) -> None:
        for name in names:
            self._require(name, ">= 0", lambda value: value >= 0)

    def _require_divisor(self, start: float) -> None:
        """Checks epsilon, which may be 0 only where the square root in the same divisor starts above 0."""
        if start > 0:
            self._require_not_negative("epsilon")
        else:
            wanted = "> 0 (with 0, the step of a new row with a zero gradient would be 0 / 0)"
            self._require("epsilon", wanted, lambda value: value > 0)
