"""PipelinedModel: a Keras model with a schedule, which lays out its training step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, keras_api, tf
from tf_fusedrec.embedding import check_names, embeddings_of
from tf_fusedrec.embedding.row_movement import RowMovement
from tf_fusedrec.exchange import collectives, dense_gradients, model_state
from tf_fusedrec.metrics.streaming import check_summable, of_batch, summed_over_ranks
from tf_fusedrec.schedules import one_keras
from tf_fusedrec.schedules.feed import EqualSteps, Feed, averaged, concatenated, direct_step, last, steps_at_once
from tf_fusedrec.schedules.planned_calls import EmbeddingCall, calls_of_graph, calls_until_first
from tf_fusedrec.schedules.schedule import Schedule, get, serialize
from tf_fusedrec.schedules.uneven_batches import WHOLE, MeanOverSamples, MicroBatch, are_sums
from tf_fusedrec.tables.keras_savers import refuse_fit, refuse_optimizer, states_of

if KERAS_IS_LEGACY:
    from tf_fusedrec.schedules.legacy_inputs import equal_lengths
else:
    from tf_fusedrec.schedules.keras_3_inputs import equal_lengths


class PipelinedModel(MeanOverSamples, keras.Model):
    """A keras.Model with one more argument; compile, fit, callbacks, evaluate and predict are Keras' own.

    On several ranks, losses and metrics of an epoch, of a validation and of `evaluate` cover the samples of all ranks.
    Logs inside an epoch cover this rank. A loss that compile gets is trained as the mean over the samples of all ranks,
    however uneven their batches. Override `loss_weights` for other weights of ranks and micro-batches. A compute_loss
    of one's own ends with losses.global_mean.

    The model is functional, `PipelinedModel(inputs, outputs, schedule=FrozenWindow(4))`, or a subclass with a `call`,
    which passes `schedule` on. The schedule may be changed between runs of `compile`.

    Args:
      schedule: A record of tf_fusedrec.schedules, or its name: "sync", "nested", "nested(8)".
      others: As for keras.Model.

    Raises:
      ValueError: an unknown schedule, tables that cannot be trained under it, inputs and outputs given to a subclass.

    Examples:
      >>> item = fr.TableConfig("item", dim=4, optimizer=fr.optimizers.Adagrad(0.1), record_tombstones=True)
      >>> embedding = fr.FusedEmbedding([fr.FeatureConfig("item", item)])
      >>> inputs = {"item": keras.Input([], dtype=tf.int64, name="item")}
      >>> score = keras.layers.Dense(1)(embedding(inputs)["item"])
      >>> model = fr.schedules.PipelinedModel(inputs, score, schedule="sync")
      >>> model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01)), "mse")
      >>> x, y = {"item": np.arange(32) % 8}, np.ones([32, 1], "float32")
      >>> history = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["loss"]
      >>> history[1] < history[0]
      True
    """

    train_function: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> PipelinedModel:
        # Keras makes a subclass functional by a change of its base classes, after which the class is good for
        # functional models only. So functional models have another class.
        if cls is PipelinedModel and _is_functional(args, kwargs):
            cls = FunctionalPipelinedModel
        return super().__new__(cls)

    def __init__(self, *args: Any, schedule: Schedule | str = "sync", **kwargs: Any):
        if _is_functional(args, kwargs) and not isinstance(self, FunctionalPipelinedModel):
            raise ValueError(
                f"{type(self).__name__} is a subclass of PipelinedModel and cannot be given inputs and outputs. "
                "Use PipelinedModel(inputs, outputs, schedule=...) itself, or a subclass with a call method."
            )
        super().__init__(*args, **kwargs)
        self._row_movement = RowMovement()
        self.supports_jit = False  # Keras 3 then chooses no jit_compile
        self.schedule = schedule

    @property
    def schedule(self) -> Schedule:
        """The schedule of training steps that are traced from now on."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule | str) -> None:
        schedule = get(schedule)
        schedule.check(self)
        self._schedule = schedule

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As keras.Model.compile.

        Raises:
          ValueError: jit_compile=True, because lookups have no XLA kernels; tables of the model that cannot be trained
            under its schedule; losses of which some are sums over samples and others means; an optimizer that cannot
            accumulate as many steps as the tables, or averages weights over steps (use_ema); objects of the
            other Keras; two FusedEmbeddings of one name.
        """
        if kwargs.get("jit_compile") not in (None, False, "auto"):  # "auto" of Keras 3 compiles no model with tables
            raise ValueError(
                f"Model {self.name!r} got jit_compile=True, but its lookups have no XLA kernels. Use "
                "model.compile(..., jit_compile=False); dense blocks may be compiled by "
                "tf.function(block, jit_compile=True)."
            )
        check_names(self)
        one_keras.check(self, args, kwargs)
        self.schedule.check(self)
        super().compile(*args, **kwargs)
        for embedding in embeddings_of(self):
            if embedding.trainable and embedding.internals.groups:
                refuse_optimizer(embedding.name, self.optimizer)
        are_sums(self)
        self._accumulate_gradients()

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model as it was when it was saved.

        Keras skips every class that overrides `compile`, as this one does. A subclass that overrides `compile` also
        overrides this method.
        """
        if type(self).compile is not PipelinedModel.compile:
            super().compile_from_config(config)  # warns, and leaves the model as it is
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if not KERAS_IS_LEGACY or not isinstance(self.optimizer, keras.optimizers.legacy.Optimizer):  # files have none
            make_optimizer_slots(self)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        with contextlib.ExitStack() as step:
            if isinstance(getattr(self, "optimizer", None), keras.mixed_precision.LossScaleOptimizer):
                for layer in embeddings_of(self):
                    step.enter_context(layer.loss_scaled_by(self.optimizer))
            # A step after the end of an iterator must count nothing, and an optimizer's counter reads no data.
            tensors = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
            step.enter_context(tf.control_dependencies([tf.group(tensors)]))
            return self.schedule.train_step(self, data)

    def make_train_function(self, force: bool = False) -> Callable[[Any], dict[str, tf.Tensor]]:
        """Returns the function that fit calls with an iterator for every step. A user's own loop may call it as well.

        On several ranks, and under a schedule that looks ahead, it reads batches ahead. It raises OutOfRangeError when
        no rank has data any more. Ranks begin with rank 0's weights and slots. Weights that have been trained are
        compared instead.

        Raises:
          ValueError: steps_per_execution "auto" on several ranks.
          RuntimeError: ranks have trained, or have loaded, different weights.
        """
        check_names(self)
        self._accumulate_gradients()  # of layers that were made after compile
        make_optimizer_slots(self)
        self._average_state()  # of a fit that ended in an error
        start_equal(self)
        if self._runs_alone() and not self.schedule.stages.read:
            is_new = self.train_function is None or force
            super().make_train_function(force)
            if is_new and not KERAS_IS_LEGACY and not self.run_eagerly and steps_at_once(self) == 1:
                self.train_function = direct_step(self)
            return self.train_function
        if not isinstance(self.train_function, Feed) or force:
            self.train_function = Feed(self, compiled=not self.run_eagerly)
        return self.train_function

    def drain(self) -> None:
        """Finishes the schedule's updates that must be made before weights or tables are read. Collective.

        It also makes replicas with a late mean equal (Topology.average_late), and averages moving statistics over
        ranks (schedules.average_state). Evaluation, predictions, checkpoints, exports and the end of fit call it.
        Training may go on afterwards. With several groups of ranks it returns when all ranks have called it.
        """
        self._drain_tables()
        self._average_state()
        self._wait_for_other_groups()

    def _drain_tables(self) -> None:
        if isinstance(self.train_function, Feed):
            self.train_function.drain()
        for embedding in embeddings_of(self):
            if embedding.layout.averages_late:
                embedding.synchronize()

    def _wait_for_other_groups(self) -> None:
        """Waits until no rank exchanges any more, because a rank that leaves Horovod aborts the exchanges of others.

        An exchange of all ranks has ended on all ranks when it ends on one. An exchange of one group has not.
        """
        if any(embedding.layout.replicas.size > 1 for embedding in embeddings_of(self)):
            collectives.barrier()

    def _average_state(self) -> None:
        """Averages what the steps since the last call have changed. Ranks make equal numbers of steps."""
        feed = self.train_function
        if collectives.size() > 1 and isinstance(feed, Feed) and feed.has_trained:
            model_state.average_state(self, *feed.trained())

    def make_test_function(self, force: bool = False) -> Callable[[Any], Any]:
        """Returns the function that evaluate calls with an iterator for every step, equally often on all ranks."""
        if self._runs_alone():
            return super().make_test_function(force)
        if not isinstance(self.test_function, EqualSteps) or force:
            self.test_function: Any = self._equal_steps("test", self.test_step)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Callable[[Any], Any]:
        """Returns the function that predict calls with an iterator for every step, equally often on all ranks."""
        if self._runs_alone():
            return super().make_predict_function(force)
        if not isinstance(self.predict_function, EqualSteps) or force:
            self.predict_function: Any = self._equal_steps("predict", self.predict_step)
        return self.predict_function

    def _accumulate_gradients(self) -> None:
        """Lets the optimizer of the dense weights train after as many steps as the tables."""
        steps = {embedding.internals.options.accumulate_steps for embedding in embeddings_of(self)}
        if len(steps) > 1:
            raise ValueError(
                f"FusedEmbeddings of {self.name!r} have accumulate_steps {sorted(steps)}. Use the same number for "
                "all layers of a model."
            )
        if steps and getattr(self, "optimizer", None) is not None:
            dense_gradients.check_steps(self.optimizer, *steps)
            dense_gradients.accumulate(self.optimizer, *steps)

    def _runs_alone(self) -> bool:
        """Returns whether no other rank takes part in the model's steps."""
        if collectives.size() > 1 and getattr(self, "autotune_steps_per_execution", False):
            raise ValueError(
                "steps_per_execution 'auto' is chosen by every rank for itself, so callbacks of ranks would wait for "
                "one another at different steps. Use compile(steps_per_execution=N), the same on all ranks."
            )
        return collectives.size() == 1

    def _equal_steps(self, verb: str, step: Callable[[Any], Any]) -> EqualSteps:
        counter = getattr(self, f"_{verb}_counter", None)  # of tf_keras

        def counted(data: Any) -> Any:
            outputs = step(data)
            if counter is not None:
                counter.assign_add(1)
            return outputs

        put_together = concatenated if verb == "predict" else last
        return EqualSteps(self, f"{self.name}.{verb}.has_data", counted, put_together, compiled=not self.run_eagerly)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As keras.Model.fit. It logs a warning once for each table with rows that hardly move (RowMovement)."""
        if len(args) < 6 and isinstance(kwargs.get("callbacks"), (list, tuple, type(None))):  # no CallbackList
            kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), self._row_movement]
            refuse_fit(self, kwargs["callbacks"])
        try:
            with equal_lengths(self, "fit", args, kwargs) as (args, kwargs):
                history = super().fit(*args, **kwargs)
            self.drain()
        finally:
            if isinstance(self.train_function, Feed):
                self.train_function.forget()
        return history

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.drain()
        with equal_lengths(self, "evaluate", args, kwargs) as (args, kwargs):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self.drain()
        with equal_lengths(self, "predict", args, kwargs) as (args, kwargs):
            predictions = super().predict(*args, **kwargs)
        self._wait_for_other_groups()
        return predictions

    def get_weights(self) -> list[np.ndarray]:
        """As keras.Model.get_weights. With one process the list has a copy of the rows, which set_weights puts back."""
        if collectives.size() == 1:
            self.drain()
        return super().get_weights()

    def set_weights(self, weights: Sequence[Any]) -> None:
        if collectives.size() == 1:
            self.drain()
        super().set_weights(weights)
        dense_gradients.forget(getattr(self, "optimizer", None))

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        self._drain_tables()  # Only rank 0 may save. Moving statistics are averaged at the end of an epoch.
        for state in states_of(self) if str(filepath).endswith((".h5", ".hdf5")) else ():
            state.refuse_hdf5()
        super().save(filepath, *args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        self._drain_tables()
        super().save_weights(*args, **kwargs)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """As keras.Model.compute_metrics. Metrics find the inputs x by name."""
        inputs = x if isinstance(x, Mapping) else {}
        if not inputs and isinstance(self, FunctionalPipelinedModel):
            names = [tensor.name for tensor in tf.nest.flatten(keras_api.symbolic_inputs(self))]
            inputs = dict(zip(names, x if isinstance(x, (list, tuple)) else [x]))
        with of_batch(inputs):
            return super().compute_metrics(x, y, y_pred, sample_weight)

    def get_metrics_result(self) -> dict[str, Any]:
        """This rank's metrics. The trace of the first step refuses metrics that cannot be summed over ranks."""
        if collectives.size() > 1:
            check_summable(self.metrics)
        return super().get_metrics_result()

    def _validate_and_get_metrics_result(self, logs: Any) -> Any:
        return self._logs_of_all_ranks(logs, super()._validate_and_get_metrics_result)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """The same method under its name in Keras 3."""
        return self._logs_of_all_ranks(logs, super()._get_metrics_result_or_logs)

    def _logs_of_all_ranks(self, logs: Any, logs_of_keras: Callable[[Any], Any]) -> Any:
        """Logs of all ranks. Keras asks for them once, at the end of an epoch's training and of an evaluation.

        Metrics are computed from the summed states of all ranks. Logs of a user's own train_step or test_step that are
        not the model's metrics are averaged over ranks.
        """
        if collectives.size() == 1:
            return logs_of_keras(logs)
        self._average_state()
        with summed_over_ranks(self.metrics):
            results = logs_of_keras(logs)
        return averaged(logs) if results is logs else results

    def embedding_inputs(self, x: Any) -> list[EmbeddingCall]:
        """The lookups that a training step of inputs x makes, in their order. A schedule makes them ahead.

        The default cuts a functional model at its lookups. It runs the call of another model until it reaches the one
        FusedEmbedding, which the model must call once. A schedule runs only the ops that the ids depend on. They must
        return the same when the batch computes. Where they depend on the number of the training step, `steps_ahead`
        counts the steps until then. Override this method for other models.

        Raises:
          ValueError: the lookups are unknown.
        """
        calls = calls_of_graph(self, x) if isinstance(self, FunctionalPipelinedModel) else None
        return calls_until_first(self, x) if calls is None else calls

    @property
    def micro_batch(self) -> MicroBatch:  # type: ignore[override]
        """The micro-batch that the model works on, for a compute_loss or call. A whole batch is micro-batch 0.

        `number` is its position, `share` its share of the batch's loss, and `weight` the result of `loss_weights` for
        it, None for a whole batch.
        """
        return self.__dict__.get("_micro_batch", WHOLE)

    @property
    def steps_ahead(self) -> int:
        """Training steps that will begin up to the step of the model's current batch; 0 inside that step."""
        return self.__dict__.get("_steps_ahead", 0)


