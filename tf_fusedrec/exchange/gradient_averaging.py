"""Makes a Keras optimizer average its gradients over ranks before it applies them. Knows no Horovod.

Keras aggregates gradients in one method of the optimizer, in every training loop. The call comes after the tape, before
clipping, and before a LossScaleOptimizer looks for values that are not finite. `minimize`, a user's `apply_gradients`
and both kinds of Keras optimizers call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tf_fusedrec._tf_compat import keras, tf

Pairs = Iterable[tuple[Any, tf.Variable]]


def averaging(
    optimizer: keras.optimizers.Optimizer,
    average: Callable[[Any], Any],
    met: Callable[[Sequence[tf.Variable], int], Any],
) -> keras.optimizers.Optimizer:
    """Returns a new optimizer of the same class and configuration that averages gradients before it applies them.

    Args:
      optimizer: Optimizer of tf_keras, of either kind.
      average: Function from this rank's gradient, a tensor or IndexedSlices, to the mean over ranks.
      met: Function of new variables, the optimizer's own among them, and of its number of steps. It is called eagerly
        while the first step is traced, before the step runs.

    Raises:
      ValueError: Horovod's DistributedOptimizer averages already.
    """
    kind = type(optimizer)
    _check_not_of_horovod(kind)
    if isinstance(getattr(optimizer, "inner_optimizer", optimizer), _Averaging):
        return optimizer
    if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        # It lets its inner optimizer aggregate, and looks for values that are not finite after that.
        inner = averaging(optimizer.inner_optimizer, average, met)
        return kind.from_config({**optimizer.get_config(), "inner_optimizer": inner})
    # The name and module stay, so that a saved optimizer loads without this class.
    methods = {"__module__": kind.__module__, "_average": staticmethod(average), "_met": staticmethod(met)}
    made: Any = type(kind.__name__, (_Averaging, kind), methods)
    return made.from_config(optimizer.get_config())


def _check_not_of_horovod(kind: type) -> None:
    if hasattr(kind, "register_local_var"):  # a method of Horovod's DistributedOptimizer alone
        raise ValueError(
            f"Optimizer {kind.__name__} is wrapped by Horovod's DistributedOptimizer and by distributed_optimizer, so "
            "gradients would be averaged twice. Remedy: leave out hvd.DistributedOptimizer."
        )


class _Averaging:
    """The mixin of an optimizer's class."""

    _average: Callable[[Any], Any]
    _met: Callable[[Sequence[tf.Variable], int], Any]
    _known: set[Any]  # references of the variables that `_met` was called with

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
        return [(None if gradient is None else self._average(gradient), variable) for gradient, variable in pairs]

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
            self._met([*new, *own], steps)
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
