"""The update rules of native tables: frozen records that custom_ops/hash_table/rules applies.

Every rule is sparse ("lazy"): a step changes the rows and slots of its batch and no others. In the formulas, w is a
row, g its gradient summed over the batch and all ranks, lr the learning rate, and t the number of the update, counted
per table from 1.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "RMSprop",
    "RowWiseAdagrad",
    "RowWiseAdam",
]

LearningRate = Any  # a number, or a keras.optimizers.schedules.LearningRateSchedule
VARIANTS = ("torchrec", "2d_sp", "hsp")
_FRACTION = (">= 0 and < 1", lambda value: 0 <= value < 1)
# Ranges of arguments. All other numbers must be >= 0.
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "momentum": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "moment_scale": ("> 0", lambda value: value > 0),
    "learning_rate_power": ("<= 0", lambda value: value <= 0),
    "rho": _FRACTION, "beta_1": _FRACTION, "beta_2": _FRACTION,
}  # fmt: skip
_NOT_NEGATIVE = (">= 0", lambda value: value >= 0)
_DIVISOR = ("> 0 (with 0, the step of a new row with a zero gradient would be 0 / 0)", lambda value: value > 0)


RULES: dict[str, type[Rule]] = {}  # by name of the class


def is_schedule(learning_rate: LearningRate) -> bool:
    """Whether a learning rate is a schedule of Keras. A number needs no Keras, which takes seconds to load."""
    if isinstance(learning_rate, numbers.Real):
        return False
    from tf_fusedrec._tf_compat import keras

    return isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Base of the records.

    Args:
      learning_rate: lr >= 0, or a schedule of keras.optimizers.schedules over the number of past updates.
      epsilon: Term that keeps the divisor above 0.
      beta_1, beta_2: Decay rates of the mean gradient and of the mean squared gradient.
      weight_decay: Share of a row, times the learning rate, that a step subtracts.
      clipnorm: Largest L2 norm of one row's gradient g, to which a longer g is scaled; 0 for no limit. One row's norm
        does not depend on the rest of the batch, the number of ranks or the grouping of tables. Keras' clipnorm takes
        the norm of a whole variable.

    Attributes:
      rule: Name of the rule in the op.
      wide_slots: Names of the slots of D numbers per row.
      scalar_slots: Names of the slots of one number per row.

    Raises:
      ValueError: An argument is out of its range.
    """

    learning_rate: LearningRate
    rule: ClassVar[str]
    wide_slots: ClassVar[tuple[str, ...]] = ()
    scalar_slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not is_schedule(self.learning_rate):
            expected = ">= 0, or a LearningRateSchedule of keras.optimizers.schedules"
            self._require("learning_rate", expected, lambda value: value >= 0)
        for field in dataclasses.fields(self):
            if isinstance(field.default, float) and field.name != "epsilon":
                self._require(field.name, *_RANGES.get(field.name, _NOT_NEGATIVE))
        if hasattr(self, "epsilon"):  # It may be 0 only where the square root in the same divisor starts above 0.
            start = getattr(self, "initial_accumulator_value", 0.0)
            self._require("epsilon", *(_NOT_NEGATIVE if start > 0 else _DIVISOR))

    def _require(self, name: str, expected: str, is_allowed: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not is_allowed(float(value)):
            raise ValueError(f"{type(self).__name__}.{name} must be a finite number {expected}, got {value!r}.")

    def __init_subclass__(cls) -> None:
        """Registers the record, so that checkpoints and saved models find it by its name."""
        if not cls.__name__.startswith("_"):
            RULES[cls.__name__] = cls

    @property
    def parameters(self) -> dict[str, float | bool]:
        """The parameters of the rule by the names and in the order of custom_ops/hash_table/rules, clipnorm first."""
        return {"clipnorm": vars(self)["clipnorm"]}  # a field of every record

    def record(self) -> dict[str, Any]:
        """The rule of a table by path, see ops.table_schema."""
        return {"rule": self.rule, **{f"rule.{name}": number for name, number in self.parameters.items()}}

    @property
    def rate_scale(self) -> float:
        """Factor of the learning rate in the op.

        For a moment scale c of an element-wise v, the factor is sqrt(c), and epsilon is scaled by it too. The op then
        needs no c: lr / (sqrt(v / c) + epsilon) = sqrt(c) lr / (sqrt(v) + sqrt(c) epsilon). Adagrad's v starts at v0,
        which the scale does not change: its op takes one more number.
        """
        return math.sqrt(getattr(self, "moment_scale", 1.0)) if self.wide_slots else 1.0

    @property
    def slot_starts(self) -> dict[str, float]:
        """Initial value of each slot in a new row."""
        start = getattr(self, "initial_accumulator_value", 0.0)
        return {slot: start if slot == "accumulator" else 0.0 for slot in (*self.wide_slots, *self.scalar_slots)}

    @property
    def spec(self) -> dict[str, Any]:
        """JSON-able meaning of the slots. Records with equal specs can take over each other's slots.

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
        rate = values.pop("learning_rate")
        values = {name: v if isinstance(v, (bool, str)) else float(v) for name, v in values.items()}
        values = {"learning_rate": rate if is_schedule(rate) else float(rate), **values}
        if is_schedule(rate):
            from tf_fusedrec._tf_compat import keras

            values["learning_rate"] = keras.optimizers.schedules.serialize(self.learning_rate)
        return {"class_name": type(self).__name__, **values}


@dataclasses.dataclass(frozen=True)
class SGD(Rule):
    """w -= lr g. With momentum mu > 0: m = mu m - lr g; w += m, or with nesterov w += mu m - lr g.

    The forms of Keras; Sutskever et al., "On the importance of initialization and momentum", ICML 2013, eq. 1-4.

    Args:
      momentum: mu, 0 <= mu <= 1.
      nesterov: True to use Nesterov's form. It has no effect without momentum, as in Keras.

    Examples:
      >>> decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.9)
      >>> rules = [fr.optimizers.SGD(decay, momentum=0.9), fr.optimizers.Adagrad(0.1)]
      >>> rules += [fr.optimizers.RowWiseAdagrad(0.1), fr.optimizers.RMSprop(0.01), fr.optimizers.Adam(0.001)]
      >>> rules += [fr.optimizers.AdamW(0.001), fr.optimizers.RowWiseAdam(0.001), fr.optimizers.Ftrl(0.1)]
      >>> tables = [fr.TableConfig(f"table{i}", 8, rule) for i, rule in enumerate(rules)]
    """

    momentum: float = 0.0
    nesterov: bool = False
    clipnorm: float = 0.0

    @property
    def rule(self) -> str:  # type: ignore[override]
        return "momentum" if self.momentum else "sgd"

    @property
    def wide_slots(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("momentum",) if self.momentum else ()

    @property
    def parameters(self) -> dict[str, float | bool]:
        momentum = {"momentum": self.momentum, "nesterov": self.nesterov} if self.momentum else {}
        return {**super().parameters, **momentum}


@dataclasses.dataclass(frozen=True)
class Adagrad(Rule):
    """v += g^2; w -= lr g / (sqrt(v) + epsilon), column by column.

    Duchi et al., "Adaptive Subgradient Methods", JMLR 2011, diagonal form, as in keras.optimizers.legacy.Adagrad.

    Args:
      initial_accumulator_value: v0, initial v of a new row. The default, from Keras, is far above g^2 of a loss that is
        a mean over a large batch, and rows hardly train: pass 1e-6 there.
      epsilon_inside: True if the step is w -= lr g / sqrt(v + epsilon), as in keras.optimizers.Adagrad.
      moment_scale: c > 0. The step of w uses v0 + (v - v0) / c instead of v. See RowWiseAdagrad.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7
    epsilon_inside: bool = False
    clipnorm: float = 0.0
    moment_scale: float = 1.0
    rule: ClassVar[str] = "adagrad"
    wide_slots: ClassVar[tuple[str, ...]] = ("accumulator",)

    @property
    def parameters(self) -> dict[str, float | bool]:
        return {
            **super().parameters,
            "initial_accumulator_value": self.initial_accumulator_value,
            "epsilon": self.epsilon * (self.moment_scale if self.epsilon_inside else self.rate_scale),
            "epsilon_inside": self.epsilon_inside,
            # c (v0 + (v - v0) / c) - v
            "moment_offset": (self.moment_scale - 1) * self.initial_accumulator_value,
        }


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
    rule: ClassVar[str] = "rowwise_adagrad"
    scalar_slots: ClassVar[tuple[str, ...]] = ("accumulator",)

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"RowWiseAdagrad.variant must be one of {VARIANTS}, got {self.variant!r}.")
        super().__post_init__()

    @property
    def parameters(self) -> dict[str, float | bool]:
        return {
            **super().parameters,
            "initial_accumulator_value": self.initial_accumulator_value,
            "epsilon": self.epsilon,
            "epsilon_inside": self.variant == "hsp",
            "mean": self.variant == "torchrec",
            "moment_scale": self.moment_scale,
        }

    @property
    def spec(self) -> dict[str, Any]:
        return {"rule": self.rule, "accumulates": "mean" if self.variant == "torchrec" else "sum"}


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
    rule: ClassVar[str] = "rmsprop"
    wide_slots: ClassVar[tuple[str, ...]] = ("v",)

    @property
    def parameters(self) -> dict[str, float | bool]:
        return {
            **super().parameters,
            "one_minus_rho": 1 - self.rho,
            "epsilon": self.epsilon * (self.moment_scale if self.epsilon_inside else self.rate_scale),
            "epsilon_inside": self.epsilon_inside,
        }


