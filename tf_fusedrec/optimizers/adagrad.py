"""Adagrad with one accumulator per element, and with one per row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tf_fusedrec.optimizers.rule import Rule

VARIANTS = ("torchrec", "2d_sp", "hsp")


@dataclasses.dataclass(frozen=True)
class Adagrad(Rule):
    """v += g^2; w -= lr g / (sqrt(v) + epsilon), column by column.

    Duchi et al., "Adaptive Subgradient Methods", JMLR 2011, diagonal form, as in keras.optimizers.legacy.Adagrad.

    Args:
      initial_accumulator_value: v0, initial v of a new row. The default, Keras' own, is far above g^2 of a loss that is
        a mean over a large batch, and rows hardly train: pass 1e-6 there.
      epsilon_inside: True if the step is w -= lr g / sqrt(v + epsilon), as in keras.optimizers.Adagrad.
      moment_scale: c > 0. The step of w uses v0 + (v - v0) / c instead of v. See RowWiseAdagrad.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7
    epsilon_inside: bool = False
    clipnorm: float = 0.0
    moment_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("moment_scale", "> 0", lambda value: value > 0)
        self._require_not_negative("initial_accumulator_value")
        self._require_divisor(self.initial_accumulator_value)

    @property
    def rule(self) -> str:
        return "adagrad"

    @property
    def rate_scale(self) -> float:
        return math.sqrt(self.moment_scale)

    @property
    def wide_slots(self) -> tuple[str, ...]:
        return ("accumulator",)

    @property
    def hyperparameters(self) -> list[float]:
        epsilon = self.epsilon * (self.moment_scale if self.epsilon_inside else self.rate_scale)
        offset = (self.moment_scale - 1) * self.initial_accumulator_value  # c (v0 + (v - v0) / c) - v
        return [self.clipnorm, self.initial_accumulator_value, epsilon, float(self.epsilon_inside), offset]


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Rule):
    """v += mean of g^2 over the row; w -= lr g / (sqrt(v) + epsilon): Adagrad with one accumulator per row.

    Args:
      initial_accumulator_value: v0, initial v of a new row.
      variant: Form of the rule, because frameworks and papers disagree.
        "torchrec" is the form above (FBGEMM's EXACT_ROWWISE_ADAGRAD).
        "2d_sp" has v += sum of g^2 over the row (Zhang et al., "Two-dimensional Sparse Parallelism", Algorithm 1, lines
        5 and 6). With D columns and epsilon 0, its learning rate is 1 / sqrt(D) of torchrec's.
        "hsp" has the sum, and epsilon inside the root, w -= lr g / sqrt(v + epsilon) (TurboGR, eq. 1, row by row).
      moment_scale: c > 0, at most the number of replica groups (2D sparse parallelism, Scaling Rule 1). The step of w
        uses v0 + (v - v0) / c instead of v: gradients of small groups make v grow too fast, but not v0. A layer with
        averaged replicas replaces the value 1; see Topology.
    """

    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8
    variant: str = "torchrec"
    moment_scale: float = 1.0
    clipnorm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise ValueError(f"RowWiseAdagrad.variant must be one of {VARIANTS}, got {self.variant!r}.")
        self._require_not_negative("initial_accumulator_value")
        self._require_divisor(self.initial_accumulator_value)
        self._require("moment_scale", "> 0", lambda value: value > 0)

    @property
    def rule(self) -> str:
        return "rowwise_adagrad"

    @property
    def scalar_slots(self) -> tuple[str, ...]:
        return ("accumulator",)

    @property
    def hyperparameters(self) -> list[float]:
        inside, mean = float(self.variant == "hsp"), float(self.variant == "torchrec")
        return [self.clipnorm, self.initial_accumulator_value, self.epsilon, inside, mean, self.moment_scale]

    @property
    def spec(self) -> dict[str, Any]:
        return {"rule": self.rule, "accumulates": "mean" if self.variant == "torchrec" else "sum"}
