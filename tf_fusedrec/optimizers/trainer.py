"""The state of a rule that is not in the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.optimizers.rule import Rule, Schedule


class Trainer:
    """What the rule of one group keeps beside the rows. The tables of a group share it.

    Args:
      rule: the record.
      name: of the variables.

    Attributes:
      rule: the record. Its numbers are those of the tables for good.
      iterations: <int64>[] variable, updates done so far.
      learning_rate: <float32>[] variable. A number that is assigned counts from the next update on, in functions that
        are traced already, too. With a schedule: its present value, which cannot be assigned.
    """

    rule: Rule
    iterations: tf.Variable
    _name: str
    _rate: Any

    def __init__(self, rule: Rule, name: str):
        rate = rule.learning_rate
        if not isinstance(rate, Schedule):
            rate = tf.Variable(rate, dtype=tf.float32, trainable=False, name=f"{name}/learning_rate")
        iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{name}/iterations")
        self.__dict__.update(rule=rule, iterations=iterations, _name=name, _rate=rate)

    @property
    def learning_rate(self) -> tf.Variable | tf.Tensor:
        return self._of_schedule(self.iterations.read_value()) if isinstance(self._rate, Schedule) else self._rate

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the learning rate; whatever else a function that is traced already would not see is refused."""
        if name != "learning_rate":
            raise AttributeError(
                f"{name} of the optimizer of {self._name!r} cannot be set, got {value!r}: the tables were made with "
                f"{self.rule}. Remedy: another record in TableConfig.optimizer; learning_rate alone may change."
            )
        if isinstance(self._rate, Schedule):
            raise ValueError(
                f"learning_rate of {self._name!r} follows {type(self._rate).__name__}, got {value!r}. Remedy: a number "
                "as the learning rate in TableConfig.optimizer, which may then be assigned."
            )
        if isinstance(value, Schedule):
            raise ValueError(
                f"learning_rate of {self._name!r} must be a number, got {type(value).__name__}. Remedy: the schedule "
                "as the learning rate in TableConfig.optimizer, or learning_rates.TableLearningRate."
            )
        rate = tf.cast(tf.convert_to_tensor(value), tf.float32)
        if tf.executing_eagerly() and not 0 <= float(rate) < math.inf:
            raise ValueError(f"learning_rate of {self._name!r} must be a finite number >= 0, got {value!r}.")
        self._rate.assign(rate)

    def current(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Learning rate <float32>[] for the op, and number <int64>[], 1 for the first, of the coming update."""
        done = self.iterations.read_value()
        rate = self._of_schedule(done) if isinstance(self._rate, Schedule) else self._rate.read_value()
        return rate * self.rule.rate_scale, done + 1

    def count(self) -> None:
        """Counts an update."""
        self.iterations.assign_add(1)

    @property
    def rates(self) -> list[float] | None:
        """Learning rate of the record, and the present one, for checkpoints; None with a schedule, which needs none."""
        if isinstance(self._rate, Schedule):
            return None
        return [float(self.rule.learning_rate), float(self._rate.numpy())]

    def restore_rates(self, saved: Sequence[Sequence[float]]) -> None:
        """Takes over rates that were assigned: the lowest of `saved`, each as `rates` gave it.

        A rate that was assigned over another record's counts no more: who changes the record wants its rate.
        """
        mine = self.rates
        assigned = [] if mine is None else [now for record, now in saved if record == mine[0]]
        if assigned:
            self._rate.assign(min(assigned))

    def _of_schedule(self, done: tf.Tensor) -> tf.Tensor:
        return tf.cast(self._rate(done), tf.float32)
