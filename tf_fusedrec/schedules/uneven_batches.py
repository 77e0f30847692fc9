"""Ranks train batches of different sizes: the loss is the mean over all samples, and empty batches change nothing.

Loss (MTGRBoost, section 5.1). Keras computes the mean over the samples of one rank, and gradients are averaged over
ranks. So rank r multiplies its mean by R n_r / N, for n_r samples of N on R ranks. The average of these products is the
mean over all N samples. The sum N depends on the data only, so its all-reduce runs beside the lookups.

Empty batches. A rank has batches without samples after its data has ended. Micro-batches have no samples where a batch
has fewer samples than micro-batches. Such a batch takes part in the collectives of a step. A layer that divides by the
number of samples makes NaN of it, and the all-reduce would spread it. NaN * 0 is NaN, so everything is selected:

- Gradients are zero, of weights and of rows, before they are summed over micro-batches, steps or ranks.
- Variables that no optimizer trains get their values before the step back: moving averages, counters, metrics. Any
  layer that assigns is covered, because the guard reads variables, not types of layers.
- Logs are the metrics before the step.

On one process the batch of a step is never guarded: its graph is the graph of Keras.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, keras_api, tf
from tf_fusedrec.data.batches import num_samples
from tf_fusedrec.embedding import CallHooks, FusedEmbedding, embeddings_of
from tf_fusedrec.exchange import collectives
from tf_fusedrec.layers import SyncBatchNormalization

# Their state follows from weights or from the samples of all ranks, so all ranks change it alike in every step.
_ALIKE_ON_ALL_RANKS = (FusedEmbedding, keras.layers.SpectralNormalization, SyncBatchNormalization)
_SUMS = ("sum", "none", None)
_BY_WEIGHTS = "mean_with_sample_weight"  # a reduction of Keras 3: the sum over samples by the sum of their weights


class BatchWeight:
    """The weight of a rank's complete batch, <float32>[], and the factor of its loss once compute_loss has made it."""

    def __init__(self, weight: tf.Tensor):
        self.weight = weight
        self.factor: tf.Tensor | None = None


class MicroBatch(NamedTuple):
    """The part of a batch that a model is working on."""

    number: int  # position of the piece in the batch; 0 for a batch that is not cut
    share: Any  # <float32>[] or 1.0: the piece's share of the batch's loss; shares of a batch sum to 1
    weight: Any = None  # <float32>[], from PipelinedModel.loss_weights; None for a batch that is not cut
    batch: BatchWeight | None = None  # of all micro-batches together; None for a batch that is not cut


WHOLE = MicroBatch(0, 1.0)


@contextlib.contextmanager
def working_on(model: Any, micro_batch: MicroBatch, steps_ahead: int = 0) -> Iterator[None]:
    """Sets `micro_batch` and `steps_ahead` of a PipelinedModel inside."""
    # Keras' __setattr__ would track the tuple.
    model.__dict__.update(_micro_batch=micro_batch, _steps_ahead=steps_ahead)
    try:
        yield
    finally:
        del model.__dict__["_micro_batch"], model.__dict__["_steps_ahead"]


class _SelectedGradients(CallHooks):
    """Replaces the selection of an outer guard: a micro-batch has no samples where its batch has none."""

    def __init__(self, select: Callable[[tf.Tensor], tf.Tensor]):
        self._select = select

    def gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        return self._select(gradient)


