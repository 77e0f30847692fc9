"""Gradients of dense weights: their mean over ranks, and over k steps.

Each rank sums the gradients of k steps and averages the sum over ranks once. Clipping and learning rates also see one
update. FusedEmbedding(accumulate_steps=k) does the same for rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives, model_state

Pairs = Iterable[tuple[Any, tf.Variable]]  # gradients and their weights
_SUMS = "_gradient_sums"  # hidden from Keras' tracking: no checkpoint and no comparison of ranks may see the sums


def distributed_optimizer(
    optimizer: keras.optimizers.Optimizer, *, accumulate_steps: int = 1
) -> keras.optimizers.Optimizer:
    """An optimizer for dense weights that averages their gradients over ranks. One process gets `optimizer` itself.

    `fit`, `minimize` and `apply_gradients` all average. The mean weighs ranks equally, not samples. If batches of ranks
    differ in size, use a PipelinedModel, schedules.weigh_by_samples(model) or losses.global_mean.

    Rank 0 broadcasts its weights while the first step is traced, before the step runs. An eager loop has no trace, so
    its first gradients belong to each rank's initial weights. Frozen weights and constants that the trace of the first
    step does not read before `apply_gradients` need broadcast_variables. Trained weights are compared instead, and
    RuntimeError names the first that differs.

    Each gradient travels while the backward pass goes on. Horovod fuses gradients that are ready together.

    Args:
      optimizer: Optimizer of tf_keras, of either kind.
      accumulate_steps: k, number of steps per update, which applies their mean gradient, as in FusedEmbedding. A
        PipelinedModel takes k from its layers. Gradients are exchanged once in k steps.
    """
    if collectives.size() > 1:
        optimizer = averaging(optimizer)
    accumulate(optimizer, accumulate_steps)
    return optimizer


def averaging(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns a new optimizer of the same class and configuration that averages gradients before it applies them.

    Keras aggregates gradients in one method of the optimizer, in every training loop: after the tape,
    before clipping, and before a LossScaleOptimizer checks that values are finite. `minimize`, a user's
    `apply_gradients` and both kinds of Keras optimizers call it.

    Raises:
      ValueError: Horovod's DistributedOptimizer averages already.
    """
    optimizer_type = type(optimizer)
    _check_not_of_horovod(optimizer_type)
    if isinstance(getattr(optimizer, "inner_optimizer", optimizer), _Averaging):
        return optimizer
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        # It lets its inner optimizer aggregate, and looks for values that are not finite after that.
        inner = averaging(optimizer.inner_optimizer)
        return optimizer_type.from_config({**optimizer.get_config(), "inner_optimizer": inner})
    # The name and module stay, so that a saved optimizer loads without this class.
    module = {"__module__": optimizer_type.__module__}
    averaging_type: Any = type(optimizer_type.__name__, (_Averaging, optimizer_type), module)
    return averaging_type.from_config(optimizer.get_config())


def _check_not_of_horovod(optimizer_type: type) -> None:
    if hasattr(optimizer_type, "register_local_var"):  # only Horovod's DistributedOptimizer has this method
        raise ValueError(
            f"Optimizer {optimizer_type.__name__} is wrapped by hvd.DistributedOptimizer and by distributed_optimizer, "
            "so gradients would be averaged twice. Use distributed_optimizer only."
        )


