"""Gradients of dense weights: their mean over ranks, and over k steps.

Each rank sums the gradients of k steps and averages the sum over ranks once. Clipping and learning rates also see one
update. FusedEmbedding(accumulate_steps=k) does the same for rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, keras_api, optimizers_in, tf
from tf_fusedrec.exchange import collectives, model_state

Pairs = Iterable[tuple[Any, tf.Variable]]  # gradients and their weights
_SUMS = "_gradient_sums"  # hidden from Keras' tracking: no checkpoint and no comparison of ranks may see the sums


def distributed_optimizer(
    optimizer: keras.optimizers.Optimizer, *, accumulate_steps: int = 1
) -> keras.optimizers.Optimizer:
    """An optimizer for dense weights that averages their gradients over ranks. One process gets `optimizer` itself.

    `fit`, `minimize` and `apply_gradients` all average. The mean weighs ranks equally, not samples. If batches of ranks
    differ in size, use a PipelinedModel or losses.global_mean.

    Rank 0 broadcasts its weights while the first step is traced, before the step runs. An eager loop has no trace, so
    its first gradients belong to each rank's initial weights. Frozen weights and constants that the trace of the first
    step does not read before `apply_gradients` need broadcast_variables. Trained weights are compared instead, and
    RuntimeError names the first that differs.

    Gradients travel while the backward pass goes on. Small ones share a collective.

    Args:
      optimizer: Optimizer of Keras 3, or of tf_keras, of either kind.
      accumulate_steps: k, number of steps per update, which applies their mean gradient, as in FusedEmbedding. A
        PipelinedModel takes k from its layers. Gradients are exchanged once in k steps.

    Raises:
      ValueError: Horovod's DistributedOptimizer averages already; or, under Keras 3, Keras would put the optimizer into
        a LossScaleOptimizer, which calls it on some ranks only.
    """
    if collectives.size() > 1:
        optimizer = averaging(optimizer)
    accumulate(optimizer, accumulate_steps)
    return optimizer


def averaging(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns a new optimizer of the same class and configuration that averages gradients before it applies them.

    All gradients pass one method of the optimizer in every training loop: aggregate_gradients of tf_keras, apply of
    Keras 3. It runs after the tape, before clipping, and before a LossScaleOptimizer checks that values are finite.

    Raises:
      ValueError: Horovod's DistributedOptimizer averages already.
    """
    optimizer_type, inner = type(optimizer), getattr(optimizer, "inner_optimizer", optimizer)
    for part in (optimizer, inner):
        _check_not_of_horovod(type(part))
    if isinstance(inner, _Averaging):
        return optimizer
    scales_loss = isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer)
    if scales_loss and KERAS_IS_LEGACY:
        # It lets its inner optimizer aggregate, and looks for values that are not finite after that.
        return optimizer_type.from_config({**optimizer.get_config(), "inner_optimizer": averaging(inner)})
    if not KERAS_IS_LEGACY and not scales_loss and keras.mixed_precision.global_policy().name == "mixed_float16":
        raise ValueError(
            f"distributed_optimizer got {optimizer_type.__name__} under the policy mixed_float16. Keras would put it "
            "into a LossScaleOptimizer, which does not call it on ranks with an overflow. Use distributed_optimizer("
            "keras.mixed_precision.LossScaleOptimizer(optimizer)), or the policy mixed_bfloat16."
        )
    # The name and module stay, so that a saved optimizer loads without this class.
    module = {"__module__": optimizer_type.__module__}
    mixin = _LegacyAveraging if KERAS_IS_LEGACY else _Keras3Averaging
    averaging_type: Any = type(optimizer_type.__name__, (mixin, optimizer_type), module)
    config = optimizer.get_config()
    if scales_loss:
        return averaging_type(**{**config, "inner_optimizer": type(inner).from_config(inner.get_config())})
    return averaging_type.from_config(config)


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

    def _averages(self, pairs: Sequence[tuple[Any, tf.Variable]]) -> list[tuple[Any, tf.Variable]]:
        self._start_equal([keras_api.tf_variable(variable) for _, variable in pairs])
        means = collectives.average([gradient for gradient, _ in pairs])
        return [(mean, variable) for mean, (_, variable) in zip(means, pairs)]

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
            of_optimizer = map(keras_api.tf_variable, keras_api.optimizer_variables(self))
            slots = [variable for variable in of_optimizer if variable.ref() not in self._known]
            model_state.equal_start([*new, *slots], steps)
            self._known.update(variable.ref() for variable in new)


