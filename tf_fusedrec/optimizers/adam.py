"""Lazy RMSprop, Adam and AdamW: the moments of rows outside the batch do not change."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tf_fusedrec.optimizers.rule import Rule


@dataclasses.dataclass(frozen=True)
class RMSprop(Rule):
    """v += (1 - rho)(g^2 - v); w -= lr g / (sqrt(v) + epsilon), column by column.

    Tieleman and Hinton, "Lecture 6.5, RMSProp", 2012, as in keras.optimizers.legacy.RMSprop. The rule is lazy: v of
    rows outside the batch does not decay.

    Args:
      rho: Decay rate of the mean squared gradient.
      epsilon_inside: True if the step is w -= lr g / sqrt(v + epsilon), as in keras.optimizers.RMSprop.
      moment_scale: c > 0. The step of w uses v / c instead of v. See RowWiseAdagrad.
    """

    rho: float = 0.9
    epsilon: float = 1e-7
    epsilon_inside: bool = False
    clipnorm: float = 0.0
    moment_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("moment_scale", "> 0", lambda value: value > 0)
        self._require("rho", ">= 0 and < 1", lambda value: 0 <= value < 1)
        self._require_divisor(0)

    @property
    def rule(self) -> str:
        return "rmsprop"

    @property
    def rate_scale(self) -> float:
        return math.sqrt(self.moment_scale)

    @property
    def wide_slots(self) -> tuple[str, ...]:
        return ("v",)

    @property
    def hyperparameters(self) -> list[float]:
        epsilon = self.epsilon * (self.moment_scale if self.epsilon_inside else self.rate_scale)
        return [self.clipnorm, 1 - self.rho, epsilon, float(self.epsilon_inside)]


class _Moments(Rule):
    """The hyperparameters and slots that Adam and AdamW share."""

    beta_1: float
    beta_2: float
    epsilon: float
    clipnorm: float
    moment_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("moment_scale", "> 0", lambda value: value > 0)
        for name in ("beta_1", "beta_2"):
            self._require(name, ">= 0 and < 1", lambda value: 0 <= value < 1)
        self._require_divisor(0)

    @property
    def rate_scale(self) -> float:
        return math.sqrt(self.moment_scale)

    @property
    def wide_slots(self) -> tuple[str, ...]:
        return ("m", "v")

    @property
    def hyperparameters(self) -> list[float]:
        # The op takes 1 - beta, because float32 keeps only five of its digits in beta.
        return [self.clipnorm, 1 - self.beta_1, 1 - self.beta_2, self.epsilon * self.rate_scale]

    @property
    def spec(self) -> dict[str, Any]:
        return {"rule": "adam"}  # Adam and AdamW have the same slots.


@dataclasses.dataclass(frozen=True)
class Adam(_Moments):
    """m += (1 - b1)(g - m); v += (1 - b2)(g^2 - v); w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon).

    Kingma and Ba, "Adam", ICLR 2015, the order before section 2.1, as in Keras: epsilon is the paper's epsilon hat.
    The rule is lazy: m and v of rows outside the batch do not decay.

    Args:
      moment_scale: c > 0. The step of w uses v / c instead of v. See RowWiseAdagrad.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    clipnorm: float = 0.0
    moment_scale: float = 1.0

    @property
    def rule(self) -> str:
        return "adam"


@dataclasses.dataclass(frozen=True)
class AdamW(_Moments):
    """w -= lr weight_decay w, then Adam's step (Loshchilov and Hutter, ICLR 2019; order and scaling as in Keras).

    The rule is lazy: a row decays once in every step whose batch holds it.

    Args:
      moment_scale: c of Adam's step. It does not change the decay.
    """

    weight_decay: float = 0.004
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    clipnorm: float = 0.0
    moment_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_not_negative("weight_decay")

    @property
    def rule(self) -> str:
        return "adamw"

    @property
    def hyperparameters(self) -> list[float]:
        return [*super().hyperparameters, self.weight_decay / self.rate_scale]