class Guard:
    """A context of the forward and backward pass of one batch or micro-batch `data`, which may have no samples.

    Inside, optimizers of the model get selected gradients, and so do its tables. At the end, variables get their values
    back. `gradient` and `logs` select what does not pass through an optimizer.
    """

    def __init__(self, model: Any, data: Any):
        self.data = data
        self._model = model
        self._has_samples = num_samples(data) > 0
        self._before: dict[Any, tf.Tensor] = {}  # values of variables, by reference
        self._replaced = contextlib.ExitStack()
        self._anchors = {
            keras_api.tf_variable(weight).ref() for embedding in embeddings_of(model) for weight in embedding.weights
        }

    def __enter__(self) -> Guard:
        self._before = {variable.ref(): variable.read_value() for variable in _variables(self._model)}
        if tf.executing_eagerly():  # a graph that makes variables is traced again
            self._replaced.enter_context(tf.variable_creator_scope(self._create))
        for embedding in embeddings_of(self._model):
            self._replaced.enter_context(embedding.internals.using(_SelectedGradients(self._selected)))
        for optimizer in _optimizers(self._model):
            self._replaced.callback(keras_api.intercept(optimizer, self._apply_selected))
        return self

    def __exit__(self, error_type: Any, *_: Any) -> None:
        self._replaced.close()
        if error_type is not None:
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
        if gradient is None or keras_api.tf_variable(weight).ref() in self._anchors:
            return gradient
        # Horovod and the timeline take the name of the tensor for the all-reduce.
        name = "gradient_of/" + re.sub(r"[^A-Za-z0-9_./-]", "_", keras_api.variable_name(weight).split(":")[0])
        if isinstance(gradient, tf.IndexedSlices):
            values = self._selected(gradient.values, name)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return self._selected(gradient, name)

    def logs(self, logs: Any) -> Any:
        """The logs of the step, after the context. Without samples they are the metrics, and 0 for NaN."""
        if not isinstance(logs, dict):
            return logs
        kept = self._model.get_metrics_result()
        if set(kept) != set(logs):  # of a user's own step; its "loss" is seldom the metric of that name
            for metric in keras_api.loss_metrics(self._model):
                kept.pop(metric.name, None)

        def select(name: str, value: Any) -> Any:
            if isinstance(value, dict):
                return {key: select(key, item) for key, item in value.items()}
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

    def _apply_selected(self, apply: Callable[[list], Any], pairs: list[tuple[Any, Any]]) -> Any:
        return apply([(self.gradient(gradient, weight), weight) for gradient, weight in pairs])

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
    alike = {keras_api.tf_variable(variable).ref() for variable in getattr(model, "alike_on_all_ranks", ())}
    weights = [
        weight
        for layer in model._flatten_layers()
        if not isinstance(layer, _ALIKE_ON_ALL_RANKS)
        for weight in keras_api.own_weights(layer)
        if not weight.trainable  # all ranks hold the others alike, and compare them
    ]
    metrics = [*model.metrics, *keras_api.metrics_of_compile(model)]
    of_metrics = [variable for metric in metrics for variable in metric.variables]
    variables = map(keras_api.tf_variable, [*weights, *of_metrics])
    return list({variable.ref(): variable for variable in variables if variable.ref() not in alike}.values())


def _optimizers(model: Any) -> list[Any]:
    """The optimizers of `compile` and of a user's own train_step."""
    values = [getattr(model, "optimizer", None), *vars(model).values()]
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return list({id(item): item for item in items if isinstance(item, keras_api.OPTIMIZERS)}.values())


STEPS = ("train_step", "test_step", "predict_step")


class MeanOverSamples:
    """Mixin of keras.Model: the loss of `compile`, and of add_loss, is the mean over the samples of all ranks.

    Losses with the reduction "sum" or "none" are sums over samples and stay as they are. Every call of compute_loss in
    training is collective. A subclass that overrides compute_loss without a call of super() has its own loss.
    """

    loss: Any
    name: str
    micro_batch: MicroBatch

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for step in STEPS:
            if step in vars(cls):  # of the package or of a user
                setattr(cls, step, guarded(vars(cls)[step]))

    def __setattr__(self, name: str, value: Any) -> None:
        """As Keras' own. A user's step of this model alone, a function of data, is guarded like that of a class."""
        if name not in STEPS:
            super().__setattr__(name, value)
            return

        def step(_: Any, data: Any) -> Any:
            return value(data)

        step.__name__ = name
        super().__setattr__(name, types.MethodType(guarded(step), self))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As Keras' own, which has one more argument in Keras 3. An override may have the first four."""
        data, batch = keras.utils.pack_x_y_sample_weight(x, y, sample_weight), self.micro_batch.batch
        is_part = collectives.size() > 1 or batch is not None
        with keras_api.weighing_outputs(self, lambda: num_samples(data)) if is_part else contextlib.nullcontext():
            loss = super().compute_loss(x, y, y_pred, sample_weight, *args, **kwargs)  # type: ignore[misc]
        if collectives.size() == 1 or loss is None or self.__dict__.get("_evaluates") or are_sums(self):
            return loss
        if batch is None:
            batch = BatchWeight(tf.reduce_sum(self.loss_weights([data])))
        if batch.factor is None:  # the first micro-batch
            batch.factor = _factor(self, batch.weight)
        if not KERAS_IS_LEGACY:
            self.__dict__["_mean_loss"] = loss  # for mean_loss
        return loss * tf.cast(batch.factor, loss.dtype)

    @guarded
    def train_step(self, data: Any) -> Any:
        step = super().train_step  # type: ignore[misc]
        return keras_train_step(self, data) if step.__func__ is keras.Model.train_step else step(data)

    @guarded
    def predict_step(self, data: Any) -> Any:
        return super().predict_step(data)  # type: ignore[misc]

    @guarded
    def test_step(self, data: Any) -> Any:
        self.__dict__["_evaluates"] = True  # metrics weigh batches by themselves
        try:
            return super().test_step(data)  # type: ignore[misc]
        finally:
            del self.__dict__["_evaluates"]

    def loss_weights(self, pieces: Sequence[Any]) -> tf.Tensor:
        """The weight of each micro-batch in the loss: its samples, or their weights where the loss divides by these.

        Override it for another weight, such as the number of tokens where a mask reaches the loss.

        Loss of all ranks = sum of weight * loss of micro-batch / sum of weights, over the micro-batches of all ranks.
        Ones, for a whole batch, weigh ranks equally. A step calls it before anything computes. `micro_batch.weight` has
        the result, for a compute_loss that divides by it.

        Args:
          pieces: M micro-batches, or the whole batch, each as `data` of train_step.

        Returns:
          <float32>[M], >= 0.
        """
        weigh = _weight_of_samples if _divides_by_weights(self) else num_samples
        return tf.stack([tf.cast(weigh(piece), tf.float32) for piece in pieces])


