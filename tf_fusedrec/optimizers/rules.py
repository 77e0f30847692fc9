"""How the rows of a native table are trained: frozen records, applied in place by custom_ops/hash_table/optimizer.cc.

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
from collections.abc import Callable, Mapping
from typing import Any, Union

from tf_fusedrec._tf_compat import keras

Schedule = keras.optimizers.schedules.LearningRateSchedule
LearningRate = Union[float, "keras.optimizers.schedules.LearningRateSchedule"]
VARIANTS = ("2d_sp", "torchrec", "hsp")


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """Base of the records below; custom_ops/hash_table/optimizer.h has the other side.

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


@dataclasses.dataclass(frozen=True)
class SGD(Rule):
    """w -= lr g. With momentum mu > 0: m = mu m - lr g; w += m, or with nesterov w += mu m - lr g.

    The forms of Keras; Sutskever et al., "On the importance of initialization and momentum", ICML 2013, eq. 1-4.

    Args:
      momentum: mu, 0 <= mu <= 1.
      nesterov: needs momentum; without it, as in Keras, it changes nothing.
    """

    momentum: float = 0.0
    nesterov: bool = False
    clipnorm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", "from 0 to 1", lambda value: 0 <= value <= 1)

    @property
    def rule(self) -> str:
        return "momentum" if self.momentum else "sgd"

    @property
    def wide_slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @property
    def hyperparameters(self) -> list[float]:
        return [self.clipnorm, self.momentum, float(self.nesterov)] if self.momentum else [self.clipnorm]


@dataclasses.dataclass(frozen=True)
class Adagrad(Rule):
    """v += g^2; w -= lr g / (sqrt(v) + epsilon), column by column.

    Duchi et al., "Adaptive Subgradient Methods", JMLR 2011, diagonal form, as in keras.optimizers.legacy.Adagrad.

    Args:
      initial_accumulator_value: v of a new row.
      epsilon_inside: w -= lr g / sqrt(v + epsilon), the form of keras.optimizers.Adagrad.
      moment_scale: c > 0; v / c stands for v in the step of w. See RowWiseAdagrad.
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
        return [self.clipnorm, self.initial_accumulator_value, epsilon, float(self.epsilon_inside)]


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Rule):
    """v += sum of g^2 over the row; w -= lr g / (sqrt(v / c) + epsilon): Adagrad with one accumulator per row.

    Args:
      initial_accumulator_value: v of a new row.
      variant: frameworks and papers disagree:
        "2d_sp": as above (Zhang et al., "Two-dimensional Sparse Parallelism", Algorithm 1, lines 5 and 6);
        "torchrec": v += mean of g^2 over the row (FBGEMM's EXACT_ROWWISE_ADAGRAD);
        "hsp": epsilon inside the root, w -= lr g / sqrt(v / c + epsilon) (TurboGR, eq. 1, read row by row).
      moment_scale: c > 0, in the range (0, number of replica groups] (2D sparse parallelism, Scaling Rule 1). A layer
        whose replicas are averaged sets it where it is 1, see Topology.
    """

    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8
    variant: str = "2d_sp"
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


class _Moments(Rule):
    """What Adam and AdamW share."""

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
        # 1 - beta, because float32 would keep five digits of it where it has beta.
        return [self.clipnorm, 1 - self.beta_1, 1 - self.beta_2, self.epsilon * self.rate_scale]

    @property
    def spec(self) -> dict[str, Any]:
        return {"rule": "adam"}  # AdamW's slots are Adam's


@dataclasses.dataclass(frozen=True)
class Adam(_Moments):
    """m += (1 - b1)(g - m); v += (1 - b2)(g^2 - v); w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon).

    Kingma and Ba, "Adam", ICLR 2015, the order before section 2.1, as in Keras: epsilon is the paper's epsilon hat.
    Lazy: m and v of rows that are not seen do not decay.

    Args:
      moment_scale: c > 0; v / c stands for v in the step of w. See RowWiseAdagrad.
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

    Lazy: the rows of a step decay in that step, the others do not, so a row decays as often as it is seen.

    Args:
      moment_scale: of Adam's step; the decay does not know it.
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


@dataclasses.dataclass(frozen=True)
class Ftrl(Rule):
    """n' = n + g^2; z += g + 2 l2_shrinkage w - (n'^-p - n^-p) / lr w; w = (clip(z, -l1, l1) - z) / (n'^-p / lr + 2 l).

    p is learning_rate_power, l = l2 + beta / (2 lr), and clip limits z to [-l1, l1]. McMahan et al., "Ad Click
    Prediction: a View from the Trenches", KDD 2013, Algorithm 1, as in Keras. n is the slot "accumulator", z "linear".
    A step whose learning rate is 0 leaves rows and slots as they are; the formula divides by it.

    Args:
      learning_rate_power: p <= 0; 0 for a learning rate that does not fall. -0.5 is several times faster than others.
      initial_accumulator_value: n of a new row.
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
        return {"rule": self.rule, "learning_rate_power": self.learning_rate_power}  # z is a sum of powers of n


RULES = {rule.__name__: rule for rule in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, Ftrl)}


def from_dict(fields: Mapping[str, Any]) -> Rule:
    """The record that `to_dict` described.

    Raises:
      ValueError: it describes none.
    """
    fields = dict(fields)
    name = fields.pop("class_name", None)
    if name not in RULES:
        raise ValueError(f"class_name must be one of {sorted(RULES)}, got {name!r}.")
    if isinstance(fields["learning_rate"], Mapping):
        fields["learning_rate"] = keras.optimizers.schedules.deserialize(fields["learning_rate"])
    return RULES[name](**fields)
