"""The state of a rule that is not in the rows."""

from __future__ import annotations

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.optimizers.rule import Rule, Schedule


class Trainer:
    """What the rule of one group keeps beside the rows.

    Args:
      rule: the record.
      name: of the variables.

    Attributes:
      rule: the record.
      iterations: <int64>[] variable, updates done so far.
      learning_rate: <float32>[] variable, which may be set between steps; or the schedule.
    """

    def __init__(self, rule: Rule, name: str):
        self.rule = rule
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{name}/iterations")
        self.learning_rate: tf.Variable | keras.optimizers.schedules.LearningRateSchedule = rule.learning_rate
        if not isinstance(rule.learning_rate, Schedule):
            self.learning_rate = tf.Variable(
                rule.learning_rate, dtype=tf.float32, trainable=False, name=f"{name}/learning_rate"
            )

    def current(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Learning rate <float32>[] for the op, and number <int64>[], 1 for the first, of the coming update."""
        done = self.iterations.read_value()
        if isinstance(self.learning_rate, Schedule):
            rate = tf.cast(self.learning_rate(done), tf.float32)
        else:
            rate = self.learning_rate.read_value()
        return rate * self.rule.rate_scale, done + 1

    def count(self) -> None:
        """Counts an update."""
        self.iterations.assign_add(1)