def keras_train_step(model: Any, data: Any) -> Any:
    """keras.Model.train_step. In Keras 3 its metric "loss" counts the mean over the samples of this rank."""
    if KERAS_IS_LEGACY:
        return keras.Model.train_step(model, data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred = keras_api.call_model(model, x)
        loss = model.compute_loss(x, y, y_pred, sample_weight)
        scaled = model.optimizer.scale_loss(loss)
    keras_api.track_loss(model, mean_loss(model, loss), lambda: num_samples(data))
    weights = model.trainable_weights
    keras_api.apply_gradients(model.optimizer, loss, tape.gradient(scaled, weights), weights)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def mean_loss(model: Any, loss: tf.Tensor) -> tf.Tensor:
    """The mean over the samples of this rank, of which compute_loss has made `loss`."""
    return model.__dict__.pop("_mean_loss", loss)


def _factor(model: Any, weight: tf.Tensor) -> tf.Tensor:
    """R * weight / (weight of all R ranks of the loss), <float32>[]; 1 where no rank has any."""
    sets = {embedding.layout.loss_ranks for embedding in embeddings_of(model)} or {collectives.world()}
    if len(sets) > 1:
        raise ValueError(
            f"FusedEmbeddings of {model.name!r} have topologies whose losses cover different ranks, "
            f"{[ranks.members for ranks in sets]}. Use the same topology for all layers of a model."
        )
    (ranks,) = sets
    name = f"{model.name}.samples"
    if not tf.executing_eagerly():  # calls of one step must differ; eager calls run one after another
        name = tf.compat.v1.get_default_graph().unique_name(name)
    total = collectives.all_reduce_sum(weight, name=name, ranks=ranks)
    return tf.where(total > 0, ranks.size * tf.math.divide_no_nan(weight, total), 1.0)


def are_sums(model: Any) -> bool:
    """Returns whether the losses of `compile` are sums over samples. Raises ValueError: some are, others are means."""
    losses = _losses(model)
    sums = [loss for loss in losses if getattr(loss, "reduction", "mean") in _SUMS]
    if sums and len(sums) < len(losses) and collectives.size() > 1:
        raise ValueError(
            f"Losses of {model.name!r} are sums over samples, {[loss.name for loss in sums]}, and means, which "
            "ranks weigh differently. Use the reduction 'sum_over_batch_size' for all of them."
        )
    return bool(sums)


def _losses(model: Any) -> list[Any]:
    return [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if loss is not None]


def _divides_by_weights(model: Any) -> bool:
    """Returns whether the loss of `compile` divides by the sum of sample weights. Raises ValueError for several."""
    losses = _losses(model)
    divide = any(getattr(loss, "reduction", "mean") == _BY_WEIGHTS for loss in losses)
    if divide and len(losses) > 1:
        raise ValueError(
            f"A loss of {model.name!r} has the reduction {_BY_WEIGHTS!r} beside other losses, so that one weight of a "
            "batch does not suit all. Use the reduction 'sum_over_batch_size', or override loss_weights."
        )
    return divide


def _weight_of_samples(piece: Any) -> tf.Tensor:
    """The sum of the sample weights of a batch, or its number of samples."""
    weights = keras.utils.unpack_x_y_sample_weight(piece)[2]
    return num_samples(piece) if weights is None else tf.reduce_sum(weights)
