"""Follow the regularized leader."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec.optimizers.rule import Rule


@dataclasses.dataclass(frozen=True)
class Ftrl(Rule):
    """n' = n + g^2; z += g + 2 l2_shrinkage w - (n'^-p - n^-p) / lr w; w = (clip(z, -l1, l1) - z) / (n'^-p / lr + 2 l).

    p is learning_rate_power, l = l2 + beta / (2 lr), and clip limits z to [-l1, l1]. McMahan et al., "Ad Click
    Prediction: a View from the Trenches", KDD 2013, Algorithm 1, as in Keras. n is the slot "accumulator", z "linear".
    A step with the learning rate 0 changes nothing, because the formula divides by it.

    Args:
      learning_rate_power: p <= 0. 0 keeps the learning rate constant. -0.5 computes faster than other values, because
        it needs no power function.
      initial_accumulator_value: Initial n of a new row; see Adagrad.
    """

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0
    clipnorm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("learning_rate_power", "<= 0", lambda value: value <= 0)
        self._require_not_negative("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta")

    @property
    def rule(self) -> str:
        return "ftrl"

    @property
    def wide_slots(self) -> tuple[str, ...]:
        return ("accumulator", "linear")

    @property
    def hyperparameters(self) -> list[float]:
        start, power = self.initial_accumulator_value, self.learning_rate_power
        return [self.clipnorm, start, power, self.l1, self.l2, self.l2_shrinkage, self.beta]

    @property
    def spec(self) -> dict[str, Any]:
        # z is a sum of powers of n, so the slots have another meaning under another power.
        return {"rule": self.rule, "learning_rate_power": self.learning_rate_power}