class _LegacyAveraging(_Averaging):
    def minimize(self, loss: Any, var_list: Any, *args: Any, **kwargs: Any) -> Any:
        # The tape also watches weights of frozen layers, which are in no list of the optimizer.
        for argument in (*args, *kwargs.values()):
            self._start_equal(getattr(argument, "watched_variables", tuple)())
        return super().minimize(loss, var_list, *args, **kwargs)  # type: ignore[misc]

    def aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, tf.Variable]]:
        return self._averages(list(grads_and_vars))

    def _aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, tf.Variable]]:
        """The same method under its name in keras.optimizers.legacy."""
        return self.aggregate_gradients(grads_and_vars)


class _Keras3Averaging(_Averaging):
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        weights = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
        pairs = self._averages(list(zip(grads, weights)))
        super().apply([gradient for gradient, _ in pairs], trainable_variables)  # type: ignore[misc]


def _read_by_step() -> list[tf.Variable]:
    """Floating variables that the traced step has read so far, in the same order on all ranks."""
    graph: Any = tf.compat.v1.get_default_graph()
    watched: dict[int, tf.Variable] = {}
    order: dict[int, int] = {}
    # Keras 3 traces a function inside the step. An outer graph gets the captures of an inner one when it calls it.
    while not tf.executing_eagerly() and hasattr(graph, "_watched_variables"):
        watched.update({id(variable.handle): variable for variable in graph._watched_variables})
        for outside, _ in graph.captures:
            order.setdefault(id(outside), len(order))
        graph = graph.outer_graph
    # TFRA's variables have the rows of a batch, which differ by rank.
    read = {
        handle: variable
        for handle, variable in watched.items()
        if not type(variable).__module__.startswith("tensorflow_recommenders_addons")
        and variable.dtype.is_floating
        and handle in order
    }
    return [read[handle] for handle in sorted(read, key=order.__getitem__)]


def check_steps(optimizer: Any, steps: int) -> None:
    """Raises ValueError if an optimizer of Keras 3, or a part of it, accumulates over other steps than the tables."""
    accumulated = _accumulated(optimizer)
    if accumulated not in ({1}, {steps}):
        numbers = " and ".join(map(str, sorted(accumulated)))
        raise ValueError(
            f"Optimizer {type(optimizer).__name__} has gradient_accumulation_steps {numbers}, and the tables of the "
            f"model accumulate_steps {steps}. Use FusedEmbedding(accumulate_steps={max(accumulated)}), and that number "
            "in all its optimizers."
        )


def _accumulated(optimizer: Any) -> set[int]:
    """The gradient_accumulation_steps of an optimizer of Keras 3, or of its inner ones."""
    parts = optimizers_in(optimizer)
    return {getattr(part, "gradient_accumulation_steps", None) or 1 for part in parts[1:] or parts}


def accumulate(optimizer: Any, steps: int) -> None:
    """Makes the optimizer's apply_gradients change the weights in every k-th call. A second call with k is allowed.

    Args:
      optimizer: Optimizer of Keras 3, or of tf_keras, of either kind. It changes.
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
    if _accumulated(optimizer) != {1}:
        check_steps(optimizer, steps)
        return
    optimizer.__dict__[_SUMS] = sums = _GradientSums(optimizer, steps)
    keras_api.intercept(optimizer, sums.apply_pairs)


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
    """The sums of waiting gradients, and the function before the optimizer's own."""

    def __init__(self, optimizer: Any, steps: int):
        self.steps = steps
        self._optimizer = optimizer
        self._sums: dict[Any, tf.Variable] = {}  # by reference of the weight
        with tf.init_scope():
            self._waiting = tf.Variable(0, dtype=tf.int64, trainable=False, name="gradient_sums/waiting")

    def apply_pairs(self, apply: Callable[[list], Any], pairs: list[tuple[Any, Any]]) -> tf.Tensor:
        """Adds gradients. Every k-th call applies their mean. Returns the optimizer's number of updates."""
        if not KERAS_IS_LEGACY:  # Keras 3 makes slots where they are missing, which must not be inside of tf.cond
            keras_api.make_slots(self._optimizer, [weight for _, weight in pairs])
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
            apply(means)
            self.clear()
            return self._updates()

        return tf.cond(tf.equal(waiting, self.steps), update, self._updates)

    def _updates(self) -> tf.Tensor:
        return tf.identity(keras_api.tf_variable(self._optimizer.iterations))

    def clear(self) -> None:
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))
        self._waiting.assign(0)

    def sum_of(self, weight: Any) -> tf.Variable:
        """The sum of a weight's gradients, made by the first call."""
        variable = keras_api.tf_variable(weight)
        if variable.ref() not in self._sums:
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, variable.dtype)
                self._sums[variable.ref()] = tf.Variable(zeros, trainable=False, name="gradient_sums/sum")
        return self._sums[variable.ref()]
