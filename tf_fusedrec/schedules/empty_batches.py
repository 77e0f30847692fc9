"""A batch without samples takes part in the collectives of a step and changes nothing.

A rank has such batches when its data ends before the data of other ranks. Micro-batches have no samples where a batch
has fewer samples than micro-batches. A layer that divides by the number of samples makes NaN of them, and the
all-reduce would spread it. NaN * 0 is NaN, so everything is selected:

- Gradients are zero, of weights and of rows, before they are summed over micro-batches, steps or ranks.
- Variables that no optimizer trains get the values back that they had before the step: moving averages, counters,
  metrics. Any layer that assigns is covered, because the guard reads variables and does not ask for kinds of layers.
- Logs are the metrics as they were.

On one process a whole batch is never guarded: its graph is the graph of Keras.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import FusedEmbedding, embeddings_of
from tf_fusedrec.exchange import collectives
from tf_fusedrec.layers import SyncBatchNormalization
from tf_fusedrec.schedules.micro_batch import num_samples

_OPTIMIZERS = (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer)
# Their state follows from weights or from the samples of all ranks, so all ranks change it alike in every step.
_ALIKE_ON_ALL_RANKS = (FusedEmbedding, keras.layers.SpectralNormalization, SyncBatchNormalization)


class Guard:
    """A context of the forward and backward pass of one batch or micro-batch, which may have no samples.

    Inside, optimizers of the model get selected gradients, and so do its tables. At the end, variables get their values
    back. `gradient` and `logs` select what does not pass through an optimizer.

    Args:
      model: A keras.Model.
      data: Its batch, as `data` of train_step.
    """

    def __init__(self, model: Any, data: Any):
        self.data = data
        self._model = model
        self._has_samples = num_samples(data) > 0
        self._before: dict[Any, tf.Tensor] = {}  # values of variables, by reference
        self._replaced = contextlib.ExitStack()
        self._anchors = {weight.ref() for embedding in embeddings_of(model) for weight in embedding.weights}

    def __enter__(self) -> Guard:
        self._before = {variable.ref(): variable.read_value() for variable in _variables(self._model)}
        if tf.executing_eagerly():  # a graph that makes variables is traced again
            self._replaced.enter_context(tf.variable_creator_scope(self._create))
        for embedding in embeddings_of(self._model):
            self._replaced.enter_context(embedding.replacing(gradient=self._selected))
        for optimizer in _optimizers(self._model):
            self._replaced.enter_context(self._selecting(optimizer))
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._replaced.close()
        if kind is not None:
            return
        state = [variable for variable in _variables(self._model) if variable.ref() in self._before]

        def give_back() -> tf.Tensor:
            for variable in state:
                variable.assign(self._before[variable.ref()])
            return tf.constant(False)

        if state:
            tf.cond(self._has_samples, lambda: tf.constant(True), give_back, name="keep_state")

    def gradient(self, gradient: Any, weight: tf.Variable) -> Any:
        """The gradient of a weight, zero where the batch has no samples. An anchor's gradient follows from no batch."""
        if gradient is None or weight.ref() in self._anchors:
            return gradient
        # Horovod and the timeline take the name of the tensor for the all-reduce.
        name = "gradient_of/" + re.sub(r"[^A-Za-z0-9_./-]", "_", weight.name.split(":")[0])
        if isinstance(gradient, tf.IndexedSlices):
            values = self._selected(gradient.values, name)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return self._selected(gradient, name)

    def logs(self, logs: Any) -> Any:
        """The logs of the step, after the context. Without samples they are the metrics, and 0 for NaN."""
        if not isinstance(logs, dict):
            return logs
        kept = self._model.get_metrics_result()
        if set(kept) != set(logs):  # of a user's own step, whose "loss" is seldom the metric of that name
            for metric in getattr(getattr(self._model, "compiled_loss", None), "metrics", []):
                kept.pop(metric.name, None)

        def select(name: str, value: Any) -> Any:
            if isinstance(value, dict):
                return {key: select(key, one) for key, one in value.items()}
            if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
                return value
            metric = kept.get(name)
            if isinstance(metric, tf.Tensor) and (metric.shape, metric.dtype) == (value.shape, value.dtype):
                return tf.where(self._has_samples, value, metric)
            return tf.where(self._has_samples | tf.math.is_finite(value), value, tf.zeros_like(value))

        return select("", logs)

    def _selected(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """The tensor, or zeros. A condition hands it on without a copy, and tf.where does not."""
        tensor = tf.convert_to_tensor(tensor)
        selected = tf.cond(self._has_samples, lambda: tensor, lambda: tf.zeros_like(tensor), name=name)
        selected.set_shape(tensor.shape)
        return selected

    @contextlib.contextmanager
    def _selecting(self, optimizer: Any) -> Iterator[None]:
        """Calls of the optimizer's apply_gradients inside get selected gradients."""
        apply, own = optimizer.apply_gradients, optimizer.__dict__.get("apply_gradients")

        def apply_selected(grads_and_vars: Iterable[tuple[Any, tf.Variable]], *args: Any, **kwargs: Any) -> Any:
            pairs = [(self.gradient(gradient, weight), weight) for gradient, weight in grads_and_vars]
            return apply(pairs, *args, **kwargs)

        optimizer.__dict__["apply_gradients"] = apply_selected
        try:
            yield
        finally:
            del optimizer.__dict__["apply_gradients"]
            if own is not None:
                optimizer.__dict__["apply_gradients"] = own

    def _create(self, create: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        variable = create(**kwargs)
        self._before[variable.ref()] = variable.read_value()
        return variable


def guarded(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Decorator of a train_step, test_step or predict_step: a batch without samples changes nothing.

    Called by another guarded step with the same data, it leaves the work to that step.
    """
    if hasattr(step, "_unguarded"):
        return step

    @functools.wraps(step)
    def run(self: Any, data: Any) -> Any:
        outer = self.__dict__.get("_guard")
        if collectives.size() == 1 or (outer is not None and outer.data is data):
            return step(self, data)
        guard = Guard(self, data)
        self.__dict__["_guard"] = guard  # Keras' __setattr__ would track it
        try:
            with guard:
                answer = step(self, data)
        finally:
            self.__dict__["_guard"] = outer
        return answer if step.__name__ == "predict_step" else guard.logs(answer)

    run._unguarded = step  # type: ignore[attr-defined]
    return run


def _variables(model: Any) -> list[tf.Variable]:
    """The variables that no optimizer trains, but for those that all ranks change alike in every step.

    A model names its own ones in `alike_on_all_ranks`: a counter of steps, or a mean that weighs the loss of all ranks.
    """
    alike = {variable.ref() for variable in getattr(model, "alike_on_all_ranks", ())}
    weights = [
        weight
        for layer in model._flatten_layers()
        if not isinstance(layer, _ALIKE_ON_ALL_RANKS)
        for weight in [*layer._trainable_weights, *layer._non_trainable_weights]
        if not weight.trainable  # all ranks hold the others alike, and compare them
    ]
    # model.metrics lacks those of `compile` before the first step.
    containers = [getattr(model, name, None) for name in ("compiled_loss", "compiled_metrics")]
    of_compile = tf.nest.flatten([list(vars(one).values()) for one in containers if one is not None])
    metrics = [*model.metrics, *(one for one in of_compile if isinstance(one, keras.metrics.Metric))]
    variables = [*weights, *(variable for metric in metrics for variable in metric.variables)]
    return list({variable.ref(): variable for variable in variables if variable.ref() not in alike}.values())


def _optimizers(model: Any) -> list[Any]:
    """The optimizers of `compile` and of a user's own train_step."""
    values = [getattr(model, "optimizer", None), *vars(model).values()]
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return list({id(item): item for item in items if isinstance(item, _OPTIMIZERS)}.values())
