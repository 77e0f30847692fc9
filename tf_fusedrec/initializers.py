"""Distributions of a new row's values. They are frozen records, equal by value, so tables of equal spec can be fused.

ops/initial_rows.py draws the numbers as a pure function of (seed, table, id).
"""

import abc
import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Initializer(abc.ABC):
    """Base of the distributions below. `a` and `b` are the parameters of the op."""

    distribution: ClassVar[str]

    @property
    @abc.abstractmethod
    def a(self) -> float:
        """First parameter."""

    @property
    def b(self) -> float:
        """Second parameter; 0 for distributions with one parameter."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class Constant(Initializer):
    """Every column is `value`."""

    distribution: ClassVar[str] = "constant"
    value: float = 0.0

    @property
    def a(self) -> float:
        return self.value


@dataclasses.dataclass(frozen=True)
class Zeros(Constant):
    """Every column is 0."""

    def __post_init__(self) -> None:
        if self.value != 0.0:
            raise ValueError(f"Zeros.value must be 0, got {self.value}. Use Constant(value={self.value}).")


@dataclasses.dataclass(frozen=True)
class Uniform(Initializer):
    """Columns are uniform on [minval, maxval)."""

    distribution: ClassVar[str] = "uniform"
    minval: float = -0.05
    maxval: float = 0.05

    def __post_init__(self) -> None:
        if not self.minval < self.maxval:
            raise ValueError(f"Uniform.minval must be below maxval, got {self.minval} and {self.maxval}.")

    @property
    def a(self) -> float:
        return self.minval

    @property
    def b(self) -> float:
        return self.maxval


@dataclasses.dataclass(frozen=True)
class Normal(Initializer):
    """Columns are normal with `mean` and `stddev`."""

    distribution: ClassVar[str] = "normal"
    mean: float = 0.0
    stddev: float = 0.05

    def __post_init__(self) -> None:
        if not self.stddev >= 0:
            raise ValueError(f"{type(self).__name__}.stddev must be >= 0, got {self.stddev}.")

    @property
    def a(self) -> float:
        return self.mean

    @property
    def b(self) -> float:
        return self.stddev


@dataclasses.dataclass(frozen=True)
class TruncatedNormal(Normal):
    """Normal distribution, truncated at two standard deviations from the mean."""

    distribution: ClassVar[str] = "truncated_normal"
