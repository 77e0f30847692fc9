"""Makes a Keras optimizer sum the dense gradients of k steps and apply their mean once. Knows no Horovod.

The sums are this rank's own. An optimizer that averages over ranks does so once in k steps, for the mean. Clipping and
learning rates of the optimizer also see one update. FusedEmbedding(accumulate_steps=k) does the same for rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tf_fusedrec._tf_compat import keras, tf

_SUMS = "_gradient_sums"  # out of sight of Keras' tracking: no checkpoint and no comparison of ranks may see the sums


def accumulate(optimizer: Any, steps: int) -> None:
    """Makes the optimizer's apply_gradients change the weights in every k-th call. A second call with k is allowed.

    Args:
      optimizer: Optimizer of tf_keras, of either kind. It changes.
      steps: k >= 1; 1 leaves the optimizer as it is.

    Raises:
      ValueError: k is no int >= 1, the optimizer accumulates another number of steps, or it scales the loss.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"accumulate_steps must be an int >= 1, got {steps!r}.")
    sums = getattr(optimizer, "__dict__", {}).get(_SUMS)
    before = 1 if sums is None else sums.steps
    if sums is not None and before != steps:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__} accumulates {before} steps, and the tables of the model {steps}. "
            f"Remedy: distributed_optimizer(optimizer), which takes the tables' number, or FusedEmbedding("
            f"accumulate_steps={before})."
        )
    if before == steps:
        return
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        raise ValueError(
            f"accumulate_steps {steps} does not work with a LossScaleOptimizer, which leaves out steps of dense "
            "weights or of tables alone. Remedy: the policy mixed_bfloat16, or accumulate_steps=1."
        )
    optimizer.__dict__[_SUMS] = sums = _GradientSums(optimizer, steps)
    optimizer.__dict__["apply_gradients"] = sums.apply_gradients


def make_sums(optimizer: Any, weights: Iterable[tf.Variable]) -> None:
    """Makes the sums for these weights, if the optimizer accumulates any. The first step makes those that lack."""
    sums = getattr(optimizer, "__dict__", {}).get(_SUMS)
    if sums is not None:
        for weight in weights:
            sums.sum_of(weight)


def forget(optimizer: Any) -> None:
    """Drops the waiting gradients of an optimizer, if it accumulates any. Eager."""
    sums = getattr(optimizer, "__dict__", {}).get(_SUMS)
    if sums is not None:
        sums.clear()


class _GradientSums:
    """The sums of waiting gradients and the method that takes the place of apply_gradients."""

    def __init__(self, optimizer: Any, steps: int):
        self.steps = steps
        self._optimizer = optimizer
        self._apply = optimizer.apply_gradients
        self._sums: dict[Any, tf.Variable] = {}  # by reference of the weight
        with tf.init_scope():
            self._waiting = tf.Variable(0, dtype=tf.int64, trainable=False, name="gradient_sums/waiting")

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, tf.Variable]], *args: Any, **kwargs: Any
    ) -> tf.Tensor:
        """Adds gradients. Every k-th call applies their mean. Returns the optimizer's number of updates."""
        pairs = list(grads_and_vars)
        added = [self.sum_of(weight).assign_add(_dense(grad, weight)) for grad, weight in pairs if grad is not None]
        with tf.control_dependencies(added):
            waiting = self._waiting.assign_add(1)

        def update() -> tf.Tensor:
            means = [
                (None if grad is None else self.sum_of(weight).read_value() / self.steps, weight)
                for grad, weight in pairs
            ]
            self._apply(means, *args, **kwargs)
            self.clear()
            return tf.identity(self._optimizer.iterations)

        return tf.cond(tf.equal(waiting, self.steps), update, lambda: tf.identity(self._optimizer.iterations))

    def clear(self) -> None:
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))
        self._waiting.assign(0)

    def sum_of(self, weight: tf.Variable) -> tf.Variable:
        """Returns the sum of a weight's gradients, which the first call makes."""
        if weight.ref() not in self._sums:
            with tf.init_scope():
                zeros = tf.zeros(weight.shape, weight.dtype)
                self._sums[weight.ref()] = tf.Variable(zeros, trainable=False, name="gradient_sums/sum")
        return self._sums[weight.ref()]


def _dense(gradient: Any, weight: tf.Variable) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(gradient), weight.dtype)