class _Averaging:
    """The mixin of an optimizer's class."""

    _known: set[Any]  # references of the variables that have had an equal start

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.__dict__["_known"] = set()  # hidden from Keras' tracking

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_not_of_horovod(cls)

    def minimize(self, loss: Any, var_list: Any, *args: Any, **kwargs: Any) -> Any:
        # The tape also watches weights of frozen layers, which are in no list of the optimizer.
        for argument in (*args, *kwargs.values()):
            self._start_equal(getattr(argument, "watched_variables", tuple)())
        return super().minimize(loss, var_list, *args, **kwargs)  # type: ignore[misc]

    def aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, tf.Variable]]:
        pairs = list(grads_and_vars)
        self._start_equal([variable for _, variable in pairs])
        return [(None if gradient is None else collectives.average(gradient), variable) for gradient, variable in pairs]

    def _aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, tf.Variable]]:
        """The same method under its name in keras.optimizers.legacy."""
        return self.aggregate_gradients(grads_and_vars)

    def _start_equal(self, variables: Sequence[tf.Variable]) -> None:
        """Gives new variables, and those that the traced step has read, the same values on all ranks."""
        by_reference = {variable.ref(): variable for variable in (*variables, *_read_by_step())}
        new = [variable for reference, variable in by_reference.items() if reference not in self._known]
        if not new:
            return
        # Keras makes weights outside of the traced graph, so they have values before the first step runs.
        with tf.init_scope():
            if not tf.executing_eagerly() or not all(variable.is_initialized() for variable in new):
                return
            steps = int(self.iterations)  # type: ignore[attr-defined]
            slots = [variable for variable in self.variables() if variable.ref() not in self._known]  # type: ignore[attr-defined]
            model_state.equal_start([*new, *slots], steps)
            self._known.update(variable.ref() for variable in new)


def _read_by_step() -> list[tf.Variable]:
    """Floating variables that the traced step has read so far, in the same order on all ranks."""
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


def accumulate(optimizer: Any, steps: int) -> None:
    """Makes the optimizer's apply_gradients change the weights in every k-th call. A second call with k is allowed.

    Args:
      optimizer: Optimizer of tf_keras, of either kind. It changes.
      steps: k >= 1; 1 leaves the optimizer as it is.

    Raises:
      ValueError: k is no int >= 1, the optimizer accumulates a different number of steps, or it scales the loss.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"accumulate_steps must be an int >= 1, got {steps!r}.")
    sums = _sums_of(optimizer)
    if sums is not None and sums.steps != steps:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__} accumulates {sums.steps} steps, and the tables of the model {steps}."
            " Use distributed_optimizer(optimizer), which takes the tables' number, or FusedEmbedding("
            f"accumulate_steps={sums.steps})."
        )
    if sums is not None or steps == 1:
        return
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        raise ValueError(
            f"accumulate_steps {steps} does not work with a LossScaleOptimizer, which skips steps of dense weights or "
            "of tables separately. Use the policy mixed_bfloat16, or accumulate_steps=1."
        )
    optimizer.__dict__[_SUMS] = sums = _GradientSums(optimizer, steps)
    optimizer.__dict__["apply_gradients"] = sums.apply_gradients


def make_sums(optimizer: Any, weights: Iterable[tf.Variable]) -> None:
    """Makes the sums for these weights, if the optimizer accumulates. The first step makes missing ones."""
    sums = _sums_of(optimizer)
    for weight in weights if sums is not None else ():
        sums.sum_of(weight)


def forget(optimizer: Any) -> None:
    """Drops the waiting gradients of an optimizer, if it accumulates. Eager."""
    sums = _sums_of(optimizer)
    if sums is not None:
        sums.clear()


def _sums_of(optimizer: Any) -> Any:
    return getattr(optimizer, "__dict__", {}).get(_SUMS)


class _GradientSums:
    """The sums of waiting gradients, and the replacement of the optimizer's apply_gradients."""

    def __init__(self, optimizer: Any, steps: int):
        self.steps = steps
        self._optimizer = optimizer
        self._apply = optimizer.apply_gradients
        self._sums: dict[Any, tf.Variable] = {}  # by reference of the weight
        with tf.init_scope():
            self._waiting = tf.Variable(0, dtype=tf.int64, trainable=False, name="gradient_sums/waiting")

    def apply_gradients(self, grads_and_vars: Pairs, *args: Any, **kwargs: Any) -> tf.Tensor:
        """Adds gradients. Every k-th call applies their mean. Returns the optimizer's number of updates."""
        pairs = list(grads_and_vars)
        added = [
            self.sum_of(weight).assign_add(tf.cast(tf.convert_to_tensor(grad), weight.dtype))
            for grad, weight in pairs
            if grad is not None
        ]
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
        """The sum of a weight's gradients, made by the first call."""
        if weight.ref() not in self._sums:
            with tf.init_scope():
                zeros = tf.zeros(weight.shape, weight.dtype)
                self._sums[weight.ref()] = tf.Variable(zeros, trainable=False, name="gradient_sums/sum")
        return self._sums[weight.ref()]
