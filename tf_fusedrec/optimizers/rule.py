"""The update rules of a native table's rows: frozen records, applied by custom_ops/hash_table/cpu/parts/optimizer.cc.

Every rule is sparse: a step changes the rows of its batch and no other, so that what a slot holds of a row that is not
seen stays as it is ("lazy"). In the formulas w is a row, g its gradient summed over the batch and all ranks, lr the
learning rate, t the number of the update, 1 for the first, counted per table and not per row.

Two arguments are the same in all records:
  learning_rate: a number, or a Keras LearningRateSchedule over the updates done so far.
  clipnorm: g is scaled to at most this L2 norm, row by row; 0: off. The norm of one row depends neither on the rest of
    the batch, nor on the number of ranks, nor on the grouping of tables; Keras' clipnorm takes a whole variable.
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
    """Base of the records; custom_ops/hash_table/cpu/parts/optimizer.h has the other side.

    Args:
      learning_rate: lr >= 0, or a schedule of keras.optimizers.schedules, of the updates of the tables.
      epsilon: keeps the divisor from 0.
      beta_1, beta_2: decay of the mean of gradients and of that of their squares.
      weight_decay: share of a row, times the learning rate, that a step takes off.
      clipnorm: largest norm of the gradient of one row; a longer one is shortened to it. 0 for no limit.

    Raises:
      ValueError: an argument is out of its range.
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
        """Numbers of the rule in the op, clipnorm first."""

    @property
    def rate_scale(self) -> float:
        """Factor of the learning rate in the op.

        With a moment scale c of an element-wise v it is sqrt(c), and epsilon is scaled alike, so that the op need not
        know c: lr / (sqrt(v / c) + epsilon) = sqrt(c) lr / (sqrt(v) + sqrt(c) epsilon).
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
        """Value of each slot of a row that was never trained."""
        start = getattr(self, "initial_accumulator_value", 0.0)
        return {slot: start if slot == "accumulator" else 0.0 for slot in (*self.wide_slots, *self.scalar_slots)}

    @property
    def spec(self) -> dict[str, Any]:
        """What gives the slots their meaning: slots pass from one record to another only where this is equal.

        What may change while a model is trained (rate, clipping, decay, epsilon) is not in it. JSON-able.
        """
        return {"rule": self.rule}

    def with_moment_scale(self, moment_scale: float) -> Rule:
        """The record with this moment scale; itself where it has none, or one that is not 1."""
        if getattr(self, "moment_scale", None) != 1.0:
            return self
        fields = {"moment_scale": moment_scale}
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` is the inverse."""
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
        """epsilon may be 0 only where the root that it stands beside starts above 0."""
        if start > 0:
            self._require_not_negative("epsilon")
        else:
            wanted = "> 0 (without it, the step of a new row whose gradient is 0 would be 0 / 0)"
            self._require("epsilon", wanted, lambda value: value > 0)
