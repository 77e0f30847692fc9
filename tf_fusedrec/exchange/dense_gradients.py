"""Dense weights on several ranks: their optimizer averages gradients over ranks, and over k steps.

The sums of k steps are this rank's own. An optimizer that averages over ranks does so once in k steps, for the mean.
Clipping and learning rates of the optimizer also see one update. FusedEmbedding(accumulate_steps=k) does the same for
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives, model_state

Pairs = Iterable[tuple[Any, tf.Variable]]


def distributed_optimizer(
    optimizer: keras.optimizers.Optimizer, *, accumulate_steps: int = 1
) -> keras.optimizers.Optimizer:
    """An optimizer for dense weights that averages their gradients over ranks. One process gets `optimizer` itself.

    `fit`, `minimize` and `apply_gradients` all average. The mean weighs ranks equally, not samples. If batches of ranks
    differ in size, use a PipelinedModel, schedules.weigh_by_samples(model) or losses.global_mean.

    Rank 0 broadcasts its weights while the first step is traced, before the step runs. An eager loop has no trace, so
    its first gradients belong to each rank's own weights. Frozen weights and constants that the trace of the first step
    does not read before `apply_gradients` need broadcast_variables. Weights that have been trained are compared
    instead, see model_state.equal_start.

    Each gradient travels while the backward pass goes on. Horovod fuses gradients that are ready together.

    Args:
      optimizer: Optimizer of tf_keras, of either kind.
      accumulate_steps: k, number of steps whose mean gradient makes one update, as in FusedEmbedding. A PipelinedModel
        takes the number of its layers by itself. Gradients travel once in k steps.
    """
    made = optimizer if collectives.size() == 1 else averaging(optimizer)
    accumulate(made, accumulate_steps)
    return made


def averaging(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns a new optimizer of the same class and configuration that averages gradients before it applies them.

    Keras aggregates gradients in one method of the optimizer, in every training loop. The call comes after the tape,
    before clipping, and before a LossScaleOptimizer looks for values that are not finite. `minimize`, a user's
    `apply_gradients` and both kinds of Keras optimizers call it.

    Raises:
      ValueError: Horovod's DistributedOptimizer averages already.
    """
    kind = type(optimizer)
    _check_not_of_horovod(kind)
    if isinstance(getattr(optimizer, "inner_optimizer", optimizer), _Averaging):
        return optimizer
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        # It lets its inner optimizer aggregate, and looks for values that are not finite after that.
        inner = averaging(optimizer.inner_optimizer)
        return kind.from_config({**optimizer.get_config(), "inner_optimizer": inner})
    # The name and module stay, so that a saved optimizer loads without this class.
    made: Any = type(kind.__name__, (_Averaging, kind), {"__module__": kind.__module__})
    return made.from_config(optimizer.get_config())


def _check_not_of_horovod(kind: type) -> None:
    if hasattr(kind, "register_local_var"):  # a method of Horovod's DistributedOptimizer alone
        raise ValueError(
            f"Optimizer {kind.__name__} is wrapped by Horovod's DistributedOptimizer and by distributed_optimizer, so "
            "gradients would be averaged twice. Remedy: leave out hvd.DistributedOptimizer."
        )


class _Averaging:
    """The mixin of an optimizer's class."""

    _known: set[Any]  # references of the variables that have had an equal start

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.__dict__["_known"] = set()  # out of sight of Keras' tracking

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_not_of_horovod(cls)

    def minimize(self, loss: Any, var_list: Any, *args: Any, **kwargs: Any) -> Any:
        # The tape also watches weights of frozen layers, which no list of an optimizer holds.
        for given in (*args, *kwargs.values()):
            self._meet(getattr(given, "watched_variables", tuple)())
        return super().minimize(loss, var_list, *args, **kwargs)  # type: ignore[misc]

    def aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, tf.Variable]]:
        pairs = list(grads_and_vars)
        self._meet([variable for _, variable in pairs])
        return [(None if gradient is None else collectives.average(gradient), variable) for gradient, variable in pairs]

    def _aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, tf.Variable]]:
        """The same method under its name in keras.optimizers.legacy."""
        return self.aggregate_gradients(grads_and_vars)

    def _meet(self, variables: Sequence[tf.Variable]) -> None:
        # The traced step has read the weights of frozen layers, constants and moving statistics as well.
        both = {variable.ref(): variable for variable in (*variables, *_read_by_step())}
        new = [variable for reference, variable in both.items() if reference not in self._known]
        if not new:
            return
        # Keras makes weights outside of the traced graph, so they have values before the first step runs.
        with tf.init_scope():
            if not tf.executing_eagerly() or not all(variable.is_initialized() for variable in new):
                return
            steps = int(self.iterations)  # type: ignore[attr-defined]
            own = [variable for variable in self.variables() if variable.ref() not in self._known]  # type: ignore[attr-defined]
            model_state.equal_start([*new, *own], steps)
            self._known.update(variable.ref() for variable in new)


def _read_by_step() -> list[tf.Variable]:
    """Floating variables that the step in this trace has read so far, in an order that is the same on all ranks."""
    graph: Any = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(graph, "_watched_variables"):
        return []
    while hasattr(graph.outer_graph, "_watched_variables"):
        graph = graph.outer_graph
    order = {id(outside): number for number, (outside, _) in enumerate(graph.captures)}
    read = [
        variable
        for variable in graph._watched_variables
        # TFRA's variables have the rows of a batch, which differ by rank.
        if not type(variable).__module__.startswith("tensorflow_recommenders_addons")
        and variable.dtype.is_floating
        and id(variable.handle) in order
    ]
    return sorted(read, key=lambda variable: order[id(variable.handle)])


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