@keras.saving.register_keras_serializable("tf_fusedrec")
class FunctionalPipelinedModel(PipelinedModel, keras_api.Functional):
    """A PipelinedModel of inputs and outputs, made by PipelinedModel(inputs, outputs). Keras saves and restores it."""

    if KERAS_IS_LEGACY:

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)

        # tf_keras writes the layers into a config only where the constructor has the arguments of its own.
        __init__.__signature__ = inspect.signature(keras_api.Functional.__init__)  # type: ignore[attr-defined]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "schedule": serialize(self.schedule)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> FunctionalPipelinedModel:
        config = dict(config)
        schedule = get(config.pop("schedule"))
        model = super().from_config(config, custom_objects)
        model.schedule = schedule
        return model


def _is_functional(args: tuple, kwargs: dict[str, Any]) -> bool:
    return len(args) >= 2 or "outputs" in kwargs


def make_optimizer_slots(model: keras.Model) -> None:
    """Makes the variables that the optimizer's first step would make. Does nothing for a model without weights.

    TensorFlow traces a function twice if its first trace makes variables. A step of FrozenWindow(M) has the model M
    times, so a second trace would take as long as M traces of another schedule.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if optimizer is None or not model.built:
        return
    keras_api.make_slots(optimizer, model.trainable_variables)
    dense_gradients.make_sums(optimizer, model.trainable_variables)


def start_equal(model: keras.Model) -> None:
    """Calls model_state.equal_start for the model's weights, its state and its optimizer's slots. Collective.

    collectives.distributed_optimizer does so for weights that the first step makes.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if optimizer is not None and model.built:
        weights = [*model_state.dense_weights(model), *model_state.state_of(model)]
        vocabularies = model_state.vocabularies(model)
        if model_state.equal_start(
            [*weights, *keras_api.optimizer_variables(optimizer)], int(optimizer.iterations), vocabularies
        ):
            model_state.finish_adapting(model)
            model.test_function = model.predict_function = None  # they may have traced the constants
