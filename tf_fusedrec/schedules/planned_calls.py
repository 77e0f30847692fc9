"""The lookups that a batch will make, found before it computes, and the training step that takes their rows.

    step = plan(model, [batch])                     which lookups the batch makes
    step = step.send_ids()                          ids to their owners, in one all-to-all; reads no table
    step = step.look_up()                           rows at the owner, as they are now
    rows = step.return_rows()                       rows to the ranks that asked, in the order of micro-batches
    with supplying(model, step, rows):              the training step takes these rows,
        with deferring(model, step, gradients): ... and collects their gradients
    step.update(step.send_gradients(gradients))     gradients to the owners, one update

A training call flattens its inputs again. The plan may be a step old, and the gradient of feature weights needs the
weights of the call.

The model is traced into a scratch graph up to its lookups. The operations that compute the ids are copied into the
step's graph (ops/ancestors.py). Nothing else of this trace runs, and nothing of it stays in the model's attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, tf, unconverted
from tf_fusedrec.embedding import CallHooks, FusedEmbedding, Lookup, Step, embeddings_of
from tf_fusedrec.embedding.features import FlatFeature
from tf_fusedrec.ops.ancestors import ancestors, copied, scratch_graph, stateful, written
from tf_fusedrec.schedules.uneven_batches import WHOLE, MicroBatch


class _Reached(BaseException):
    """A call reached its FusedEmbedding in this graph, with these inputs, weights and mask.

    A BaseException, because Keras re-raises every Exception as a new one.
    """


class _StopAtCall(CallHooks):
    def call(self, layer: FusedEmbedding, inputs: Any, weights: Any, mask: Any, *, training: bool) -> dict[str, Any]:
        raise _Reached(tf.compat.v1.get_default_graph(), inputs, weights, mask)


class EmbeddingCall(NamedTuple):
    """One call of a FusedEmbedding in a training step."""

    embedding: FusedEmbedding
    inputs: Mapping[str, Any]
    weights: Mapping[str, Any] | None = None
    mask: Mapping[str, Any] | None = None


def required_embeddings(model: Any) -> list[FusedEmbedding]:
    """The FusedEmbedding layers of a model.

    Raises:
      ValueError: the model has none, so a schedule has nothing to hide.
    """
    found = embeddings_of(model)
    if not found:
        raise ValueError(
            f"schedule {model.schedule} hides the exchanges of a FusedEmbedding, and {model.name!r} has none. "
            "Remedy: schedule='sync'."
        )
    return found


def calls_of_graph(model: Any, x: Any) -> list[EmbeddingCall] | None:
    """The calls of a functional model for inputs x, computed by the part of its graph that leads to them.

    Returns None if a FusedEmbedding is inside another model or layer.
    """
    if set(required_embeddings(model)) - set(model.layers):
        return None
    nodes = [
        node
        for depth in sorted(model._nodes_by_depth, reverse=True)  # the order in which Keras runs them
        for node in model._nodes_by_depth[depth]
        if isinstance(node.layer, FusedEmbedding)
    ]
    wanted = []
    for node in nodes:
        given = {**dict(zip(("inputs", "weights"), node.call_args)), **node.call_kwargs}
        wanted.append({name: given[name] for name in EmbeddingCall._fields if given.get(name) is not None})
    with tf.init_scope():
        # A tuple: Keras takes a list of one output out of its list.
        front = keras.Model(model._nested_inputs, tuple(wanted))
    return [EmbeddingCall(node.layer, **found) for node, found in zip(nodes, front(x, training=True))]


def calls_until_first(model: Any, x: Any) -> list[EmbeddingCall]:
    """The call of a model's only FusedEmbedding. Runs the model until it reaches the call.

    Raises:
      ValueError: the model has several FusedEmbeddings, calls its one inside a loop or branch, or never calls it.
    """
    remedy = "Remedy: an embedding_inputs method of the model that gives its EmbeddingCalls."
    embeddings = required_embeddings(model)
    if len(embeddings) > 1:
        raise ValueError(
            f"{model.name!r} has {len(embeddings)} FusedEmbeddings. Only a run of the model would show which of them a "
            f"batch calls. {remedy}"
        )

    try:
        with embeddings[0].using(_StopAtCall()):
            model(x, training=True)
    except _Reached as reached:
        graph, *arguments = reached.args
    else:
        raise ValueError(f"{model.name!r} never calls its FusedEmbedding for a batch. {remedy}")
    if graph is not tf.compat.v1.get_default_graph():
        raise ValueError(f"{model.name!r} calls its FusedEmbedding inside of a loop or branch. {remedy}")
    return [EmbeddingCall(embeddings[0], *arguments)]


def features_ahead(model: Any, x: Any) -> list[tuple[FusedEmbedding, dict[str, FlatFeature]]]:
    """The training calls that a step of inputs x will make: each layer, and its flat ids by feature.

    Frozen layers are left out. The features hold what a lookup needs, and neither weights nor the form of the ids.

    Raises:
      ValueError: the lookups are unknown; ids depend on an operation with effects, such as a random number, or on a
        variable that the step changes.
    """
    if not tf.executing_eagerly():
        return _features_ahead(model, x)
    found: list[tuple[FusedEmbedding, dict[str, FlatFeature]]] = []

    def trace() -> list[Any]:
        found[:] = _features_ahead(model, x)
        return [_tensors(features) for _, features in found]

    tensors = tf.function(unconverted(trace))()
    return [(layer, _with_tensors(features, mine)) for (layer, features), mine in zip(found, tensors)]


def _features_ahead(model: Any, x: Any) -> list[tuple[FusedEmbedding, dict[str, FlatFeature]]]:
    scratch, known = scratch_graph("lookups_ahead"), {id(one.handle) for one in _weights(model)}
    with _attributes_kept(model, scratch), scratch.as_default():
        calls = [call for call in model.embedding_inputs(x) if call.embedding.trainable]
        of_calls = [call.embedding.flat_features(call.inputs, call.weights, call.mask) for call in calls]
    for call, features in zip(calls, of_calls):
        _check_repeatable(model, call.embedding, scratch, _tensors(features), known)
    copies = iter(copied(scratch, [tensor for features in of_calls for tensor in _tensors(features)], "lookups_ahead"))
    return [
        (call.embedding, _with_tensors(features, [next(copies) for _ in _tensors(features)]))
        for call, features in zip(calls, of_calls)
    ]


def _tensors(features: Mapping[str, FlatFeature]) -> list[tf.Tensor]:
    """The tensors of some features that a lookup needs."""
    pairs = [(feature.ids, feature.row_splits) for feature in features.values()]
    return [tensor for pair in pairs for tensor in pair if tensor is not None]


def _with_tensors(features: Mapping[str, FlatFeature], tensors: Sequence[tf.Tensor]) -> dict[str, FlatFeature]:
    """The features with other tensors in the order of `_tensors`, without what only outputs need."""
    left = iter(tensors)
    changed = {}
    for name, feature in features.items():
        ids, row_splits = next(left), None if feature.row_splits is None else next(left)
        changed[name] = feature._replace(ids=ids, row_splits=row_splits, form=ids, weights=None, places=None)
    return changed


def _weights(model: Any, *, trained: bool = False) -> list[tf.Variable]:
    """The weights that the model's layers have. Keras' properties refuse a model with layers that have none yet."""
    if trained:
        return [one for layer in model._flatten_layers() if layer.trainable for one in layer._trainable_weights]
    return [
        one for layer in model._flatten_layers() for one in [*layer._trainable_weights, *layer._non_trainable_weights]
    ]


def _check_repeatable(
    model: Any, embedding: FusedEmbedding, scratch: Any, tensors: Sequence[tf.Tensor], known: Collection[int]
) -> None:
    """Raises ValueError unless the ids are the same when the batch computes, and computing them has no effect.

    Args:
      model, embedding: The model and its layer.
      scratch: The graph that the model was traced into.
      tensors: The flat ids.
      known: Python ids of the handles of variables that the trace did not make. It initializes the others.
    """
    operations = ancestors(scratch, tensors)
    names = {op.name for op in operations}
    read = {id(outer) for outer, inner in scratch.captures if inner.dtype == tf.resource and inner.op.name in names}
    variables = {id(one.handle): one.name for one in _weights(model)}
    assigned = [handle for handle in written(scratch) if id(handle) in known or id(handle) not in variables]
    trained = [one.handle for one in _weights(model, trained=True)] if model.steps_ahead else []
    causes = [f"the operation {kind} ({name})" for kind, name in stateful(scratch, operations)]
    for what, handles in (("assigns", assigned), ("trains", trained)):
        for handle in handles:
            if id(handle) in read:
                causes.append(f"{variables.get(id(handle), 'a resource')!r}, which the model {what}")
    if causes:
        raise ValueError(
            f"schedule {model.schedule} computes the ids of {embedding.name!r} before the batch computes, so the step "
            f"runs what they depend on twice. They depend on {causes[0]}. Remedy: compute it in the data set, or draw "
            "random numbers by tf.random.stateless_uniform from a seed in the batch; or schedule='sync'."
        )


@contextlib.contextmanager
def _attributes_kept(model: Any, scratch: Any) -> Iterator[None]:
    """Takes back what a trace into the scratch graph leaves in attributes of the model's layers.

    Layers and variables that the trace makes stay. Numbers of a layer that is built get their value back, so that
    counters of eager steps count once.
    """
    before = {id(layer): _Attributes.of(layer) for layer in model._flatten_layers()}
    try:
        yield
    finally:
        for layer in model._flatten_layers():
            before.get(id(layer), _Attributes({}, {}, False)).restore(layer, scratch)
        model._clear_losses()  # those of add_loss


class _Attributes(NamedTuple):
    """The attributes of a layer before it is traced."""

    values: dict[str, Any]
    contents: dict[str, Any]  # copies of lists and dicts
    counts: bool  # whether its numbers get their values back

    @classmethod
    def of(cls, layer: Any) -> _Attributes:
        values = dict(vars(layer))
        lists = {name: list(value) for name, value in values.items() if isinstance(value, list)}
        contents = lists | {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
        return cls(values, contents, layer.built or isinstance(layer, keras.Model))

    def restore(self, layer: Any, scratch: Any) -> None:
        for name, value in list(vars(layer).items()):
            old = self.values.get(name)
            counted = self.counts and type(value) in (int, float) and type(old) in (int, float) and value != old
            if name == "_callable_losses" and name in self.values:
                value[:] = self.contents[name]
            # Names with _self_ are TensorFlow's own lists of the other attributes.
            if name.startswith("_self_") or not (counted or _holds(value, scratch)):
                continue
            if name not in self.values:
                delattr(layer, name)
            else:
                # Keras could not save a list that was changed in place other than by `append`.
                setattr(layer, name, self.contents.get(name, old) if value is old else old)


def _holds(value: Any, graph: Any) -> bool:
    """Whether a value is or contains a tensor of a graph or of a graph inside it."""
    if isinstance(value, Mapping):
        return any(_holds(item, graph) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds(item, graph) for item in value)
    leaves = tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(value) else [value]
    return any(graph in _around(of_leaf) for leaf in leaves if (of_leaf := getattr(leaf, "graph", None)) is not None)


def _around(graph: Any) -> list[Any]:
    """A graph and the graphs around it."""
    return [] if graph is None else [graph, *_around(getattr(graph, "outer_graph", None))]


def plan(model: Any, pieces: Sequence[Any], *, steps_ahead: int = 0, before_update: int = 1) -> Step:
    """The lookups that a batch will make. All batches have the same plan, but for tensors. Frozen layers are left out.

    Args:
      model: The PipelinedModel.
      pieces: Micro-batches, or the whole batch, as `data` of train_step.
      steps_ahead: See PipelinedModel.steps_ahead.
      before_update: Steps whose lookups come before the update of the first.

    Raises:
      ValueError: the model does not say which lookups it makes, or its tables cannot be looked up so.
    """
    for embedding in required_embeddings(model):
        embedding.check_deferrable(before_update)
    lookups: list[Lookup] = []
    for number, piece in enumerate(pieces):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(piece)
        with model.working_on(MicroBatch(number, WHOLE.share), steps_ahead):
            for embedding, features in features_ahead(model, x):
                lookups += embedding.lookups_of(features, training=True, micro_batch=number)
    return Step(tuple(lookup for lookup in lookups if lookup.training))


@contextlib.contextmanager
def supplying(model: Any, step: Step, rows: Sequence[tf.Tensor]) -> Iterator[None]:
    """The training calls inside take these rows, in the order of the plan, instead of looking rows up.

    Args:
      model: The PipelinedModel.
      step: Its planned step.
      rows: The rows of each lookup.

    Raises:
      ValueError: another number of training calls came, or a call had other features.
      InvalidArgumentError: at run time, a call had another number of ids.
    """
    supplies = {embedding: _SuppliedRows(embedding, step, rows) for embedding in required_embeddings(model)}
    with contextlib.ExitStack() as stack:
        for embedding, supply in supplies.items():
            if supply.coming:
                stack.enter_context(embedding.using(supply))
        yield
    for embedding, supply in supplies.items():
        if supply.coming:
            raise ValueError(
                f"{len(supply.coming)} lookups of {embedding.name!r} were made ahead and never came in the training "
                "step. Use an embedding_inputs method of the model that gives the calls of a training step."
            )


def supplied_step(model: Any) -> Step | None:
    """Inside `supplying`: the planned step, if calls have still to take rows. Else None."""
    for embedding in required_embeddings(model):
        hooks: CallHooks | None = embedding.hooks
        while hooks is not None:
            if isinstance(hooks, _SuppliedRows) and hooks.coming:
                return hooks.step
            hooks = getattr(hooks, "before", None)
    return None


class _SuppliedRows(CallHooks):
    """The training calls of a layer take rows that a schedule has looked up.

    Attributes:
      step: The planned step.
      coming: Positions of the layer's lookups whose rows no call has taken yet.
    """

    def __init__(self, embedding: FusedEmbedding, step: Step, rows: Sequence[tf.Tensor]):
        self.step, self._rows = step, rows
        self.coming = [i for i, lookup in enumerate(step.lookups) if lookup.group in embedding.lookups]

    def rows(
        self, layer: FusedEmbedding, features: Mapping[str, FlatFeature], *, training: bool
    ) -> tuple[Step, Sequence[tf.Tensor]]:
        trained = {f.name for group in layer.lookups if group.config.trains for f in group.config.features}
        missing = [name for name in features if name in trained]
        if not training or not missing:
            return super().rows(layer, features, training=training)
        positions: list[int] = []
        while self.coming and set(self.step.lookups[self.coming[0]].features) <= set(missing):
            positions.append(self.coming.pop(0))
            missing = [name for name in missing if name not in self.step.lookups[positions[-1]].features]
        if missing:
            raise ValueError(
                f"{layer.name!r} was called with other features, or more often in a training step, than was looked up "
                "ahead. Use an embedding_inputs method of the model that gives the calls of a training step."
            )
        step, rows = self.step.part(positions), [self._checked(layer, features, i) for i in positions]
        others = {name: feature for name, feature in features.items() if name not in trained}
        if not others:
            return step, rows
        other_step, other_rows = super().rows(layer, others, training=training)
        return Step.joined([step, other_step]), [*rows, *other_rows]

    def _checked(self, layer: FusedEmbedding, features: Mapping[str, FlatFeature], position: int) -> tf.Tensor:
        """The rows of a planned lookup, after a check that they belong to the ids of the call."""
        message = (
            f"{layer.name!r} was called with other ids in a training step than were looked up ahead. Use an "
            "embedding_inputs method of the model that gives the calls of a training step, with the same ids. Ids that "
            "depend on the number of the step take it as step + steps_ahead."
        )
        lookup = self.step.lookups[position]
        ids, ids_ahead = [features[name].ids for name in lookup.features], lookup.fused.ids
        same = tf.debugging.assert_equal(tf.add_n([tf.size(part) for part in ids]), tf.size(ids_ahead), message)
        # Nothing waits for this comparison, because its result must reach the host.
        with lookup.group.id_device(), tf.control_dependencies([] if same is None else [same]):
            tf.debugging.Assert(tf.reduce_all(tf.equal(tf.concat(ids, 0), ids_ahead)), [message])
        return _after(same, self._rows[position])


@contextlib.contextmanager
def deferring(model: Any, step: Step, gradients: dict[int, tf.Tensor], gate: Any = None) -> Iterator[None]:
    """Calls inside collect the gradients of their rows instead of training, and return rows after a gate.

    Args:
      model: The PipelinedModel.
      step: Its planned step, whose rows the calls take.
      gradients: Collects the gradients by position in `step`, for Step.send_gradients.
      gate: An op or tensor that runs before rows are returned. Lookups and exchanges do not wait for it.

    Raises:
      ValueError: the loss is scaled, so the gradients would lose their scale while they wait.
    """
    if isinstance(getattr(model, "optimizer", None), keras.mixed_precision.LossScaleOptimizer):
        raise ValueError(
            f"gradients of {model.name!r} wait under this schedule, and the scale of the loss would be lost. Use "
            "schedule='sync' or DualBuffer, or the policy mixed_bfloat16."
        )
    positions = {id(lookup): i for i, lookup in enumerate(step.lookups)}
    with contextlib.ExitStack() as stack:
        for embedding in required_embeddings(model):
            stack.enter_context(embedding.using(_KeptGradients(positions, gradients, gate)))
        yield


class _KeptGradients(CallHooks):
    def __init__(self, positions: Mapping[int, int], gradients: dict[int, tf.Tensor], gate: Any):
        self._positions, self._gradients, self._gate = positions, gradients, gate

    def rows(
        self, layer: FusedEmbedding, features: Mapping[str, FlatFeature], *, training: bool
    ) -> tuple[Step, Sequence[tf.Tensor]]:
        step, rows = super().rows(layer, features, training=training)
        return step, [_after(self._gate, part) for part in rows]

    def train(self, step: Step, gradients: Mapping[int, tf.Tensor]) -> tf.Tensor:
        self._gradients.update({self._positions[id(step.lookups[i])]: grad for i, grad in gradients.items()})
        return tf.zeros([])


def _after(gate: Any, rows: tf.Tensor) -> tf.Tensor:
    """`rows` after an op or tensor has run; None: at once."""
    with tf.control_dependencies([] if gate is None else [gate]):
        return tf.identity(rows)