class _Moments(Rule):
    """The hyperparameters and slots that Adam and AdamW share."""

    beta_1: float
    beta_2: float
    epsilon: float
    clipnorm: float
    rule: ClassVar[str] = "adam"
    wide_slots: ClassVar[tuple[str, ...]] = ("m", "v")

    @property
    def parameters(self) -> dict[str, float | bool]:
        return {
            **super().parameters,
            # 1 - beta, because float32 keeps only five of its digits in beta.
            "one_minus_beta_1": 1 - self.beta_1,
            "one_minus_beta_2": 1 - self.beta_2,
            "epsilon": self.epsilon * self.rate_scale,
            "weight_decay": getattr(self, "weight_decay", 0.0) / self.rate_scale,
        }


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


@dataclasses.dataclass(frozen=True)
class AdamW(_Moments):
    """w -= lr weight_decay w, then Adam's step (Loshchilov and Hutter, ICLR 2019; order and scaling as in Keras).

    The rule is lazy: a row decays once in every step with the row in its batch.

    Args:
      moment_scale: c of Adam's step. It does not change the decay.
    """

    weight_decay: float = 0.004
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    clipnorm: float = 0.0
    moment_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class RowWiseAdam(_Moments):
    """Adam with one v per row, v += (1 - b2)(mean of g^2 over the row - v), and with AdamW's decay.

    FBGEMM's PARTIAL_ROWWISE_ADAM, but for the epsilon, which is Adam's epsilon hat. A row has D + 1 numbers of
    optimizer state in place of Adam's 2 D. The rule is lazy.

    Args:
      moment_scale: c of Adam's step.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    weight_decay: float = 0.0
    clipnorm: float = 0.0
    moment_scale: float = 1.0
    rule: ClassVar[str] = "rowwise_adam"
    wide_slots: ClassVar[tuple[str, ...]] = ("m",)
    scalar_slots: ClassVar[tuple[str, ...]] = ("v",)


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
    rule: ClassVar[str] = "ftrl"
    wide_slots: ClassVar[tuple[str, ...]] = ("accumulator", "linear")

    @property
    def parameters(self) -> dict[str, float | bool]:
        names = ("initial_accumulator_value", "learning_rate_power", "l1", "l2", "l2_shrinkage", "beta")
        return {**super().parameters, **{name: getattr(self, name) for name in names}}

    @property
    def spec(self) -> dict[str, Any]:
        # z is a sum of powers of n, so the slots have another meaning under another power.
        return {"rule": self.rule, "learning_rate_power": self.learning_rate_power}


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
        from tf_fusedrec._tf_compat import keras

        fields["learning_rate"] = keras.optimizers.schedules.deserialize(fields["learning_rate"])
    return RULES[name](**fields)
