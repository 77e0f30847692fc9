"""Finds the lookups that a batch will make, before it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import FusedEmbedding, embeddings_of


class _Reached(BaseException):
    """A call reached its FusedEmbedding with these (inputs, weights, mask).

    A BaseException, because Keras re-raises every Exception as a new one.
    """


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

    def stop(*arguments: Any) -> None:
        raise _Reached(*arguments)

    try:
        with embeddings[0].replacing(answer=stop):
            model(x, training=True)
    except _Reached as reached:
        call = EmbeddingCall(embeddings[0], *reached.args)
    else:
        raise ValueError(f"{model.name!r} never calls its FusedEmbedding for a batch. {remedy}")
    if not tf.executing_eagerly():
        here = tf.compat.v1.get_default_graph()
        tensors = [leaf for leaf in tf.nest.flatten(call[1:], expand_composites=True) if tf.is_tensor(leaf)]
        if any(tensor.graph is not here for tensor in tensors if hasattr(tensor, "graph")):
            raise ValueError(f"{model.name!r} calls its FusedEmbedding inside of a loop or branch. {remedy}")
    return [call]
