"""The state of an update rule outside the rows: the learning rate and the number of updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.optimizers.rules import Rule, is_schedule


class Trainer:
    """The learning rate and update count of one group. The tables of a group share them.

    Args:
      rule: Record of the update rule.
      name: Prefix of the variables' names.

    Attributes:
      rule: Record of the update rule. Its hyperparameters cannot change once the tables exist.
      iterations: <int64>[] variable, number of past updates.
      learning_rate: <float32>[] variable. An assigned number applies from the next update on, also in functions that
        are already traced. A schedule gives its current value here, which cannot be assigned.
    """

    rule: Rule
    iterations: tf.Variable
    _name: str
    _rate: Any
    _rate_scale: float

    def __init__(self, rule: Rule, name: str):
        rate = rule.learning_rate
        if not is_schedule(rate):
            rate = tf.Variable(rate, dtype=tf.float32, trainable=False, name=f"{name}/learning_rate")
        iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{name}/iterations")
        self.__dict__.update(rule=rule, iterations=iterations, _name=name, _rate=rate, _rate_scale=rule.rate_scale)

    @property
    def learning_rate(self) -> tf.Variable | tf.Tensor:
        return self._scheduled_rate(self.iterations.read_value()) if is_schedule(self._rate) else self._rate

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the learning rate. All other attributes are refused, because traced functions would ignore them."""
        if name != "learning_rate":
            raise AttributeError(
                f"{name} of the optimizer of {self._name!r} cannot be set, got {value!r}: the tables were made with "
                f"{self.rule}, of which only learning_rate may change. Pass another record as TableConfig.optimizer."
            )
        if is_schedule(self._rate):
            raise ValueError(
                f"learning_rate of {self._name!r} follows {type(self._rate).__name__}, got {value!r}. Use a number as "
                "the learning rate in TableConfig.optimizer; a number can be assigned later."
            )
        if is_schedule(value):
            raise ValueError(
                f"learning_rate of {self._name!r} must be a number, got {type(value).__name__}. Use the schedule as "
                "the learning rate in TableConfig.optimizer, or learning_rates.TableLearningRate."
            )
        rate = tf.cast(tf.convert_to_tensor(value), tf.float32)
        if tf.executing_eagerly() and not 0 <= float(rate) < math.inf:
            raise ValueError(f"learning_rate of {self._name!r} must be a finite number >= 0, got {value!r}.")
        self._rate.assign(rate)

    def current(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the next update's learning rate <float32>[] for the op and its number <int64>[], counted from 1."""
        done = self.iterations.read_value()
        rate = self._scheduled_rate(done) if is_schedule(self._rate) else self._rate.read_value()
        return rate * self._rate_scale, done + 1

    def count(self) -> None:
        """Counts an update."""
        self.iterations.assign_add(1)

    @property
    def rates(self) -> list[float] | None:
        """[record's learning rate, current learning rate] for checkpoints, or None for a schedule."""
        if is_schedule(self._rate):
            return None
        return [float(self.rule.learning_rate), float(self._rate.numpy())]

    def restore_rates(self, saved: Sequence[Sequence[float]]) -> None:
        """Restores the lowest assigned rate of `saved`, a sequence of `rates`.

        A rate assigned under a record with another learning rate is ignored: a changed record sets the rate.
        """
        rates = self.rates
        assigned = [] if rates is None else [now for record, now in saved if record == rates[0]]
        if assigned:
            self._rate.assign(min(assigned))

    def _scheduled_rate(self, done: tf.Tensor) -> tf.Tensor:
        return tf.cast(self._rate(done), tf.float32)
