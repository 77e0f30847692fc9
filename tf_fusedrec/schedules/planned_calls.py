"""The lookups that a batch will make, found before it computes, and the training step that takes their rows.

    step = plan_step(model, [batch])        which lookups the batch makes
    step = step.send_ids().look_up()        ids to their owners, rows at the owners
    with running(model, step, step.return_rows()):
        ...                                 the training step takes these rows; it trains, or keeps the gradients

The model is traced into a scratch graph up to its lookups. The operations that compute the ids are copied into the
step's graph (ops/ancestors.py). Nothing else of this trace runs, and nothing of it stays in the model's attributes. A
training call flattens its inputs again, because the gradient of feature weights needs the weights of the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, keras_api, tf, unconverted
from tf_fusedrec.embedding import CallHooks, FusedEmbedding, Lookup, Step, embeddings_of
from tf_fusedrec.embedding.features import FlatFeature
from tf_fusedrec.ops.ancestors import ancestors, copied, scratch_graph, stateful, written
from tf_fusedrec.schedules.uneven_batches import WHOLE, MicroBatch, working_on

_CLEARED = () if KERAS_IS_LEGACY else ("_losses", "_loss_ids")  # by _clear_losses
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices, tf.experimental.ExtensionType)
_REMEDY = "Use an embedding_inputs method of the model that gives the calls of a training step"


class EmbeddingCall(NamedTuple):
    """One call of a FusedEmbedding in a training step.

    Examples:
      >>> class Tower(fr.schedules.PipelinedModel):
      ...     def embedding_inputs(self, x):
      ...         return [fr.schedules.EmbeddingCall(self.embedding, {"item": x["item"]})]
    """

    embedding: FusedEmbedding
    inputs: Mapping[str, Any]
    weights: Mapping[str, Any] | None = None
    mask: Mapping[str, Any] | None = None


def required_embeddings(model: Any) -> list[FusedEmbedding]:
    """The FusedEmbedding layers of a model.

    Raises:
      ValueError: the model has none, so a schedule has nothing to hide.
    """
    embeddings = embeddings_of(model)
    if not embeddings:
        raise ValueError(
            f"schedule {model.schedule} hides the exchanges of a FusedEmbedding, and {model.name!r} has none. "
            "Use schedule='sync'."
        )
    return embeddings


def calls_of_graph(model: Any, x: Any) -> list[EmbeddingCall] | None:
    """The calls of a functional model for inputs x, computed by the part of its graph that leads to them.

    Returns None if a FusedEmbedding is inside another model or layer.
    """
    if set(required_embeddings(model)) - set(model.layers):
        return None
    nodes = [node for depth in sorted(model._nodes_by_depth, reverse=True) for node in model._nodes_by_depth[depth]]
    calls = [call for call in map(keras_api.call_of, nodes) if isinstance(call[0], FusedEmbedding)]
    outputs = {}
    for number, (_, args, kwargs) in enumerate(calls):
        arguments = {**dict(zip(("inputs", "weights"), args)), **kwargs}
        by_name = {name: arguments[name] for name in EmbeddingCall._fields if arguments.get(name) is not None}
        # A dict: Keras takes one output out of its list or tuple. Keras 3 calls the layer with a mask of None for each
        # feature, which early releases take for an output.
        if isinstance(mask := by_name.get("mask"), Mapping):
            by_name["mask"] = {feature: value for feature, value in mask.items() if value is not None}
        outputs[str(number)] = by_name
    with tf.init_scope():
        front = keras.Model(keras_api.symbolic_inputs(model), outputs)
    arguments_of = front(x, training=True)
    return [EmbeddingCall(layer, **arguments_of[str(number)]) for number, (layer, *_) in enumerate(calls)]


class _Reached(BaseException):
    """A call reached its FusedEmbedding in this graph, with these inputs, weights and mask.

    A BaseException, because Keras re-raises every Exception as a new one.
    """


class _StopAtCall(CallHooks):
    def call(self, layer: FusedEmbedding, inputs: Any, weights: Any, mask: Any, *, training: bool) -> dict[str, Any]:
        raise _Reached(tf.compat.v1.get_default_graph(), inputs, weights, mask)


def calls_until_first(model: Any, x: Any) -> list[EmbeddingCall]:
    """The call of a model's only FusedEmbedding. Runs the model until it reaches the call.

    Raises:
      ValueError: the model has several FusedEmbeddings, calls its one inside a loop or branch, or never calls it.
    """
    embeddings = required_embeddings(model)
    if len(embeddings) > 1:
        raise ValueError(
            f"{model.name!r} has {len(embeddings)} FusedEmbeddings. Only a run of the model would show which of them a "
            f"batch calls. {_REMEDY}."
        )
    if not (KERAS_IS_LEGACY or model.built):
        keras_api.call_model(model, x)  # Keras 3 builds a model by a call of its own, in another graph
    try:
        with embeddings[0].internals.using(_StopAtCall()):
            keras_api.call_model(model, x)
    except _Reached as reached:
        graph, *arguments = reached.args
    else:
        raise ValueError(f"{model.name!r} never calls its FusedEmbedding for a batch. {_REMEDY}.")
    if graph is not tf.compat.v1.get_default_graph():
        raise ValueError(f"{model.name!r} calls its FusedEmbedding inside of a loop or branch. {_REMEDY}.")
    return [EmbeddingCall(embeddings[0], *arguments)]


def plan_step(model: Any, pieces: Sequence[Any], *, steps_ahead: int = 0, lookups_per_update: int = 1) -> Step:
    """The lookups that a batch will make. Nothing is sent yet. Frozen layers are left out.

    Args:
      pieces: Micro-batches, or the whole batch, as `data` of train_step.
      steps_ahead: See PipelinedModel.steps_ahead.
      lookups_per_update: Steps that look up before the first of them updates.

    Raises:
      ValueError: the lookups are unknown, or the tables cannot be looked up so; ids depend on an operation with
        effects, such as a random number, or on a variable that the step changes.
    """
    for embedding in required_embeddings(model):
        embedding.internals.check_deferrable(lookups_per_update)
    lookups: list[Lookup] = []
    for number, piece in enumerate(pieces):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(piece)
        with working_on(model, MicroBatch(number, WHOLE.share), steps_ahead):
            for embedding, features in _features_ahead(model, x):
                lookups += embedding.internals.lookups_of(features, training=True, micro_batch=number)
    trained = [lookup._replace(lookups_per_update=lookups_per_update) for lookup in lookups if lookup.training]
    return Step(tuple(trained))


def _features_ahead(model: Any, x: Any) -> list[tuple[FusedEmbedding, dict[str, FlatFeature]]]:
    """The layer and the flat ids by feature of each training call for inputs x, without what only outputs need."""
    calls: list[tuple[FusedEmbedding, dict[str, FlatFeature]]] = []

    def trace() -> list[dict[str, tuple[Any, Any]]]:
        calls[:], tensors = _traced_calls(model, x)
        return tensors

    copies = tf.function(unconverted(trace))() if tf.executing_eagerly() else trace()
    changed = []
    for (layer, features), tensors in zip(calls, copies):
        flat = {}
        for name, (ids, row_splits) in tensors.items():
            splits = None if features[name].row_splits is None else row_splits
            flat[name] = features[name]._replace(ids=ids, row_splits=splits, form=ids, weights=None, places=None)
        changed.append((layer, {name: flat[name] for name in features}))
    return changed


def _traced_calls(model: Any, x: Any) -> tuple[list[tuple[FusedEmbedding, dict[str, FlatFeature]]], list[Any]]:
    """The training calls, traced in a scratch graph, and their ids and row_splits by feature, in this graph."""
    scratch, known = scratch_graph("lookups_ahead"), {id(weight.handle) for weight in _weights(model)}
    with _attributes_kept(model, scratch), scratch.as_default():
        calls = [
            (call.embedding, call.embedding.internals.flat_features(call.inputs, call.weights, call.mask))
            for call in model.embedding_inputs(x)
            if call.embedding.trainable
        ]
    tensors = [
        {
            name: (feature.ids, () if feature.row_splits is None else feature.row_splits)
            for name, feature in flat.items()
        }
        for _, flat in calls
    ]
    for (embedding, _), ids in zip(calls, tensors):
        _check_repeatable(model, embedding, scratch, tf.nest.flatten(ids), known)
    return calls, tf.nest.pack_sequence_as(tensors, copied(scratch, tf.nest.flatten(tensors), "lookups_ahead"))


def _weights(model: Any) -> list[tf.Variable]:
    """The weights that the model's layers have. Keras' properties refuse a model with layers that have none yet."""
    return [keras_api.tf_variable(w) for layer in model._flatten_layers() for w in keras_api.own_weights(layer)]


def _check_repeatable(
    model: Any, embedding: FusedEmbedding, scratch: Any, tensors: Sequence[tf.Tensor], known: Collection[int]
) -> None:
    """Raises ValueError unless the ids `tensors` are the same when the batch computes, and have no effects.

    known: Python ids of the handles of variables that the trace did not make. It initializes the others.
    """
    operations = ancestors(scratch, tensors)
    names = {op.name for op in operations}
    read = {id(outer) for outer, inner in scratch.captures if inner.dtype == tf.resource and inner.op.name in names}
    variables = {id(weight.handle): weight.name for weight in _weights(model)}
    assigned = [handle for handle in written(scratch) if id(handle) in known or id(handle) not in variables]
    layers = [layer for layer in model._flatten_layers() if layer.trainable and model.steps_ahead]
    weights = [weight for layer in layers for weight in keras_api.own_weights(layer) if weight.trainable]
    trained = [keras_api.tf_variable(weight).handle for weight in weights]
    causes = [f"the operation {op_type} ({name})" for op_type, name in stateful(scratch, operations)]
    for verb, handles in (("assigns", assigned), ("trains", trained)):
        for handle in handles:
            if id(handle) in read:
                causes.append(f"{variables.get(id(handle), 'a resource')!r}, which the model {verb}")
    if causes:
        raise ValueError(
            f"schedule {model.schedule} computes the ids of {embedding.name!r} before the batch computes, so the step "
            f"runs their inputs twice. They depend on {causes[0]}. Use the data set to compute it, "
            "tf.random.stateless_uniform with a seed in the batch for random numbers, or schedule='sync'."
        )


@contextlib.contextmanager
def _attributes_kept(model: Any, scratch: Any) -> Iterator[None]:
    """Takes back what a trace into the scratch graph leaves in attributes of the model's layers.

    Layers and variables that the trace makes stay. Numbers of a layer that is built get their value back, so that
    counters of eager steps count once.
    """
    before = {}
    for layer in model._flatten_layers():
        values = dict(vars(layer))
        lists = {name: list(value) for name, value in values.items() if isinstance(value, list)}
        contents = lists | {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
        before[id(layer)] = values, contents, layer.built or isinstance(layer, keras.Model)
    try:
        yield
    finally:
        for layer in model._flatten_layers():
            _restore_attributes(layer, scratch, *before.get(id(layer), ({}, {}, False)))
        model._clear_losses()  # those of add_loss


def _restore_attributes(
    layer: Any, scratch: Any, values: dict[str, Any], contents: dict[str, Any], counts: bool
) -> None:
    """contents: copies of the lists and dicts among the values; counts: whether numbers get their values back."""
    for name, value in list(vars(layer).items()):
        old = values.get(name)
        counted = counts and type(value) in (int, float) and type(old) in (int, float) and value != old
        if name == "_callable_losses" and name in values:
            value[:] = contents[name]
        # Names with _self_ are TensorFlow's own lists of the other attributes.
        if name.startswith("_self_") or name in _CLEARED or not (counted or _has_tensor_of(scratch, value)):
            continue
        if name not in values:
            delattr(layer, name)
        else:
            # Keras could not save a list that was changed in place other than by `append`.
            setattr(layer, name, contents.get(name, old) if value is old else old)


def _has_tensor_of(graph: Any, value: Any) -> bool:
    """Whether a value is or contains a tensor of a graph or of a graph inside it."""
    if isinstance(value, Mapping):
        return any(_has_tensor_of(graph, item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_has_tensor_of(graph, item) for item in value)
    # Most attributes are no tensors, for which tf.is_tensor is slow.
    for leaf in tf.nest.flatten(value, expand_composites=True) if isinstance(value, _COMPOSITE) else [value]:
        around = getattr(leaf, "graph", None)
        while around is not None:
            if around is graph:
                return True
            around = getattr(around, "outer_graph", None)
    return False


class RunningStep:
    """A training step with calls that take planned rows, in the order of the plan.

    Attributes:
      step: The planned step, after look_up.
      gradients: None: the calls train at once. Else the gradients of their rows by position of the lookup.
      gate: An op that runs before rows are returned to a call; None: they are returned at once.
    """

    def __init__(self, model: Any, step: Step, rows: Sequence[tf.Tensor]):
        self._model, self.step, self.rows = model, step, rows
        self.gradients: dict[int, tf.Tensor] | None = None
        self.gate: Any = None
        self.hooks = [_RunningCalls(self, embedding) for embedding in required_embeddings(model)]

    def keep_gradients(self) -> dict[int, tf.Tensor]:
        """Lets the calls keep the gradients of their rows, for Step.send_gradients, in place of training.

        Raises:
          ValueError: the loss is scaled, so the gradients would lose their scale while they wait.
        """
        if isinstance(getattr(self._model, "optimizer", None), keras.mixed_precision.LossScaleOptimizer):
            raise ValueError(
                f"gradients of {self._model.name!r} wait under this schedule, and the scale of the loss would be lost. "
                "Use schedule='sync' or DualBuffer, or the policy mixed_bfloat16."
            )
        self.gradients = {}
        return self.gradients


def running_step(model: Any) -> RunningStep | None:
    """The innermost RunningStep of a model with rows that no call has taken yet."""
    run = model.__dict__.get("_running_step")
    return run if run is not None and any(hooks.positions for hooks in run.hooks) else None


@contextlib.contextmanager
def running(model: Any, step: Step, rows: Sequence[tf.Tensor]) -> Iterator[RunningStep]:
    """The training calls inside take these rows, the result of step.return_rows(), in place of looking rows up.

    Raises:
      ValueError: training calls were missing, more than planned, or had other features.
      InvalidArgumentError: at run time, a call had other ids.
    """
    run, before = RunningStep(model, step, rows), model.__dict__.get("_running_step")
    model.__dict__["_running_step"] = run  # Keras' __setattr__ would track it
    try:
        with contextlib.ExitStack() as stack:
            for hooks in run.hooks:
                stack.enter_context(hooks.embedding.internals.using(hooks))
            yield run
    finally:
        model.__dict__["_running_step"] = before
    for hooks in run.hooks:
        if hooks.positions:
            raise ValueError(
                f"{len(hooks.positions)} lookups of {hooks.embedding.name!r} were made ahead and never came in the "
                f"training step. {_REMEDY}."
            )


class _RunningCalls(CallHooks):
    """The calls of one layer in a RunningStep. No call has taken the rows of the lookups at `positions` yet."""

    def __init__(self, run: RunningStep, embedding: FusedEmbedding):
        self._run, self.embedding = run, embedding
        self.positions = [i for i, lookup in enumerate(run.step.lookups) if lookup.group in embedding.internals.groups]
        self._trained = {
            f.name for group in embedding.internals.groups if group.config.trains for f in group.config.features
        }

    def rows(
        self, layer: FusedEmbedding, features: Mapping[str, FlatFeature], *, training: bool
    ) -> tuple[Step, Sequence[tf.Tensor]]:
        planned = {name: feature for name, feature in features.items() if training and name in self._trained}
        unplanned = {name: feature for name, feature in features.items() if name not in planned}
        step, rows = Step(()), []
        if planned:
            positions = self._take(set(planned))
            step, rows = self._run.step.part(positions), [self._checked(planned, i) for i in positions]
        if unplanned:
            other_step, other_rows = super().rows(layer, unplanned, training=training)
            step = Step.joined([step, other_step])
            rows = [*rows, *(self._after_gate(part, None) for part in other_rows)]
        return step, rows

    def train(self, step: Step, gradients: Mapping[int, tf.Tensor]) -> tf.Tensor:
        if self._run.gradients is None:
            return super().train(step, gradients)
        position_of = {id(lookup): i for i, lookup in enumerate(self._run.step.lookups)}
        self._run.gradients.update({position_of[id(step.lookups[i])]: gradient for i, gradient in gradients.items()})
        return tf.zeros([])

    def _take(self, names: set[str]) -> list[int]:
        """The positions of the next lookups, which have these features."""
        taken: list[int] = []
        while self.positions and names and set(self._run.step.lookups[self.positions[0]].features) <= names:
            taken.append(self.positions.pop(0))
            names = names - set(self._run.step.lookups[taken[-1]].features)
        if names:
            raise ValueError(
                f"{self.embedding.name!r} was called with other features, or more often in a training step, than was "
                f"looked up ahead. {_REMEDY}."
            )
        return taken

    def _checked(self, features: Mapping[str, FlatFeature], position: int) -> tf.Tensor:
        """The rows of a planned lookup, after a check that they belong to the ids of the call."""
        message = (
            f"{self.embedding.name!r} was called with other ids in a training step than were looked up ahead. "
            f"{_REMEDY}, with the same ids. Ids that depend on the number of the step take it as step + steps_ahead."
        )
        lookup = self._run.step.lookups[position]
        ids, ids_ahead = [features[name].ids for name in lookup.features], lookup.fused.ids
        same_size = tf.debugging.Assert(
            tf.equal(tf.add_n([tf.size(part) for part in ids]), tf.size(ids_ahead)), [message]
        )
        # Nothing waits for this comparison, because its result must reach the host.
        with lookup.group.id_device(), tf.control_dependencies([] if same_size is None else [same_size]):
            tf.debugging.Assert(tf.reduce_all(tf.equal(tf.concat(ids, 0), ids_ahead)), [message])
        return self._after_gate(self._run.rows[position], same_size)

    def _after_gate(self, rows: tf.Tensor, check: Any) -> tf.Tensor:
        with tf.control_dependencies([op for op in (check, self._run.gate) if op is not None]):
            return tf.identity(rows)
